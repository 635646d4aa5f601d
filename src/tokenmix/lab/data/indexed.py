"""Indexed samples that are read a batch at a time: images, scenes, sequences of text, and point clouds."""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokenmix.errors import UserError


class IndexedDataset(ABC):
    """Indexed samples; a batch is a function of the epoch and the indices in it, and of nothing else.

    Attributes:
        unit: what a sample is, in the plural.
        reads_in_order: `training_order` is such that samples lie next to each other, as in shards.
    """

    unit: str = "samples"
    reads_in_order: bool = False

    @abstractmethod
    def __len__(self) -> int:
        """The number of samples, the same in each epoch."""

    @abstractmethod
    def read(self, indices: Tensor, epoch: int) -> Any:
        """The batch of these samples, as the task takes it."""

    def chosen(self, places: Tensor) -> "IndexedDataset":
        """The samples with these indices; each stays the function of its own index that it was."""
        return self if len(places) == len(self) else _Chosen(self, places)

    def training_order(self, seed: int, epoch: int, rank: int, world_size: int) -> np.ndarray:
        """The indices that one of `world_size` processes takes in an epoch, the same number for each."""
        return shared_permutation(len(self), seed, epoch, rank, world_size)

    def check_shares(self, world_size: int) -> None:
        """Raise `UserError` if the samples cannot be shared among this many processes."""
        return


def shared_permutation(count: int, seed: int, epoch: int, rank: int, world_size: int) -> np.ndarray:
    """Every world_size-th of one permutation of `count` samples.

    Together the processes read what one process would read with batches as many times larger.
    """
    order = np.random.default_rng([abs(seed), epoch]).permutation(count)
    # Topped up from the start, so that every process takes the same number of steps.
    return np.resize(order, -(-count // world_size) * world_size)[rank::world_size]


def subset(dataset: IndexedDataset, count: int | None) -> IndexedDataset:
    """`count` of the samples, evenly spread over them, so that no document or place has them all; all for None."""
    return dataset.chosen(spread(len(dataset), count))


def spread(length: int, count: int | None) -> Tensor:
    """`count` indices evenly spread over `length`; all if there are no more, or for None."""
    count = length if count is None else min(count, length)
    return torch.arange(count) * length // max(count, 1)


def balanced_order(dataset: IndexedDataset, labels: Tensor, sampler: str) -> IndexedDataset:
    """The samples, which training takes in the order that `--sampler` names.

    Args:
        dataset: training samples.
        labels: int64 (n,), their classes.
        sampler: shuffle, the order of the data set; or balanced.

    Raises:
        UserError: balanced, of samples that are read in an order of their own, such as shards.
    """
    if sampler == "shuffle":
        return dataset
    if dataset.reads_in_order:
        raise UserError(
            f"these {dataset.unit} are read from shards end to end, in the shares that they have there; give "
            "--class-weights balanced instead of --sampler balanced"
        )
    return _Balanced(dataset, labels)


class _Balanced(IndexedDataset):
    """Samples of which an epoch takes as many of each class, and as many in all as there are.

    The order is a function of (seed, epoch) alone. Samples of one class come equally often, give or take one.
    """

    def __init__(self, dataset: IndexedDataset, labels: Tensor) -> None:
        self.dataset, self.labels, self.unit = dataset, labels.numpy(), dataset.unit

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, indices: Tensor, epoch: int) -> Any:
        """The batch of these samples."""
        return self.dataset.read(indices, epoch)

    def training_order(self, seed: int, epoch: int, rank: int, world_size: int) -> np.ndarray:
        """Every world_size-th of the samples that are drawn for the epoch."""
        rng, count = np.random.default_rng([abs(seed), epoch]), -(-len(self) // world_size) * world_size
        classes = rng.permutation(np.unique(self.labels))
        drawn = []
        for number, label in enumerate(classes):
            own = np.flatnonzero(self.labels == label)
            wanted = len(range(number, count, len(classes)))
            rounds = [rng.permutation(own) for _ in range(-(-wanted // len(own)))]
            drawn.append(np.concatenate(rounds)[:wanted])
        return rng.permutation(np.concatenate(drawn))[rank::world_size]


class _Chosen(IndexedDataset):
    def __init__(self, dataset: IndexedDataset, places: Tensor) -> None:
        self.dataset, self.places, self.unit = dataset, places, dataset.unit

    def __len__(self) -> int:
        return len(self.places)

    def read(self, indices: Tensor, epoch: int) -> Any:
        """The batch of these samples."""
        return self.dataset.read(self.places[indices], epoch)
