"""Sets of images with labels, all of one size, in memory or decoded each time they are read; and batches of them."""

import contextlib
import copy
import random
import statistics
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from PIL import Image
from timm.data.transforms import RandomResizedCropAndInterpolation
from torch import Tensor
from torch.nn import functional as F

from tokenmix.errors import UserError
from tokenmix.lab.data.fetch import log
from tokenmix.lab.data.images.augment import Erase, make_augment
from tokenmix.lab.data.images.decode import Box, decode, decode_part, stored_size
from tokenmix.lab.data.indexed import IndexedDataset, WrappedDataset, hash_indices, restored_random_state, seed_all
from tokenmix.lab.data.reading import LeftOut, UnreadableImage

CHANNELS = 3
# timm's own if a model states none.
CROP_PCT = 0.875
# Of `hash_indices`.
RANDOM_CROP = 1
# Images whose sizes are looked at, and by how much the median may be scaled down without a word.
SIZES_SEEN, SHRINKING = 16, 2


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


class ImageSet(IndexedDataset):
    """Images of one size with labels, as they are stored; item i is (uint8 (C, H, W), label).

    `ImageSamples` makes batches of them for a classifier.

    Attributes:
        labels: int64 (N,).
        channels: 1 or 3.
        size: (height, width).
        flip: a mirrored image is still of its class.
        fill: grey level after the object (0 to 255), or None where there is no uniform background.
        in_memory: reading costs next to nothing.
        photographs: of any size, so that training takes a random part of each, and testing the centre.
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

    @abstractmethod
    def pixels(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Images uint8 (B, C, H, W), and those of the indices that could be read."""

    def random_crops(self, indices: Tensor, seed: int, epoch: int) -> tuple[Tensor, Tensor]:
        """As `pixels`, but a random part of each photograph, a function of (seed, epoch, index)."""
        return self.pixels(indices)

    @abstractmethod
    def subset(self, indices: Tensor) -> "ImageSet":
        """The images with these indices, in this order."""

    def read(self, indices: Tensor, epoch: int) -> dict[str, Tensor]:
        images, kept = self.pixels(indices)
        return {"image": images, "label": self.labels[kept], "index": kept}


class InMemoryImages(ImageSet):
    """Images uint8 (N, C, H, W) held in memory."""

    in_memory = True

    def __init__(self, images: Tensor, labels: Tensor, *, flip: bool = True, fill: int | None = None) -> None:
        self.images, self.labels, self.flip, self.fill = images, labels, flip, fill
        self.channels, self.size = images.shape[1], (images.shape[2], images.shape[3])

    def pixels(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return self.images.index_select(0, indices), indices

    def subset(self, indices: Tensor) -> "InMemoryImages":
        return InMemoryImages(self.images[indices], self.labels[indices], flip=self.flip, fill=self.fill)


class LazyImages(ImageSet):
    """Images that are decoded each time they are read.

    One that has become unreadable is left out of its batch; the first ten are named on stderr, with their count.

    Attributes:
        places: number of each image among those that the set was made of.
    """

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
        bits = dict(zip(indices.tolist(), hash_indices(seed, epoch, indices, RANDOM_CROP)))

        def choose(size: tuple[int, int]) -> tuple[Box, Image.Resampling]:
            # timm's: 8 % to 100 % of the area at aspect ratios of 3/4 to 4/3, resized in one of two ways.
            image = torch.empty(1, size[1], size[0], device="meta")
            top, left, height, width = RandomResizedCropAndInterpolation.get_params(image, (0.08, 1.0), (3 / 4, 4 / 3))
            resampling = random.choice((Image.Resampling.BILINEAR, Image.Resampling.BICUBIC))
            return (left, top, left + width, top + height), resampling

        def part(index: int) -> Tensor:
            seed_all(int(bits[index]))
            return decode_part(self.source(index), self.channels, self.size, choose)

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


def normalize(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """uint8 (B, C, H, W) as float32, (images / 255 - mean) / std per channel."""
    scale = torch.tensor([1 / (255 * s) for s in std]).view(-1, 1, 1)
    shift = torch.tensor([-m / s for m, s in zip(mean, std)]).view(-1, 1, 1)
    return images.to(torch.float32).mul_(scale).add_(shift)


class ImageSamples(WrappedDataset):
    """Labelled images as a classifier takes them: read, augmented, normalised and erased a whole batch at a time.

    `read` gives {"image": float32 (B, C, H, W), "label": int64 (B,), "index": int64 (B,)}, without images that cannot
    be read any more.

    Args:
        images: `ImageData.train` or `.test`.
        mean, std: per channel, in 0..1.
        augment, color_jitter: see `make_augment`; photographs are first cropped at random unless it is `none`.
        reprob: share of the images from which a box is erased.
        seed: of the augmentation.

    Raises:
        UserError: an augmentation that `make_augment` or `Erase` does not know.
    """

    def __init__(
        self,
        images: ImageSet,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        augment: str = "none",
        color_jitter: float = 0.0,
        reprob: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__(images)
        self.images, self.mean, self.std, self.seed = images, mean, std, seed
        # A random part of a photograph is shifted as it is.
        self.crops = images.photographs and augment != "none"
        self.augment = make_augment(
            augment, seed=seed, flip=images.flip, fill=images.fill, color_jitter=color_jitter, shift=not self.crops
        )
        self.erase = Erase(reprob, seed) if reprob else None

    def read(self, indices: Tensor, epoch: int) -> dict[str, Tensor]:
        images = self.images
        pixels, kept = images.random_crops(indices, self.seed, epoch) if self.crops else images.pixels(indices)
        batch = normalize(self.augment(pixels, epoch, kept), self.mean, self.std)
        if self.erase is not None:
            self.erase(batch, epoch, kept)
        return {"image": batch, "label": images.labels[kept], "index": kept}


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
