"""Sets of images with labels, all of one size, and what is known about them."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from tokenmix.data.indexed import shared_permutation
from tokenmix.data.lookup import short_name
from tokenmix.errors import UserError

__all__ = [
    "ImageData",
    "ImageSet",
    "InMemoryImages",
    "LoadedImages",
    "Skipped",
    "channel_statistics",
    "choose",
    "resize_images",
]

STATISTICS_SAMPLE = 2048


@dataclass(frozen=True)
class Skipped:
    """A file that was left out, and why."""

    path: str
    reason: str


class ImageSet(Dataset[tuple[Tensor, int]]):
    """Images of one size with labels, as they are stored; item i is (uint8 (C, H, W), label).

    `ImageSamples` makes batches of them.

    Attributes:
        labels: int64 (N,).
        flip: a mirrored image is still of its class.
        fill: grey level behind the object (0 to 255), or None where there is no uniform background.
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
        """The images at these places, in this order."""
        raise NotImplementedError

    def training_order(self, seed: int, epoch: int, rank: int, world_size: int) -> np.ndarray:
        """The places that one of `world_size` processes takes in an epoch, as many for each."""
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


@dataclass(frozen=True)
class LoadedImages:
    """A data set as its reader gives it: whole, at the size that was asked for."""

    train: ImageSet
    test: ImageSet
    classes: list[str]
    source: str
    skipped: Sequence[Skipped] = ()


@dataclass(frozen=True)
class ImageData:
    """Training and test images of a data set.

    Attributes:
        spec: what `load_images` was asked for.
        train, test: map-style data sets of (uint8 (C, H, W), label), all of size `img_size`.
        classes: name of each label.
        channels: 1 or 3.
        img_size: (height, width).
        mean, std: per channel, in 0..1, measured on the training images.
        source: one line: which home or package, version, licence, path.
        skipped: files that were left out.
        crop_pct: share of a test image that its centre crop keeps.
    """

    spec: str
    train: ImageSet
    test: ImageSet
    classes: list[str]
    channels: int
    img_size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    source: str
    skipped: Sequence[Skipped] = ()
    crop_pct: float = 1.0

    @property
    def name(self) -> str:
        """The spec as a part of a file name."""
        return short_name(self.spec)

    @property
    def flip(self) -> bool:
        """A mirrored image is still of its class."""
        return self.train.flip

    def describe(self) -> dict[str, Any]:
        """What a run folder's data.json keeps; only JSON types."""
        return {
            "name": self.name,
            "spec": self.spec,
            "source": self.source,
            "classes": self.classes,
            "counts": {part: self._counts(labels) for part, labels in self._parts()},
            "channels": self.channels,
            "img_size": list(self.img_size),
            "mean": list(self.mean),
            "std": list(self.std),
            "flip": self.flip,
            "fill": self.train.fill,
            "crop_pct": self.crop_pct,
            "skipped": len(self.skipped),
            "skipped_first": [{"path": _printable(s.path), "reason": s.reason} for s in self.skipped[:20]],
        }

    def _parts(self) -> list[tuple[str, Tensor]]:
        return [("train", self.train.labels), ("test", self.test.labels)]

    def _counts(self, labels: Tensor) -> dict[str, int]:
        return dict(zip(self.classes, torch.bincount(labels, minlength=len(self.classes)).tolist()))


def _printable(path: str) -> str:
    """A path whose bytes are no UTF-8 would make a JSON that other readers refuse."""
    return os.fsencode(path).decode("utf-8", "replace")


def choose(labels: Tensor, limit: int | None, seed: int) -> Tensor | None:
    """Places of `limit` images that keep the shares of the classes; None if all are kept.

    A larger limit under the same seed contains the smaller one's images.
    """
    if limit is not None and limit < 1:
        raise UserError(f"a limit of {limit} leaves no images; give 1 or more, or none for all of them")
    if limit is None or limit >= len(labels):
        return None
    rng = np.random.default_rng(abs(seed))
    order = rng.permutation(len(labels))
    shuffled = labels.numpy()[order]
    share = np.empty(len(order))
    for label in np.unique(shuffled):
        places = np.flatnonzero(shuffled == label)
        share[places] = (np.arange(len(places)) + rng.random()) / len(places)
    return torch.from_numpy(np.sort(order[np.argsort(share, kind="stable")[:limit]]))


def resize_images(images: Tensor, size: tuple[int, int] | None) -> Tensor:
    """uint8 (N, C, H, W) at another size, bilinear and antialiased; unchanged if the size is None or their own."""
    if size is None or tuple(images.shape[-2:]) == size:
        return images
    parts = [
        F.interpolate(part.float(), size, mode="bilinear", antialias=True).round_().clamp_(0, 255).byte()
        for part in images.split(1024)
    ]
    return torch.cat(parts)


def channel_statistics(data: ImageSet) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel in 0..1, exact for images in memory, else from evenly spread ones."""
    places = torch.arange(len(data))
    if not data.in_memory and len(data) > STATISTICS_SAMPLE:
        places = torch.linspace(0, len(data) - 1, STATISTICS_SAMPLE).long()
    counts: Tensor | int = 0
    for part in places.split(4096):
        images, _ = data.pixels(part)
        counts = counts + torch.stack(
            [torch.from_numpy(np.bincount(c.numpy().ravel(), minlength=256)) for c in images.unbind(1)]
        )
    assert isinstance(counts, Tensor)
    levels = torch.arange(256, dtype=torch.float64) / 255
    weights = counts.double() / counts.sum(1, keepdim=True)
    mean = (weights * levels).sum(1)
    std = (weights * (levels - mean[:, None]).square()).sum(1).sqrt()
    # Images of one level have no spread; dividing by less than one level would only blow up rounding.
    return tuple(mean.tolist()), tuple(std.clamp_min(1 / 255).tolist())
