"""Attention maps of every variant over test images, as inline SVG with tiny embedded PNGs."""

import base64
import io
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from tokenmix.lab.compare.results import Results
from tokenmix.lab.inspect.maps import Tile

SIDE = 100
# Anchors of the two colour scales: dark to bright for shares, blue through transparent to red for signed gates, as
# `tokenmix.lab.inspect.pictures.SIGNED` has it.
SEQUENTIAL = np.array([(20, 11, 53), (101, 21, 110), (187, 55, 84), (249, 142, 9), (252, 255, 164)], dtype=float)
NEGATIVE, POSITIVE = np.array((47, 111, 237.0)), np.array((226, 67, 45.0))


@dataclass(frozen=True)
class ExampleMaps:
    """What the report shows of one test image: `image` is uint8 (C, H, W); `tiles` by mixer, then by block."""

    index: int
    image: Tensor
    tiles: dict[str, list[list[Tile]]]


@dataclass(frozen=True)
class ShownExample:
    """A test sample as its task shows it: images, or words; `input` is None where the others show it as well."""

    index: int
    input: Image.Image | str | None
    truth: Image.Image | str
    predictions: Mapping[str, Image.Image | str]

    def pictures(self) -> list[tuple[str, bool, str]]:
        """What stands in a row: what it is, whether it is an image, and the words or the image as a data URL."""
        given = {"sample": self.input, "truth": self.truth, **self.predictions}
        return [
            (name, not isinstance(one, str), one if isinstance(one, str) else _data_url(one))
            for name, one in given.items()
            if one is not None
        ]


def _data_url(image: Image.Image) -> str:
    small = image.copy()
    small.thumbnail((240, 240))
    return _png(np.array(small.convert("RGB")))


def example_figure(results: Results, maps: ExampleMaps) -> dict[str, Any]:
    """The page's view of one test image: the image once; for each variant its prediction and the maps of its blocks."""
    name = f"image-{maps.index}"
    known = next(example for example in results.examples if example.index == maps.index)
    rows = []
    for i, variant in enumerate(results.variants):
        if variant.name in maps.tiles:
            label, share = known.answers[variant.name]
            blocks = [
                [(_map_figure(name, tile, f"{variant.name}, block {b}: {tile.label}"), tile.label) for tile in tiles]
                for b, tiles in enumerate(maps.tiles[variant.name], 1)
            ]
            rows.append(
                {
                    "mixer": variant.name,
                    "colour": i % 8,
                    "answer": label if share is None else f"{label}, {share:.0%}",
                    "wrong": label != known.label,
                    "blocks": blocks,
                }
            )
    return {
        "name": name,
        "index": maps.index,
        "label": known.label,
        "store": _shared_image(name, maps.image),
        "rows": rows,
    }


def _shared_image(name: str, image: Tensor) -> str:
    """The image once, to be used by every tile over it."""
    values = image.expand(3, -1, -1) if image.shape[0] == 1 else image[:3]
    source = _png(values.permute(1, 2, 0).numpy())
    body = f'<image id="{name}" width="{SIDE}" height="{SIDE}" preserveAspectRatio="none" href="{source}"/>'
    return f'<svg class="store" aria-hidden="true"><defs>{body}</defs></svg>'


def _map_figure(name: str, tile: Tile, label: str) -> str:
    """One tile over the image."""
    values = tile.values.numpy().astype(float)
    source = _png(_signed(values) if tile.signed else _share(values, tile.on_image))
    under = (
        f'<use href="#{name}" class="under"/>' if tile.on_image else '<rect class="paper" width="100" height="100"/>'
    )
    over = f'<image class="map" width="{SIDE}" height="{SIDE}" preserveAspectRatio="none" href="{source}"/>'
    hint = escape(f"{tile.label}: {tile.values.min():.3g} to {tile.values.max():.3g}")
    drawn = f"{under}{over}{_mark(tile)}<title>{hint}</title>"
    return f'<svg class="strip" viewBox="0 0 {SIDE} {SIDE}" role="img" aria-label="{escape(label)}">{drawn}</svg>'


def _mark(tile: Tile) -> str:
    if tile.mark is None:
        return ""
    height, width = tile.values.shape
    y, x = (tile.mark[0] + 0.5) * SIDE / height, (tile.mark[1] + 0.5) * SIDE / width
    return f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="5"/>'


def _share(values: np.ndarray, on_image: bool) -> np.ndarray:
    """RGBA: each map on its own scale; what is low lets the image through."""
    span = values.max() - values.min()
    scaled = (values - values.min()) / span if span > 0 else np.zeros_like(values)
    places = np.linspace(0, 1, len(SEQUENTIAL))
    colour = np.stack([np.interp(scaled, places, SEQUENTIAL[:, c]) for c in range(3)], -1)
    alpha = (0.35 + 0.5 * scaled) * 255 if on_image else np.full_like(scaled, 255)
    return np.concatenate([colour, alpha[..., None]], -1).round().astype(np.uint8)


def _signed(values: np.ndarray) -> np.ndarray:
    """RGBA: blue below 0, red above, stronger with size, 0 transparent."""
    scaled = values / max(abs(values).max(), 1e-12)
    colour = np.where(scaled[..., None] < 0, NEGATIVE, POSITIVE)
    return np.concatenate([colour, 235 * abs(scaled[..., None])], -1).round().astype(np.uint8)


def _png(pixels: np.ndarray) -> str:
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(buffer, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
