"""One file to one tensor: depths, modes, orientation, and every kind of broken file."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tokenmix.data.images import read_image
from tokenmix.errors import UserError


def read(image: Image.Image, path: Path, channels: int = 3, size: int | tuple[int, int] = 8, **options) -> torch.Tensor:
    image.save(path, **options)
    return read_image(path, channels, size)


def test_native_size_is_exact(tmp_path: Path):
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    out = read(Image.fromarray(pixels), tmp_path / "a.png")
    assert out.dtype == torch.uint8
    assert torch.equal(out, torch.from_numpy(pixels).permute(2, 0, 1))


@pytest.mark.parametrize(("channels", "size", "shape"), [(1, 8, (1, 8, 8)), (3, (6, 10), (3, 6, 10))])
def test_channels_and_size(tmp_path: Path, channels: int, size, shape: tuple[int, ...]):
    assert read(Image.new("RGB", (33, 17), "red"), tmp_path / "a.png", channels, size).shape == shape


def test_crop_is_about_the_centre(tmp_path: Path):
    image = Image.new("RGB", (24, 8), "red")
    image.paste("blue", (8, 0, 16, 8))
    out = read(image, tmp_path / "a.png", size=8)
    assert (out[2] == 255).all()
    assert (out[0] == 0).all()


def test_downsizing_is_antialiased(tmp_path: Path):
    checks = np.indices((64, 64)).sum(0) % 2 * 255
    out = read(Image.fromarray(checks.astype(np.uint8)), tmp_path / "a.png", 1, 8)
    assert (out.int() - 127).abs().max() <= 4


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_becomes_white(tmp_path: Path, mode: str):
    image = Image.new("RGBA", (8, 8), (0, 0, 0, 0)) if mode != "LA" else Image.new("LA", (8, 8), (0, 0))
    options = {}
    if mode == "P":
        image, options = Image.new("P", (8, 8), 3), {"transparency": 3}
        image.putpalette(range(12))
    assert (read(image, tmp_path / "a.png", **options) == 255).all()


def test_palette(tmp_path: Path):
    image = Image.new("RGB", (8, 8), (10, 200, 30)).convert("P", palette=Image.Palette.ADAPTIVE)
    assert read(image, tmp_path / "a.png")[:, 0, 0].tolist() == [10, 200, 30]


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_sixteen_bits(tmp_path: Path, suffix: str):
    levels = np.full((8, 8), 65535, np.uint16)
    levels[:, :4] = 257 * 100
    out = read(Image.fromarray(levels), tmp_path / f"a.{suffix}", 1)
    assert out[0, 0].tolist() == [100] * 4 + [255] * 4


def test_cmyk(tmp_path: Path):
    out = read(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), tmp_path / "a.jpg")
    assert out[0].min() > 200
    assert out[1:].max() < 60


def test_one_bit(tmp_path: Path):
    assert (read(Image.new("1", (8, 8), 1), tmp_path / "a.png") == 255).all()


def test_orientation(tmp_path: Path):
    image = Image.new("RGB", (8, 8), "black")
    image.paste("white", (0, 0, 8, 4))
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter to the right for display
    out = read(image, tmp_path / "a.png", exif=exif)
    assert (out[:, :, 4:] == 255).all()
    assert (out[:, :, :4] == 0).all()


def test_float_levels(tmp_path: Path):
    assert (read(Image.fromarray(np.full((8, 8), 0.5, np.float32)), tmp_path / "a.tif", 1) == 128).all()
    assert (read(Image.fromarray(np.full((8, 8), 77.0, np.float32)), tmp_path / "b.tif", 1) == 77).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0, 1e4])
def test_float_without_meaning(tmp_path: Path, value: float):
    levels = np.zeros((8, 8), np.float32)
    levels[3, 3] = value
    with pytest.raises(UserError, match=r"a\.tif holds"):
        read(Image.fromarray(levels), tmp_path / "a.tif")


@pytest.mark.parametrize("size", [1, 8])
def test_one_pixel(tmp_path: Path, size: int):
    assert (read(Image.new("L", (1, 1), 9), tmp_path / "a.png", 1, size) == 9).all()


def test_very_long_image(tmp_path: Path):
    assert (read(Image.new("L", (3000, 1), 9), tmp_path / "a.png", 1, 8) == 9).all()


def test_huge_image_neither_warns_nor_fails(tmp_path: Path, recwarn: pytest.WarningsRecorder):
    limit = Image.MAX_IMAGE_PIXELS
    # Pillow's shrinking by a factor of a thousand rounds a little below white.
    assert (read(Image.new("1", (20_000, 10_000), 1), tmp_path / "a.png", 1) >= 250).all()
    assert not recwarn.list
    assert limit == Image.MAX_IMAGE_PIXELS


def test_too_many_pixels_are_refused_before_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tokenmix.data.images.decode.MAX_PIXELS", 50)
    with pytest.raises(UserError, match="8 x 8 pixels, more than 50"):
        read(Image.new("L", (8, 8)), tmp_path / "a.png")


@pytest.mark.parametrize("mode", ["I;16", "RGBA", "F"])
def test_what_is_converted_takes_little_more_than_what_is_kept(tmp_path: Path, mode: str):
    """A PNG of 92 kB with 16 bits took 1.1 GB, for an image of 64 x 64."""
    side = 2000
    image = Image.new("RGBA", (side, side)) if mode == "RGBA" else Image.fromarray(
        np.zeros((side, side), np.uint16 if mode == "I;16" else np.float32)
    )  # fmt: skip
    path = tmp_path / "a.tif"
    image.save(path, compression="tiff_adobe_deflate")
    # Of NumPy's arrays: Pillow's own memory, 4 bytes a pixel at most, is not seen.
    tracemalloc.start()
    try:
        read_image(path, 3, 64)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 10 * side**2


@pytest.mark.parametrize("mode", ["I;16", "RGBA", "F", "P"])
def test_parts_make_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str):
    rng = np.random.default_rng(0)
    if mode in ("I;16", "F"):
        levels = rng.integers(0, 256, (40, 30))
        image = Image.fromarray((levels * 257).astype(np.uint16) if mode == "I;16" else levels.astype(np.float32))
    else:
        image = Image.fromarray(rng.integers(0, 256, (40, 30, 4), dtype=np.uint8), "RGBA")
        image = image.convert("P") if mode == "P" else image
    whole = read(image, tmp_path / "a.tif", size=(40, 30))
    monkeypatch.setattr("tokenmix.data.images.decode.PART_PIXELS", 100)
    assert torch.equal(read_image(tmp_path / "a.tif", 3, (40, 30)), whole)


def test_unicode_path(tmp_path: Path):
    folder = tmp_path / "猫 Ünïcode"
    folder.mkdir()
    assert read(Image.new("L", (8, 8), 5), folder / "图片 ☂.png", 1).sum() == 5 * 64


def broken(path: Path, kind: str) -> Path:
    noise = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    if kind == "folder":
        path.mkdir()
    elif kind in ("png", "jpeg", "webp"):
        Image.fromarray(noise).save(path, kind)
        path.write_bytes(path.read_bytes()[:600])
    elif kind != "missing":
        path.write_bytes(
            {"empty": b"", "text": b"hello\n" * 50, "svg": b"<svg></svg>", "eps": b"%!PS-Adobe-3.0 EPSF"}[kind]
        )
    return path


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("missing", "does not exist"),
        ("folder", "is a folder"),
        ("empty", "is empty"),
        ("text", "is not an image"),
        ("svg", "is not an image"),
        ("eps", "is not an image"),
        ("png", "truncated|cannot be decoded"),
        ("jpeg", "truncated"),
        ("webp", "cannot be decoded|is not an image|truncated"),
    ],
)
def test_broken_file_is_named_in_one_line(tmp_path: Path, kind: str, reason: str):
    path = broken(tmp_path / "photo.png", kind)
    with pytest.raises(UserError, match=reason) as caught:
        read_image(path, 3, 8)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("size", [0, -3, (4, 0)])
def test_impossible_size(tmp_path: Path, size):
    with pytest.raises(UserError, match="img_size must be at least 1"):
        read(Image.new("L", (8, 8)), tmp_path / "a.png", 1, size)
