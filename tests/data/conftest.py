"""Tiny data in the published layouts, made by the tests; nothing here touches the network."""

import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image


def write_image(path: Path, seed: int, size: tuple[int, int] = (20, 16)) -> Path:
    """A PNG or JPEG of random pixels, width x height."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


@pytest.fixture
def image_folder(tmp_path: Path) -> Callable[..., Path]:
    """Makes a folder of `count` images for each class below `part`."""

    def make(classes: tuple[str, ...] = ("cat", "dog"), count: int = 10, part: str = "") -> Path:
        for label, name in enumerate(classes):
            for i in range(count):
                write_image(tmp_path / "set" / part / name / f"{i:02}.png", zlib.crc32(f"{part} {label} {i}".encode()))
        return tmp_path / "set"

    return make
