"""Batches of images: read, augmented, normalised and erased a whole batch at a time."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset

from tokenmix.data.images.augment import Augment, make_augment
from tokenmix.data.images.erase import Erase
from tokenmix.data.images.image_set import ImageSet
from tokenmix.data.images.opened import OpenedImages
from tokenmix.data.loader import EpochLoader, Key, make_sampler

__all__ = ["ImageLoader", "make_loader", "normalize"]

Batch = dict[str, Tensor]


def normalize(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """uint8 (B, C, H, W) as float32, (images / 255 - mean) / std per channel."""
    scale = torch.tensor([1 / (255 * s) for s in std]).view(-1, 1, 1)
    shift = torch.tensor([-m / s for m, s in zip(mean, std)]).view(-1, 1, 1)
    return images.to(torch.float32).mul_(scale).add_(shift)


class _Batches(Dataset[Batch]):
    """Reads, augments, normalises and erases in a whole batch at once."""

    def __init__(
        self,
        dataset: ImageSet,
        augment: Augment,
        mean: Sequence[float],
        std: Sequence[float],
        erase: Erase | None,
        parts_seed: int | None,
    ) -> None:
        self.dataset, self.augment, self.mean, self.std = dataset, augment, mean, std
        self.erase, self.parts_seed = erase, parts_seed

    def __getitem__(self, key: Key) -> Batch:
        epoch, indices = key
        if self.parts_seed is not None and isinstance(self.dataset, OpenedImages):
            images, kept = self.dataset.read_parts(indices, self.parts_seed, epoch)
        else:
            images, kept = self.dataset.read(indices)
        images = normalize(self.augment(images, epoch, kept), self.mean, self.std)
        if self.erase is not None:
            self.erase(images, epoch, kept)
        return {
            "image": images,
            "label": self.dataset.labels[kept],
            "index": kept,
        }


class ImageLoader(EpochLoader):
    """An `EpochLoader` whose batches are dict(image float32 (B, C, H, W), label int64 (B,), index int64 (B,))."""


def make_loader(
    dataset: ImageSet,
    *,
    batch_size: int,
    shuffle: bool,
    seed: int,
    augment: str = "none",
    color_jitter: float = 0.0,
    reprob: float = 0.0,
    mean: Sequence[float],
    std: Sequence[float],
    workers: int = 0,
    drop_last: bool = False,
    start_batch: int = 0,
    rank: int = 0,
    world_size: int = 1,
    pin_memory: bool = False,
) -> ImageLoader:
    """A loader over an image set; nothing of it draws from the global random state.

    Args:
        dataset: `ImageData.train` or `.test`.
        batch_size: images of one batch of one process.
        shuffle: in a new order each epoch (training); else in the set's own order.
        seed: of order and augmentation.
        augment, color_jitter: see `make_augment`; photographs are first cropped at random unless it is `none`.
        reprob: share of the images from which a box is erased.
        mean, std: per channel, in 0..1.
        workers: loader processes; the batches do not depend on it.
        drop_last: leave out a last batch that is not full.
        start_batch: the first pass begins at this batch without reading those before; `len` stays that of a whole pass.
        rank, world_size: this process among those that share the images.
        pin_memory: copy batches to page-locked memory, for CUDA.

    Raises:
        UserError: no image, no full batch although `drop_last`, or images that so many processes cannot share.
    """
    sampler = make_sampler(
        dataset, "images", batch_size=batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last,
        start_batch=start_batch, rank=rank, world_size=world_size,
    )  # fmt: skip
    if shuffle:
        dataset.check_shares(world_size)
    parts = isinstance(dataset, OpenedImages) and dataset.photographs and augment != "none"
    change = make_augment(
        augment, seed=seed, flip=dataset.flip, fill=dataset.fill, color_jitter=color_jitter, shift=not parts
    )
    erase = Erase(reprob, seed) if reprob else None
    batches = _Batches(dataset, change, mean, std, erase, seed if parts else None)
    return ImageLoader(batches, sampler, workers=workers, pin_memory=pin_memory)
