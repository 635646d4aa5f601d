"""Masks as COCO writes them: polygons, or run lengths down the columns, plain or as a string."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokenmix.errors import UserError, needs

__all__ = ["decode_mask", "encode_mask"]

MOST_BITS = 40


def decode_mask(segmentation: Any, height: int, width: int) -> Tensor:
    """The mask that a `segmentation` of COCO says, bool (H, W).

    Run lengths are checked here, since pycocotools reads beyond its memory where they are too few: a string of two
    letters gave 4,064 pixels of an image of 120.

    Raises:
        UserError: neither polygons nor run lengths, a polygon of fewer than three corners, lengths that do not fill the
            image, or no pycocotools for polygons; without a name of a file, which the caller knows.
    """
    if isinstance(segmentation, Mapping):
        return _from_runs(segmentation, height, width)
    if isinstance(segmentation, list) and segmentation:
        return _from_polygons(segmentation, height, width)
    raise UserError(f"the segmentation is {str(segmentation)[:40]!r}; give polygons or run lengths")


def encode_mask(mask: Tensor) -> dict[str, Any]:
    """A mask bool (H, W) as {"size": [H, W], "counts": string}, which COCO's own tools read."""
    coded = _pycocotools().encode(np.asfortranarray(mask.cpu().numpy().astype(np.uint8)))
    return {"size": [int(side) for side in coded["size"]], "counts": coded["counts"].decode("ascii")}


def _from_runs(segmentation: Mapping[str, Any], height: int, width: int) -> Tensor:
    size = segmentation.get("size")
    if not isinstance(size, list | tuple) or list(size) != [height, width]:
        raise UserError(f"the run lengths are of size {size}, the image has [{height}, {width}]")
    counts = segmentation.get("counts")
    runs = _lengths_of_string(counts) if isinstance(counts, str | bytes) else counts
    if not isinstance(runs, list) or not all(isinstance(run, int) and run >= 0 for run in runs):
        raise UserError("the run lengths do not decode: some are not numbers >= 0")
    if sum(runs) != height * width:
        raise UserError(f"the run lengths do not decode: they fill {sum(runs)} of {height * width} pixels")
    pixels = np.repeat(np.arange(len(runs)) % 2 == 1, runs)
    return torch.from_numpy(np.ascontiguousarray(pixels.reshape(width, height).T))


def _lengths_of_string(coded: str | bytes) -> list[int]:
    """Numbers of five bits a letter, lowest first, with a sign; from the fourth on each is less the last but one."""
    letters = coded.encode("latin-1", "replace") if isinstance(coded, str) else coded
    runs: list[int] = []
    value = shift = 0
    for letter in letters:
        bits = letter - 48
        if not 0 <= bits < 64:
            raise UserError(f"the run lengths do not decode: {chr(letter)!r} is not one of their characters")
        value |= (bits & 31) << shift
        shift += 5
        if shift > MOST_BITS:
            raise UserError("the run lengths do not decode: one has no end")
        if bits & 32:
            continue
        value -= (1 << shift) if bits & 16 else 0
        runs.append(value + (runs[-2] if len(runs) > 2 else 0))
        value = shift = 0
    if shift:
        raise UserError("the run lengths do not decode: the string ends within a number")
    return runs


def _from_polygons(polygons: list[Any], height: int, width: int) -> Tensor:
    for polygon in polygons:
        _check_polygon(polygon, height, width)
    tools = _pycocotools()
    return _from_runs(tools.merge(tools.frPyObjects(polygons, height, width)), height, width)


def _check_polygon(polygon: Any, height: int, width: int) -> None:
    """`UserError` for what pycocotools would not survive: it makes room for each step of the outline, unchecked."""
    reach, told = 2 * max(height, width), str(polygon)[:40]
    numbers = isinstance(polygon, list) and all(isinstance(x, int | float) for x in polygon)
    if not numbers or len(polygon) < 6 or len(polygon) % 2:
        raise UserError(f"the polygon {told} is not a list of three or more corners, x and y each")
    if not all(abs(x) <= reach for x in polygon):
        raise UserError(f"the polygon {told} lies far outside of the image of {width} x {height} pixels")
    corners = np.array(polygon, dtype=np.float64).reshape(-1, 2)
    steps = np.abs(corners - np.roll(corners, 1, axis=0)).max(1).sum()
    if steps > height * width + 8 * reach:
        raise UserError(f"the polygon {told} winds more than the {width} x {height} pixels of the image hold")


def _pycocotools() -> Any:
    with needs("reading COCO's masks"):
        from pycocotools import mask
    return mask
