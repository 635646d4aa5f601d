"""Images as batches: read, augmented, normalised and erased a whole batch at a time."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tokenmix.lab.data.images.augment import Erase, make_augment
from tokenmix.lab.data.images.image_set import ImageSet, LazyImages
from tokenmix.lab.data.indexed import IndexedDataset


def normalize(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """uint8 (B, C, H, W) as float32, (images / 255 - mean) / std per channel."""
    scale = torch.tensor([1 / (255 * s) for s in std]).view(-1, 1, 1)
    shift = torch.tensor([-m / s for m, s in zip(mean, std)]).view(-1, 1, 1)
    return images.to(torch.float32).mul_(scale).add_(shift)


class ImageSamples(IndexedDataset):
    """Labelled images as a classifier takes them.

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

    unit = "images"

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
        self.images, self.mean, self.std, self.seed = images, mean, std, seed
        self.reads_in_order = type(images).training_order is not ImageSet.training_order
        # A random part of a photograph is shifted as it is.
        self.crops = isinstance(images, LazyImages) and images.photographs and augment != "none"
        self.augment = make_augment(
            augment, seed=seed, flip=images.flip, fill=images.fill, color_jitter=color_jitter, shift=not self.crops
        )
        self.erase = Erase(reprob, seed) if reprob else None

    def __len__(self) -> int:
        return len(self.images)

    def training_order(self, seed: int, epoch: int, rank: int, world_size: int) -> np.ndarray:
        """That of the images: shards are read from end to end."""
        return self.images.training_order(seed, epoch, rank, world_size)

    def check_shares(self, world_size: int) -> None:
        """`UserError` if the images cannot be shared among this many processes."""
        self.images.check_shares(world_size)

    def read(self, indices: Tensor, epoch: int) -> dict[str, Tensor]:
        """The batch of these images."""
        if self.crops and isinstance(self.images, LazyImages):
            pixels, kept = self.images.random_crops(indices, self.seed, epoch)
        else:
            pixels, kept = self.images.pixels(indices)
        images = normalize(self.augment(pixels, epoch, kept), self.mean, self.std)
        if self.erase is not None:
            self.erase(images, epoch, kept)
        return {"image": images, "label": self.images.labels[kept], "index": kept}
