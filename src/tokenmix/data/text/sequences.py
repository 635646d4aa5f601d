"""What the text tasks read in batches, and the loader of it: nothing draws from the global random state."""

from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from tokenmix.data.loader import EpochLoader, EpochSampler, Key
from tokenmix.errors import UserError

__all__ = ["Batch", "Sequences", "TextLoader", "make_text_loader", "padded"]

Batch = dict[str, Tensor]


class Sequences(ABC):
    """Numbered sequences of token ids; a batch is a function of the epoch and the numbers in it."""

    @abstractmethod
    def __len__(self) -> int:
        """How many there are, the same in each epoch."""

    @abstractmethod
    def read(self, indices: Tensor, epoch: int) -> Batch:
        """input_ids and attention_mask int64 (B, N), what is to be learnt from them, and index int64 (B,)."""

    def training_order(self, seed: int, epoch: int, rank: int, world_size: int) -> np.ndarray:
        """The places that one of `world_size` processes takes in an epoch, as many for each, as of images."""
        order = np.random.default_rng([abs(seed), epoch]).permutation(len(self))
        return np.resize(order, -(-len(self) // world_size) * world_size)[rank::world_size]


class _Batches(Dataset[Batch]):
    def __init__(self, dataset: Sequences) -> None:
        self.dataset = dataset

    def __getitem__(self, key: Key) -> Batch:
        epoch, indices = key
        return self.dataset.read(indices, epoch)


class TextLoader(EpochLoader):
    """An `EpochLoader` whose batches are those of `Sequences.read`."""


def make_text_loader(
    dataset: Sequences,
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
) -> TextLoader:
    """A loader whose batches are a function of (seed, epoch, place), as `make_loader` is for images.

    Args:
        dataset: `PackedText`, `EncodedText` or `EncodedQuestions`.
        batch_size: sequences of one batch of one process.
        shuffle: in a new order each epoch (training); else in the set's own order.
        seed: of the order.
        workers: loader processes; the batches do not depend on it.
        drop_last: leave out a last batch that is not full.
        start_batch: the first pass begins at this batch without reading those before; `len` stays that of a whole pass.
        rank, world_size: this process among those that share the sequences.
        pin_memory: copy batches to page-locked memory, for CUDA.

    Raises:
        UserError: a batch size below 1, or no full batch although `drop_last`.
    """
    if batch_size < 1:
        raise UserError(f"a batch size of {batch_size} is not possible; give 1 or more")
    sampler = EpochSampler(
        dataset,
        batch_size=batch_size,
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
        start_batch=start_batch,
        rank=rank,
        world_size=world_size,
    )
    if drop_last and not len(sampler):
        raise UserError(
            f"a batch of {batch_size} x {world_size} does not fit into {len(dataset)} sequences; "
            f"give a batch size of at most {max(len(dataset) // world_size, 1)}"
        )
    return TextLoader(_Batches(dataset), sampler, workers=workers, pin_memory=pin_memory)


def padded(rows: list[np.ndarray], fill: int) -> Tensor:
    """int64 (B, N) with N that of the longest row; the others end in `fill`."""
    out = np.full((len(rows), max((len(row) for row in rows), default=0)), fill, dtype=np.int64)
    for target, row in zip(out, rows):
        target[: len(row)] = row
    return torch.from_numpy(out)
