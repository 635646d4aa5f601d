"""Sets of labelled images of one size, in memory or decoded on each read; and loading by name."""

import contextlib
import copy
import functools
import os
import random
import statistics
import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch
import torch.nn.functional as F
from PIL import Image
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.data.transforms import RandomResizedCropAndInterpolation
from torch import Tensor

from tokenmix.errors import UserError
from tokenmix.lab.data.fetch import log
from tokenmix.lab.data.images.augment import Augment, Erase, make_augment
from tokenmix.lab.data.images.decode import Box, decode, decode_part, size_of
from tokenmix.lab.data.indexed import DataSet, IndexedDataset, hash_indices, restored_random_state, seed_all, spread
from tokenmix.lab.data.lookup import load_data, parse_spec, short_name
from tokenmix.lab.data.reading import LeftOut, UnreadableImage, digest_of

CHANNELS = 3
# timm's default for models without one.
CROP_PCT = 0.875
# Purpose in `hash_indices`.
RANDOM_CROP = 1
# Number of images whose size is checked, and the largest scale-down of the median without a warning.
SIZES_SEEN, SHRINKING = 16, 2
STATISTICS_SAMPLE = 2048
MOST_DIGESTED = 256
# Standard deviation below which images hardly use their levels.
NARROW = 5 / 255


def warn_of_shrinking(
    size_at: Callable[[int], Sequence[int]], count: int, size: tuple[int, int], option: str = "--img-size"
) -> None:
    """Warn on stderr if `size` shows less than half of the images' pixels per side; `size_at` gives (height, width)."""
    found: list[Sequence[int]] = []
    for index in {place * count // SIZES_SEEN for place in range(SIZES_SEEN)} if count else ():
        with contextlib.suppress(UnreadableImage, UserError):
            found.append(size_at(index))
    if not found:
        return
    height, width = sorted(found, key=min)[len(found) // 2]
    scale = statistics.median(min(h / size[0], w / size[1]) for h, w in found)
    if scale > SHRINKING:
        _log_once(
            f"photographs of {height} x {width} px are scaled down by {scale:.1f} to {size[0]} x {size[1]} px; "
            f"a larger {option} keeps more of them, where the model takes it"
        )


_log_once = functools.cache(log)
"""A comparison reads its data once a run."""


class ImageSet(IndexedDataset):
    """Images of one size with labels; item i is (uint8 (C, H, W), label).

    `read` gives {"image": (B, C, H, W), "label": int64 (B,), "index": int64 (B,)} without images that have become
    unreadable: uint8 as stored, and after `prepared` augmented; then `transform_batch` normalises them.

    Attributes:
        labels: int64 (N,).
        channels: 1 or 3.
        size: (height, width).
        flip: whether a mirrored image keeps its class.
        fill: grey level behind the object (0 to 255); None without a uniform background.
        in_memory: whether reading costs next to nothing.
        photographs: whether images have any size: training crops at random, testing crops the centre.
        crop_pct: share of an image that testing keeps.
    """

    unit = "images"
    labels: Tensor
    channels: int
    size: tuple[int, int]
    flip: bool = True
    fill: int | None = None
    in_memory: bool = False
    photographs: bool = False
    crop_pct: float = 1.0
    _prepare: tuple[Augment, Sequence[float], Sequence[float], Erase | None] | None = None
    _crop_seed: int | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"image {index} of {len(self)}")
        index %= len(self)
        images, kept = self.pixels(torch.tensor([index]))
        if not len(kept):
            raise UserError(f"image {index} cannot be read any more; put its file back")
        return images[0], int(self.labels[index])

    def digest(self) -> str:
        """Changes with the labels, and with some of the images, in their order."""
        value = zlib.crc32(self.labels.numpy().tobytes())
        for index in spread(len(self), MOST_DIGESTED).tolist():
            value = zlib.crc32(self.content(index), value)
        return f"{value:08x}"

    def content(self, index: int) -> bytes:
        """What changes with the image."""
        return self.pixels(torch.tensor([index]))[0].numpy().tobytes()

    @abstractmethod
    def pixels(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Images uint8 (B, C, H, W), and the indices that could be read."""

    def random_crops(self, indices: Tensor, seed: int, epoch: int) -> tuple[Tensor, Tensor]:
        """Like `pixels`, with a random crop of each photograph as a function of (seed, epoch, index)."""
        return self.pixels(indices)

    def subset(self, indices: Tensor) -> Self:
        part = copy.copy(self)
        part.labels = self.labels[indices]
        return part

    def prepared(
        self,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        augment: str = "none",
        color_jitter: float = 0.0,
        reprob: float = 0.0,
        seed: int = 0,
    ) -> Self:
        """The images for a classifier: augmented by `read`; normalised there if erased, else by `transform_batch`.

        Args:
            mean, std: per channel, in 0..1.
            augment, color_jitter: see `make_augment`; photographs are first cropped at random unless `augment` is
                `none`.
            reprob: probability of erasing a box of an image.
            seed: seed of the augmentation.
        """
        # A random crop of a photograph replaces the shift.
        crops = self.photographs and augment != "none"
        change = make_augment(
            augment, seed=seed, flip=self.flip, fill=self.fill, color_jitter=color_jitter, shift=not crops
        )
        part = copy.copy(self)
        part._crop_seed = seed if crops else None
        part._prepare = change, mean, std, Erase(reprob, seed) if reprob else None
        return part

    def read(self, indices: Tensor, epoch: int) -> dict[str, Tensor]:
        seed = self._crop_seed
        images, kept = self.pixels(indices) if seed is None else self.random_crops(indices, seed, epoch)
        if self._prepare is not None:
            change, mean, std, erase = self._prepare
            images = change(images, epoch, kept)
            if erase is not None:
                images = normalize(images, mean, std)
                erase(images, epoch, kept)
        return {"image": images, "label": self.labels[kept], "index": kept}

    def transform_batch(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        if self._prepare is None or batch["image"].is_floating_point():
            return batch
        _, mean, std, _ = self._prepare
        return {**batch, "image": normalize(batch["image"], mean, std)}


class InMemoryImages(ImageSet):
    """Images uint8 (N, C, H, W) in memory."""

    in_memory = True

    def __init__(self, images: Tensor, labels: Tensor, *, flip: bool = True, fill: int | None = None) -> None:
        self.images, self.labels, self.flip, self.fill = images, labels, flip, fill
        self.channels, self.size = images.shape[1], (images.shape[2], images.shape[3])

    def pixels(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return self.images.index_select(0, indices), indices

    def subset(self, indices: Tensor) -> Self:
        part = super().subset(indices)
        part.images = self.images[indices]
        return part


class LazyImages(ImageSet):
    """Images decoded on each read, with `indices` in the original set. Unreadable ones are left out of their batch."""

    def __init__(self, labels: Tensor, size: tuple[int, int], *, channels: int, photographs: bool) -> None:
        self.labels, self.size, self.channels, self.photographs = labels, size, channels, photographs
        self.crop_pct = CROP_PCT if photographs else 1.0
        self.indices = torch.arange(len(labels))
        self._left_out = LeftOut()

    def subset(self, indices: Tensor) -> Self:
        part = super().subset(indices)
        part.indices, part._left_out = self.indices[indices], LeftOut()
        return part

    @abstractmethod
    def source(self, index: int) -> str | Path | bytes:
        """The file, or its bytes."""

    def content(self, index: int) -> bytes:
        source = self.source(index)
        return source if isinstance(source, bytes) else digest_of(str(source))

    def name(self, index: int) -> str:
        """Location of the image, for messages."""
        return str(self.source(index))

    def pixels(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return self._decoded(
            indices, lambda index: decode(self.source(index), self.channels, self.size, crop_pct=self.crop_pct)
        )

    def random_crops(self, indices: Tensor, seed: int, epoch: int) -> tuple[Tensor, Tensor]:
        bits = dict(zip(indices.tolist(), hash_indices(seed, epoch, indices, RANDOM_CROP)))

        def choose(size: tuple[int, int]) -> tuple[Box, Image.Resampling]:
            # timm's: 8 % to 100 % of the area, aspect ratio 3/4 to 4/3, with one of two resampling filters.
            image = torch.empty(1, size[1], size[0], device="meta")
            top, left, height, width = RandomResizedCropAndInterpolation.get_params(image, (0.08, 1.0), (3 / 4, 4 / 3))
            resampling = random.choice((Image.Resampling.BILINEAR, Image.Resampling.BICUBIC))
            # A side of a tiny image may be rounded to 0.
            left, top = min(left, size[0] - 1), min(top, size[1] - 1)
            return (left, top, left + max(1, width), top + max(1, height)), resampling

        def part(index: int) -> Tensor:
            seed_all(int(bits[index]))
            return decode_part(self.source(index), self.channels, self.size, choose)

        with restored_random_state():
            return self._decoded(indices, part)

    def _decoded(self, indices: Tensor, one: Callable[[int], Tensor]) -> tuple[Tensor, Tensor]:
        images = torch.empty(len(indices), self.channels, *self.size, dtype=torch.uint8)
        kept: list[int] = []
        for index in indices.tolist():
            try:
                images[len(kept)] = one(index)
                kept.append(index)
            except UnreadableImage as reason:
                self._left_out.add(index, f"{self.name(index)} {reason}")
        return images[: len(kept)], torch.tensor(kept, dtype=torch.int64)


def normalize(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """uint8 (B, C, H, W) to float32: (images / 255 - mean) / std per channel."""
    scale = torch.tensor([1 / (255 * s) for s in std]).view(-1, 1, 1)
    shift = torch.tensor([-m / s for m, s in zip(mean, std)]).view(-1, 1, 1)
    return images.to(torch.float32).mul_(scale).add_(shift)


def resize_images(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize uint8 (N, C, H, W), bilinear and antialiased; unchanged if the size is their own."""
    if images.shape[-2:] == size:
        return images
    parts = [
        F.interpolate(part.float(), size, mode="bilinear", antialias=True).round_().clamp_(0, 255).byte()
        for part in images.split(1024)
    ]
    return torch.cat(parts)


def _converted(images: ImageSet, size: tuple[int, int] | None, channels: int | None) -> ImageSet:
    """Images in memory at this size, with 1 channel (brightness) or 3 (grey repeated); files are decoded as such."""
    size, channels = size or images.size, channels or images.channels
    if (size, channels) == (images.size, images.channels) or not isinstance(images, InMemoryImages):
        return images
    pixels = resize_images(images.images, size)
    if channels > images.channels:
        pixels = pixels.expand(-1, 3, -1, -1).contiguous()
    elif channels < images.channels:
        weights = torch.tensor((0.299, 0.587, 0.114)).view(3, 1, 1)
        pixels = torch.cat([(part * weights).sum(1, keepdim=True).round_().byte() for part in pixels.split(1024)])
    return InMemoryImages(pixels, images.labels, flip=images.flip, fill=images.fill)


def channel_statistics(parts: Iterable[Tensor]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Exact mean and standard deviation per channel, in 0..1, of images uint8 (..., C, H, W)."""
    counts = sum(
        torch.stack([torch.bincount(channel.flatten(), minlength=256) for channel in part.movedim(-3, 0)])
        for part in parts
    )
    assert isinstance(counts, Tensor)
    levels = torch.arange(256, dtype=torch.float64) / 255
    weights = counts.double() / counts.sum(1, keepdim=True)
    mean = (weights * levels).sum(1)
    std = (weights * (levels - mean[:, None]).square()).sum(1).sqrt()
    # Constant images have no spread; division by less than one level would only amplify rounding.
    return tuple(mean.tolist()), tuple(std.clamp_min(1 / 255).tolist())


@dataclass(frozen=True)
class ImageData(DataSet[ImageSet]):
    """Labelled images of one size; `mean` and `std` per channel, in 0..1, of the training images.

    Photographs, which are not decoded at the start, have ImageNet's `mean` and `std`.
    """

    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        """The spec as part of a file name."""
        return short_name(self.spec)

    @property
    def channels(self) -> int:
        return self.train.channels

    @property
    def img_size(self) -> tuple[int, int]:
        return self.train.size

    @property
    def flip(self) -> bool:
        """Whether a mirrored image keeps its class."""
        return self.train.flip

    @property
    def crop_pct(self) -> float:
        """Share of a test image that the centre crop keeps."""
        return self.train.crop_pct

    def describe(self) -> dict[str, object]:
        """Description for data.json; only JSON types."""
        parts = {"train": self.train, "validation": self.validation, "test": self.test}
        return {
            "name": self.name,
            "spec": self.spec,
            "source": self.source,
            "classes": self.classes,
            "counts": {
                part: dict(zip(self.classes, torch.bincount(images.labels, minlength=len(self.classes)).tolist()))
                for part, images in parts.items()
                if images is not None
            },
            "channels": self.channels,
            "img_size": list(self.img_size),
            "mean": list(self.mean),
            "std": list(self.std),
            "flip": self.flip,
            "fill": self.train.fill,
            "crop_pct": self.crop_pct,
            "test_digest": self.test.digest(),
            "skipped": len(self.skipped),
            # Non-UTF-8 bytes of a path would make JSON that other readers refuse.
            "skipped_first": [
                {"path": os.fsencode(s.path).decode("utf-8", "replace"), "reason": s.reason} for s in self.skipped[:20]
            ],
        }


def load_images(
    spec: str,
    *,
    img_size: int | tuple[int, int] | None = None,
    limit: int | None = None,
    limit_eval: int | None = None,
    validation: int | None = 0,
    seed: int = 0,
    crop_pct: float | None = None,
    channels: int | None = None,
    root: Path | None = None,
) -> ImageData:
    """Training and test images of a data set.

    The choice of test and validation images never depends on the seed, so a run never trains on its evaluation images.

    Args:
        spec: a name of `tokenmix list data`, such as `fashion-mnist`, `folder:PATH`, `imagefolder:PATH` or
            `wds:TRAIN_SHARDS,TEST_SHARDS`.
        img_size: side of the square, or (height, width), to resize to; default: the set's own, 64 for a folder, 224 for
            photographs.
        limit: keep this many training images, with the class proportions, chosen by the seed.
        limit_eval: keep this many test images, with the class proportions, the same for every seed.
        validation: hold out this many training images; None: a tenth of those used. `limit` applies to the others.
        seed: affects only the images that `limit` keeps.
        crop_pct: share of a photograph's centre that testing keeps, default 0.875; only for imagefolder and wds.
        channels: 3, or 1 for grey; default: the set's own, 3 for users' files.
        root: the cache; $TOKENMIX_DATA or ~/.cache/tokenmix/data if not given.

    Raises:
        UserError: unknown set, unusable folder, or a data set that cannot be obtained.
    """
    size = None if img_size is None else size_of(img_size)
    if channels not in (None, 1, 3):
        raise UserError(f"channels must be 1 or 3, got {channels}")
    if crop_pct is not None and not 0 < crop_pct <= 1:
        raise UserError(f"crop_pct must be in (0, 1], got {crop_pct}")
    loaded: ImageData = load_data(spec, "images", root=root, img_size=size, channels=channels)
    size = size or parse_spec(spec, "images")[0].size
    train, test = (_converted(images, size, channels) for images in (loaded.train, loaded.test))
    if crop_pct is not None:
        for images in (train, test):
            if not images.photographs:
                raise UserError(f"crop_pct={crop_pct:g} is for imagefolder and wds; leave it out for {spec!r}")
            images.crop_pct = crop_pct
    data = replace(loaded, train=train, test=test).split(
        (train.labels, test.labels), limit=limit, limit_eval=limit_eval, validation=validation, seed=seed
    )
    images = data.train
    if images.photographs:
        # ImageNet's, so that nothing is decoded at the start.
        both = (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)
        mean, std = both if images.channels == 3 else ((statistics.mean(values),) for values in both)
    else:
        chosen = spread(len(images), None if images.in_memory else STATISTICS_SAMPLE)
        mean, std = channel_statistics(images.pixels(part)[0] for part in chosen.split(4096))
        if max(std) < NARROW and len(images):
            log(
                f"the training images differ by {255 * max(std):.1f} of 255 grey levels (standard deviation); if they "
                "have 12 bits, scale them to 16 before"
            )
    return replace(data, mean=mean, std=std)
