"""Sets of images with labels, all of one size: in memory, or decoded each time they are read."""

import contextlib
import copy
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from timm.data.transforms import RandomResizedCropAndInterpolation
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from tokenmix.errors import UserError
from tokenmix.lab.data.fetch import log
from tokenmix.lab.data.images.decode import Box, UnreadableImage, decode, decode_part, stored_size
from tokenmix.lab.data.indexed import shared_permutation
from tokenmix.lab.data.reading import LeftOut
from tokenmix.lab.data.seeding import hash_indices, restored_random_state, seed_all

CHANNELS = 3
# timm's own if a model states none.
CROP_PCT = 0.875
# Of `hash_indices`.
RANDOM_CROP = 1
# Images whose sizes are looked at, and by how much the median may be scaled down without a word.
SIZES_SEEN, SHRINKING = 16, 2


@dataclass(frozen=True)
class Skipped:
    """A file that was left out, and why."""

    path: str
    reason: str


def log_skipped(skipped: Sequence[Skipped], unit: str, where: str = "") -> None:
    """Count on stderr what was left out, and name the first three."""
    if skipped:
        first = "; ".join(f"{s.path} {s.reason}" for s in skipped[:3])
        more = "; …" * (len(skipped) > 3)
        log(f"{len(skipped)} {unit}{'s' * (len(skipped) > 1)}{where} left out: {first}{more}")


def warn_of_shrinking(source: Callable[[int], Path | bytes], count: int, size: tuple[int, int]) -> None:
    """Say on stderr if `size` shows less than half of the pixels a side that the images have."""
    found: list[tuple[int, int]] = []
    for index in {place * count // SIZES_SEEN for place in range(SIZES_SEEN)} if count else ():
        with contextlib.suppress(UnreadableImage):
            found.append(stored_size(source(index)))
    if not found:
        return
    height, width = sorted(found, key=min)[len(found) // 2]
    scale = statistics.median(min(h / size[0], w / size[1]) for h, w in found)
    if scale > SHRINKING:
        log(
            f"photographs of {height} x {width} px are scaled down by {scale:.1f} to {size[0]} x {size[1]} px; "
            "give a larger --img-size to keep more of them"
        )


class ImageSet(Dataset[tuple[Tensor, int]]):
    """Images of one size with labels, as they are stored; item i is (uint8 (C, H, W), label).

    `ImageSamples` makes batches of them.

    Attributes:
        labels: int64 (N,).
        flip: a mirrored image is still of its class.
        fill: grey level after the object (0 to 255), or None where there is no uniform background.
        in_memory: reading costs next to nothing.
    """

    labels: Tensor
    flip: bool
    fill: int | None
    in_memory: bool

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"image {index} of {len(self)}")
        index %= len(self)
        images, kept = self.pixels(torch.tensor([index]))
        if not len(kept):
            raise UserError(f"image {index} cannot be read any more")
        return images[0], int(self.labels[index])

    def pixels(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Images uint8 (B, C, H, W), and those of the indices that could be read."""
        raise NotImplementedError

    def subset(self, indices: Tensor) -> "ImageSet":
        """The images with these indices, in this order."""
        raise NotImplementedError

    def training_order(self, seed: int, epoch: int, rank: int, world_size: int) -> np.ndarray:
        """The indices that one of `world_size` processes takes in an epoch, the same number for each."""
        return shared_permutation(len(self), seed, epoch, rank, world_size)

    def check_shares(self, world_size: int) -> None:
        """Raise `UserError` if the images cannot be shared among this many processes."""
        return


class InMemoryImages(ImageSet):
    """Images uint8 (N, C, H, W) held in memory."""

    in_memory = True

    def __init__(self, images: Tensor, labels: Tensor, *, flip: bool, fill: int | None) -> None:
        self.images, self.labels, self.flip, self.fill = images, labels, flip, fill

    def pixels(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return self.images.index_select(0, indices), indices

    def subset(self, indices: Tensor) -> "InMemoryImages":
        return InMemoryImages(self.images[indices], self.labels[indices], flip=self.flip, fill=self.fill)


class LazyImages(ImageSet):
    """Images that are decoded each time they are read.

    One that has become unreadable is left out of its batch; the first ten are named on stderr, with their count.

    Attributes:
        photographs: of any size, so that training takes a random part of each, and testing the centre.
        crop_pct: share of an image that testing keeps.
        channels: 3, or 1 for grey.
        places: number of each image among those that the set was made of.
    """

    in_memory = False
    flip, fill = True, None

    def __init__(self, labels: Tensor, size: tuple[int, int], *, channels: int, photographs: bool) -> None:
        self.labels, self.size, self.channels, self.photographs = labels, size, channels, photographs
        self.crop_pct = CROP_PCT if photographs else 1.0
        self.places = torch.arange(len(labels))
        self._left_out = LeftOut()

    def subset(self, indices: Tensor) -> "LazyImages":
        """The images with these indices in this set, of whose files the list is shared."""
        kept = copy.copy(self)
        kept.labels, kept.places, kept._left_out = self.labels[indices], self.places[indices], LeftOut()
        return kept

    def source(self, index: int) -> Path | bytes:
        """The file, or the bytes of the file."""
        raise NotImplementedError

    def name(self, index: int) -> str:
        """Where the image is, for a message."""
        return str(self.source(index))

    def pixels(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return self._decoded(
            indices, lambda index: decode(self.source(index), self.channels, self.size, crop_pct=self.crop_pct)
        )

    def random_crops(self, indices: Tensor, seed: int, epoch: int) -> tuple[Tensor, Tensor]:
        """As `pixels`, but a random part of each image, a function of (seed, epoch, index)."""
        bits = dict(zip(indices.tolist(), hash_indices(seed, epoch, indices, RANDOM_CROP)))

        def part(index: int) -> Tensor:
            seed_all(int(bits[index]))
            return decode_part(self.source(index), self.channels, self.size, _random_part)

        with restored_random_state():
            return self._decoded(indices, part)

    def _decoded(self, indices: Tensor, one: Callable[[int], Tensor]) -> tuple[Tensor, Tensor]:
        images, kept = [], []
        for index in indices.tolist():
            try:
                images.append(one(index))
                kept.append(index)
            except UnreadableImage as reason:
                self._left_out.add(index, f"{self.name(index)} {reason}")
        stacked = torch.stack(images) if images else torch.empty(0, self.channels, *self.size, dtype=torch.uint8)
        return stacked, torch.tensor(kept, dtype=torch.int64)


def _random_part(size: tuple[int, int]) -> tuple[Box, Image.Resampling]:
    """timm's: 8 % to 100 % of the area at aspect ratios of 3/4 to 4/3, resized in one of two ways."""
    image = torch.empty(1, size[1], size[0], device="meta")
    top, left, height, width = RandomResizedCropAndInterpolation.get_params(image, (0.08, 1.0), (3 / 4, 4 / 3))
    resampling = random.choice((Image.Resampling.BILINEAR, Image.Resampling.BICUBIC))
    return (left, top, left + width, top + height), resampling


def resize_images(images: Tensor, size: tuple[int, int] | None) -> Tensor:
    """uint8 (N, C, H, W) at another size, bilinear and antialiased; unchanged if the size is None or their own."""
    if size is None or tuple(images.shape[-2:]) == size:
        return images
    parts = [
        F.interpolate(part.float(), size, mode="bilinear", antialias=True).round_().clamp_(0, 255).byte()
        for part in images.split(1024)
    ]
    return torch.cat(parts)


def with_channels(images: ImageSet, channels: int | None) -> ImageSet:
    """Images in memory with another number of channels: grey thrice, or the brightness of colours; else unchanged."""
    if channels is None or not isinstance(images, InMemoryImages) or images.images.shape[1] == channels:
        return images
    pixels = images.images
    if channels == 3:
        made = pixels.expand(-1, 3, -1, -1).contiguous()
    else:
        weights = torch.tensor((0.299, 0.587, 0.114)).view(3, 1, 1)
        made = torch.cat([(part * weights).sum(1, keepdim=True).round_().byte() for part in pixels.split(1024)])
    return InMemoryImages(made, images.labels, flip=images.flip, fill=images.fill)


def channel_statistics(parts: Iterable[Tensor]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel in 0..1, exact, of images uint8 (..., C, H, W)."""
    counts = sum(
        torch.stack([torch.bincount(channel.flatten(), minlength=256) for channel in part.movedim(-3, 0)])
        for part in parts
    )
    assert isinstance(counts, Tensor)
    levels = torch.arange(256, dtype=torch.float64) / 255
    weights = counts.double() / counts.sum(1, keepdim=True)
    mean = (weights * levels).sum(1)
    std = (weights * (levels - mean[:, None]).square()).sum(1).sqrt()
    # Images of one level have no spread; dividing by less than one level would only blow up rounding.
    return tuple(mean.tolist()), tuple(std.clamp_min(1 / 255).tolist())
