"""Sets whose images are opened one by one: what cannot be read is left out of its batch and named."""

import copy
import random
from collections.abc import Callable
from pathlib import Path

import torch
from PIL import Image
from timm.data.transforms import RandomResizedCropAndInterpolation
from torch import Tensor

from tokenmix.data.fetch import log
from tokenmix.data.images.decode import Box, UnreadableImage, decode, decode_part
from tokenmix.data.images.image_set import ImageSet
from tokenmix.data.seeding import hash_indices, restored_random_state, seed_all

__all__ = ["CHANNELS", "CROP_PCT", "LazyImages"]

CHANNELS = 3
# timm's own if a model states none.
CROP_PCT = 0.875
# Of `hash_indices`.
RANDOM_CROP = 1
NAMED = 10


class LazyImages(ImageSet):
    """Images that are decoded each time they are read.

    One that has become unreadable is left out of its batch; the first ten are named on stderr, with their count.

    Attributes:
        photographs: of any size, so that training takes a random part of each, and testing the centre.
        crop_pct: share of an image that testing keeps.
        places: number of each image among those that the set was made of.
    """

    in_memory = False
    flip, fill = True, None

    def __init__(self, labels: Tensor, size: tuple[int, int], *, photographs: bool) -> None:
        self.labels, self.size, self.photographs = labels, size, photographs
        self.crop_pct = CROP_PCT if photographs else 1.0
        self.places = torch.arange(len(labels))
        self._bad: set[int] = set()

    def subset(self, indices: Tensor) -> "LazyImages":
        """The images at these places of this set, of whose files the list is shared."""
        kept = copy.copy(self)
        kept.labels, kept.places, kept._bad = self.labels[indices], self.places[indices], set()
        return kept

    def source(self, index: int) -> Path | bytes:
        """The file, or the bytes of the file."""
        raise NotImplementedError

    def name(self, index: int) -> str:
        """Where the image is, for a message."""
        return str(self.source(index))

    def pixels(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return self._decoded(
            indices, lambda index: decode(self.source(index), CHANNELS, self.size, crop_pct=self.crop_pct)
        )

    def random_crops(self, indices: Tensor, seed: int, epoch: int) -> tuple[Tensor, Tensor]:
        """As `pixels`, but a random part of each image, a function of (seed, epoch, index)."""
        bits = dict(zip(indices.tolist(), hash_indices(seed, epoch, indices, RANDOM_CROP)))

        def part(index: int) -> Tensor:
            seed_all(int(bits[index]))
            return decode_part(self.source(index), CHANNELS, self.size, _random_part)

        with restored_random_state():
            return self._decoded(indices, part)

    def _decoded(self, indices: Tensor, one: Callable[[int], Tensor]) -> tuple[Tensor, Tensor]:
        images, kept = [], []
        for index in indices.tolist():
            try:
                images.append(one(index))
                kept.append(index)
            except UnreadableImage as reason:
                self._leave_out(index, reason)
        stacked = torch.stack(images) if images else torch.empty(0, CHANNELS, *self.size, dtype=torch.uint8)
        return stacked, torch.tensor(kept, dtype=torch.int64)

    def _leave_out(self, index: int, reason: UnreadableImage) -> None:
        if index in self._bad:
            return
        self._bad.add(index)
        if len(self._bad) <= NAMED:
            log(f"left out: {self.name(index)} {reason} ({len(self._bad)} so far)")


def _random_part(image: Image.Image) -> tuple[Box, Image.Resampling]:
    """timm's: 8 % to 100 % of the area at aspect ratios of 3/4 to 4/3, resized in one of two ways."""
    top, left, height, width = RandomResizedCropAndInterpolation.get_params(image, (0.08, 1.0), (3 / 4, 4 / 3))
    resampling = random.choice((Image.Resampling.BILINEAR, Image.Resampling.BICUBIC))
    return (left, top, left + width, top + height), resampling
