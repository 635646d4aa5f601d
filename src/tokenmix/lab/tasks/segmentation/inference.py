"""Logits of images of any size: whole, in tiles, in windows, at several scales, mirrored."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise, product
from math import isqrt
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tokenmix.errors import UserError, one_line
from tokenmix.lab.tasks.images import both_sides, window_starts
from tokenmix.lab.tasks.segmentation import Inference
from tokenmix.layers.external import ExternalAttention2d
from tokenmix.models.segmentation import Segmenter

# The largest image that is seen whole, in pixels and in logits, and a tile of larger ones, in pixels.
WHOLE = (1 << 22, 1 << 28)
TILE = 1 << 18
# What way=whole takes at most.
MOST_WHOLE = 1 << 26


class _Foreign:
    """A segmenter from elsewhere, called as ours are: for images of any size."""

    fixed_size, context = False, None

    def __init__(self, model: nn.Module, num_classes: int, img_size: tuple[int, int]) -> None:
        self.model, self.num_classes, self.img_size = model, num_classes, img_size

    def __call__(self, images: Tensor) -> Tensor:
        try:
            logits: Tensor = self.model(images)
        except Exception as error:  # whatever a stranger's forward pass may raise
            size = tuple(images.shape[2:])
            if size == self.img_size:
                raise
            raise UserError(
                f"the model does not run on images of {size[0]} x {size[1]} ({one_line(error)}); give --way sliding"
            ) from error
        return logits


def as_segmenter(model: nn.Module, num_classes: int, img_size: Sequence[int]) -> Segmenter:
    """The model, if it is one of ours; else the same calls for one from elsewhere."""
    ours = hasattr(model, "fixed_size")
    return cast(Segmenter, model if ours else _Foreign(model, num_classes, (img_size[0], img_size[1])))


def own_rows(model: Segmenter, x: Tensor, dim: int) -> Tensor:
    """The rows of x, along `dim`, that the model gives logits of: under token parallelism this process's, else all."""
    own: Any = getattr(model, "own_rows", None)
    return x if own is None else own(x, dim)


def all_rows(model: Segmenter, logits: Tensor) -> Tensor:
    """The logits (B, C, H, W) of all rows."""
    gather: Any = getattr(model, "all_rows", None)
    return logits if gather is None else gather(logits)


@dataclass(frozen=True)
class Tile:
    """A part of an image: the rows and columns that a model sees, and those that its answer is kept for."""

    seen: tuple[slice, slice]
    kept: tuple[slice, slice]

    @property
    def inner(self) -> tuple[slice, slice]:
        """What is kept, counted from the corner of what is seen."""
        rows, columns = (slice(k.start - s.start, k.stop - s.start) for s, k in zip(self.seen, self.kept, strict=True))
        return rows, columns


def tiles(model: Segmenter, size: tuple[int, int], how: Inference, *, shared: bool = False) -> list[Tile]:
    """The tiles of an image of this height and width; one, the whole, up to `WHOLE`, with way=whole, and where several
    processes share images, since they split them for that.

    Neighbours overlap by an eighth, and each is kept up to the middle of that. Memory is that of a tile, however large
    the image is.

    Raises:
        UserError: way=whole of more than `MOST_WHOLE` pixels.
    """
    pixels, whole = size[0] * size[1], (slice(0, size[0]), slice(0, size[1]))
    if how.way == "whole" and pixels > MOST_WHOLE and not shared:
        raise UserError(
            f"{size[1]} x {size[0]} pixels at once are more than {MOST_WHOLE:,}; omit way=whole for an answer in tiles"
        )
    if shared or how.way == "whole" or pixels <= min(WHOLE[0], WHOLE[1] // model.num_classes):
        return [Tile(whole, whole)]
    side = isqrt(TILE)
    window = both_sides(how.window) if how.window else model.img_size

    def spans(length: int, side: int) -> list[tuple[slice, slice]]:
        starts = window_starts(length, side, max(1, side - side // 8))
        edges = [0, *((left + side + right) // 2 for left, right in pairwise(starts)), length]
        seen = (slice(start, min(start + side, length)) for start in starts)
        return list(zip(seen, (slice(*kept) for kept in pairwise(edges)), strict=True))

    rows, columns = (spans(length, max(side, least)) for length, least in zip(size, window, strict=True))
    return [Tile((row[0], column[0]), (row[1], column[1])) for row, column in product(rows, columns)]


@torch.no_grad()
def pixel_logits(model: Segmenter, images: Tensor, how: Inference) -> Tensor:
    """(B, classes, H, W) for images (B, C, H, W) of any size; under token parallelism of this process's rows.

    With test-time augmentation these are logarithms of mean probabilities, whose softmax is the mean again.

    Raises:
        UserError: the whole image is asked for and the model takes only one size, or windows that leave gaps.
    """
    looks = list(product(how.scales, (False, True) if how.mirror == "yes" else (False,)))
    if looks == [(1.0, False)]:
        return _look(model, images, how)
    total: Tensor | None = None
    for scale, mirrored in looks:
        seen = images.flip(-1) if mirrored else images
        if scale != 1.0:
            size = [max(1, round(side * scale)) for side in images.shape[2:]]
            seen = F.interpolate(seen, size=size, mode="bilinear", align_corners=False, antialias=True)
        logits = all_rows(model, _look(model, seen, how))
        if logits.shape[2:] != images.shape[2:]:
            logits = F.interpolate(logits, size=images.shape[2:], mode="bilinear", align_corners=False)
        shares = (logits.flip(-1) if mirrored else logits).softmax(1)
        total = shares if total is None else total.add_(shares)
    assert total is not None
    return own_rows(model, total.div_(len(looks)).clamp_min_(1e-12).log_(), 2)


def _look(model: Segmenter, images: Tensor, how: Inference) -> Tensor:
    if how.way == "whole" and model.fixed_size and tuple(images.shape[2:]) != model.img_size:
        raise UserError(
            f"the model takes images of {model.img_size[0]} x {model.img_size[1]} only, got "
            f"{images.shape[2]} x {images.shape[3]}; omit way=whole, or give way=sliding"
        )
    if how.way == "sliding" or (how.way == "auto" and model.fixed_size):
        return _sliding(model, images, how)
    with _streaming(model, images, how.chunk_size):
        return model(images).float()


@contextmanager
def _streaming(model: Segmenter, images: Tensor, chunk_size: int) -> Iterator[None]:
    """External attention in chunks while this lasts, if the map is larger than one."""
    block, places = model.context, images.shape[2] * images.shape[3]
    if not isinstance(block, ExternalAttention2d) or not (
        0 < chunk_size < places // model.feature_info[-1]["reduction"] ** 2
    ):
        yield
        return
    before = block.memory.options
    block.memory.options = {**before, "chunk_size": chunk_size}
    try:
        yield
    finally:
        block.memory.options = before


def _sliding(model: Segmenter, images: Tensor, how: Inference) -> Tensor:
    window = both_sides(how.window) if how.window else model.img_size
    if model.fixed_size and window != model.img_size:
        raise UserError(
            f"the model takes windows of {model.img_size[0]} x {model.img_size[1]} only, got {window}; leave window out"
        )
    stride = both_sides(how.stride) if how.stride else (max(1, 2 * window[0] // 3), max(1, 2 * window[1] // 3))
    if stride[0] > window[0] or stride[1] > window[1]:
        raise UserError(f"a stride of {stride} leaves gaps between windows of {window}; give at most the window")
    height, width = images.shape[2:]
    grown = F.pad(images, (0, max(0, window[1] - width), 0, max(0, window[0] - height)))
    rows, columns = (window_starts(grown.shape[2 + i], window[i], stride[i]) for i in (0, 1))
    total = images.new_zeros(len(images), model.num_classes, *grown.shape[2:], dtype=torch.float32)
    count = images.new_zeros(grown.shape[2:], dtype=torch.float32)
    for top in rows:
        for left in columns:
            place = (..., slice(top, top + window[0]), slice(left, left + window[1]))
            total[place] += all_rows(model, model(grown[place]).float())
            count[place] += 1
    return own_rows(model, total.div_(count)[..., :height, :width], 2)
