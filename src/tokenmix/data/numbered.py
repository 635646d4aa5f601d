"""Numbered samples that are read a batch at a time, and the loader of them: nothing draws from the global random state.

Sequences of text, scenes with masks and boxes, and point clouds are read this way.
"""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from tokenmix.data.loader import EpochLoader, Key, make_sampler

__all__ = ["Numbered", "NumberedLoader", "limited", "make_numbered_loader"]


class Numbered(ABC):
    """Numbered samples; a batch is a function of the epoch and the numbers in it.

    Attributes:
        unit: what a sample is, in the plural.
    """

    unit: str = "samples"

    @abstractmethod
    def __len__(self) -> int:
        """How many there are, the same in each epoch."""

    @abstractmethod
    def read(self, indices: Tensor, epoch: int) -> Any:
        """The batch of these samples, as the task takes it."""

    def training_order(self, seed: int, epoch: int, rank: int, world_size: int) -> np.ndarray:
        """The places that one of `world_size` processes takes in an epoch, as many for each, as of images."""
        order = np.random.default_rng([abs(seed), epoch]).permutation(len(self))
        return np.resize(order, -(-len(self) // world_size) * world_size)[rank::world_size]


def limited(whole: Numbered, count: int | None) -> Numbered:
    """`count` of the samples, evenly spread over them, so that no document or place has them all; all for None."""
    return whole if count is None else _Subset(whole, count)


class _Subset(Numbered):
    def __init__(self, whole: Numbered, count: int) -> None:
        self.whole, self.count, self.unit = whole, min(count, len(whole)), whole.unit

    def __len__(self) -> int:
        return self.count

    def read(self, indices: Tensor, epoch: int) -> Any:
        """The batch of these samples."""
        return self.whole.read(indices * len(self.whole) // self.count, epoch)


class _Batches(Dataset[Any]):
    def __init__(self, dataset: Numbered) -> None:
        self.dataset = dataset

    def __getitem__(self, key: Key) -> Any:
        epoch, indices = key
        return self.dataset.read(indices, epoch)


class NumberedLoader(EpochLoader):
    """An `EpochLoader` whose batches are those of `Numbered.read`."""


def make_numbered_loader(
    dataset: Numbered,
    *,
    batch_size: int,
    shuffle: bool,
    seed: int,
    workers: int = 0,
    drop_last: bool = False,
    start_batch: int = 0,
    rank: int = 0,
    world_size: int = 1,
    pin_memory: bool = False,
) -> NumberedLoader:
    """A loader whose batches are a function of (seed, epoch, place), as `make_loader` is for images.

    Args:
        dataset: for example `PackedText`, or scenes with their augmentation.
        batch_size: samples of one batch of one process.
        shuffle: in a new order each epoch (training); else in the set's own order.
        seed: of the order.
        workers: loader processes; the batches do not depend on it.
        drop_last: leave out a last batch that is not full.
        start_batch: the first pass begins at this batch without reading those before; `len` stays that of a whole pass.
        rank, world_size: this process among those that share the samples.
        pin_memory: copy batches to page-locked memory, for CUDA.

    Raises:
        UserError: a batch size below 1, or no full batch although `drop_last`.
    """
    sampler = make_sampler(
        dataset, dataset.unit, batch_size=batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last,
        start_batch=start_batch, rank=rank, world_size=world_size,
    )  # fmt: skip
    return NumberedLoader(_Batches(dataset), sampler, workers=workers, pin_memory=pin_memory)
