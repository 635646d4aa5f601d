"""Indexed data sets: samples read by batch, selection of samples, and random draws by index.

The order of batches is a function of (seed, epoch). Third-party transforms leave the global random states unchanged.
"""

import os
import random
import resource
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Generic, Self, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from tokenmix.environment import return_large_memory
from tokenmix.errors import UserError
from tokenmix.lab.data.reading import Skipped
from tokenmix.trust import safe_children

S = TypeVar("S")
Batch = TypeVar("Batch")
# Validation share: one sample in SHARE, at most MOST; none below LEAST, since epochs could not be distinguished.
SHARE, LEAST, MOST = 10, 10, 10_000


def hash_indices(seed: int, epoch: int, indices: Tensor, purpose: int = 0) -> np.ndarray:
    """64 random bits per index, a pure function of (seed, epoch, index, purpose).

    The finaliser is splitmix64's (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014).
    """
    words = [abs(seed), epoch, purpose] if purpose else [abs(seed), epoch]
    key = np.random.SeedSequence(words).generate_state(1, np.uint64)
    bits = indices.numpy().astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + key
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def seed_all(bits: int) -> None:
    """Seed python, numpy and torch on the CPU."""
    random.seed(bits)
    np.random.seed(bits & 0xFFFFFFFF)
    # torch.manual_seed would queue a call for each GPU of a process that has not used one yet.
    torch.default_generator.manual_seed(bits & 0x7FFFFFFFFFFFFFFF)


@contextmanager
def restored_random_state() -> Iterator[None]:
    """Restore the random states of python, numpy and torch after the block."""
    python, numpy, torches = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.default_generator.set_state(torches)


class IndexedDataset(ABC, Generic[Batch]):
    """Indexed samples. A batch depends only on the epoch and its indices.

    Attributes:
        unit: plural name of the samples.
        reads_in_order: whether `training_order` keeps samples next to each other, as in shards.
    """

    unit: str = "samples"
    reads_in_order: bool = False

    @abstractmethod
    def __len__(self) -> int:
        """Number of samples, the same in each epoch."""

    @abstractmethod
    def read(self, indices: Tensor, epoch: int) -> Batch:
        """The batch of these samples, as the task takes it after `transform_batch`."""

    def transform_batch(self, batch: Batch) -> Batch:
        """What is left to do where the batch is used: a loader process sends bytes, not floats made of them."""
        return batch

    def chosen(self, indices: Tensor) -> "IndexedDataset[Batch]":
        """The samples with these indices; each still depends only on its own index."""
        return self if len(indices) == len(self) else _Chosen(self, indices)

    def training_order(self, seed: int, epoch: int, rank: int, world_size: int) -> np.ndarray:
        """Indices for one of `world_size` ranks in an epoch, equally many for each; here parts of one permutation."""
        return shared(np.random.default_rng([abs(seed), epoch]).permutation(len(self)), rank, world_size)

    def check_shares(self, world_size: int) -> None:
        """Raise `UserError` if the samples cannot be shared among this many ranks."""
        return


def shared(order: np.ndarray, rank: int, world_size: int) -> np.ndarray:
    """A rank's part of an order, which is repeated from the start so that all ranks take the same number of steps."""
    return np.resize(order, -(-len(order) // world_size) * world_size)[rank::world_size]


def subset(dataset: IndexedDataset[Batch], count: int | None) -> IndexedDataset[Batch]:
    """`count` evenly spread samples, so that no document or place has them all; all for None."""
    return dataset.chosen(spread(len(dataset), count))


def spread(length: int, count: int | None) -> Tensor:
    """`count` indices evenly spread over `length`; all for None, or if there are no more."""
    count = length if count is None else min(count, length)
    return torch.arange(count) * length // max(count, 1)


def balanced_order(dataset: IndexedDataset[Batch], labels: Tensor, sampler: str) -> IndexedDataset[Batch]:
    """The samples with these labels int64 (n,), for training in the order of `--sampler`.

    shuffle keeps the data set's order. balanced takes equally many of each class (give or take one), and the same
    total. Samples with their own order, such as shards, cannot be balanced.
    """
    if sampler == "shuffle":
        return dataset
    if dataset.reads_in_order:
        raise UserError(
            f"these {dataset.unit} are read from shards end to end, in the shares that they have there; give "
            "--class-weights balanced instead of --sampler balanced"
        )
    return _Chosen(dataset, torch.arange(len(dataset)), labels.numpy())


class _Chosen(IndexedDataset[Batch]):
    """Samples of another data set by index; in balanced order if labels are given."""

    def __init__(self, dataset: IndexedDataset[Batch], indices: Tensor, labels: np.ndarray | None = None) -> None:
        self.dataset, self.indices, self.labels, self.unit = dataset, indices, labels, dataset.unit

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, indices: Tensor, epoch: int) -> Batch:
        return self.dataset.read(self.indices[indices], epoch)

    def transform_batch(self, batch: Batch) -> Batch:
        return self.dataset.transform_batch(batch)

    def training_order(self, seed: int, epoch: int, rank: int, world_size: int) -> np.ndarray:
        if self.labels is None:
            return super().training_order(seed, epoch, rank, world_size)
        rng, count = np.random.default_rng([abs(seed), epoch]), len(self)
        classes = rng.permutation(np.unique(self.labels))
        drawn = []
        for number, label in enumerate(classes):
            own = np.flatnonzero(self.labels == label)
            wanted = len(range(number, count, len(classes)))
            rounds = [rng.permutation(own) for _ in range(-(-wanted // len(own)))]
            drawn.append(np.concatenate(rounds)[:wanted])
        return shared(rng.permutation(np.concatenate(drawn)), rank, world_size)


def choose(labels: Tensor, limit: int | None, seed: int) -> Tensor:
    """Indices of `limit` samples in the class proportions, all for None; larger limits include smaller ones."""
    if limit is not None and limit < 1:
        raise UserError(f"a limit of {limit} leaves no images; give 1 or more, or none for all of them")
    if limit is None or limit >= len(labels):
        return torch.arange(len(labels))
    rng = np.random.default_rng(abs(seed))
    order = rng.permutation(len(labels))
    shuffled = labels.numpy()[order]
    share = np.empty(len(order))
    for label in np.unique(shuffled):
        own = np.flatnonzero(shuffled == label)
        share[own] = (np.arange(len(own)) + rng.random()) / len(own)
    return torch.from_numpy(np.sort(order[np.argsort(share, kind="stable")[:limit]]))


def validation_size(count: int, asked: int | None, limit: int | None = None) -> int:
    """Number of held-out samples out of `count`: as asked, with `UserError` if none would be left for training.

    Default: a tenth of the samples used, at most 10,000; none if a tenth is fewer than 10.
    """
    if asked is None:
        tenth = min(count, limit or count) // SHARE
        return min(MOST, tenth) if tenth >= LEAST else 0
    if asked >= count:
        raise UserError(
            f"--validation {asked} leaves none of the {count} samples to train on; give a number in "
            f"[0, {count // SHARE or count - 1}]"
        )
    return asked


def hold_out(
    labels: Tensor, asked: int | None, limit: int | None = None, groups: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Indices of training and validation samples, in the class proportions or of whole groups; equal for all seeds."""
    size = validation_size(len(labels), asked, limit)
    held = torch.zeros(len(labels), dtype=torch.bool)
    if groups is not None and len(groups) != len(labels):
        raise UserError(f"there are {len(groups)} groups for {len(labels)} training samples; give one number for each")
    if size and groups is not None:
        names, counts = groups.unique(return_counts=True)
        # One group is left to train on.
        order = torch.from_numpy(np.random.default_rng(0).permutation(len(names))[1:])
        before = counts[order].cumsum(0) - counts[order]
        held = torch.isin(groups, names[order[before < size]])
    elif size:
        held[choose(labels, size, 0)] = True
    return (~held).nonzero().flatten(), held.nonzero().flatten()


@dataclass(frozen=True)
class DataSet(Generic[S]):
    """Samples for training and testing, as a reader returns them."""

    train: S
    test: S
    classes: list[str]  # name of each label
    source: str  # one line with origin, version, licence and path
    skipped: Sequence[Skipped] = ()  # files that were left out
    spec: str = ""  # the requested data, set by `load_data`
    validation: S | None = None  # training samples held out to choose the best epoch; None if there are none
    # A number for each training sample, equal for samples that resemble each other, such as parts of one photograph.
    # Validation samples are whole groups, drawn until they make the number asked for.
    groups: Tensor | None = None

    def split(
        self,
        labels: tuple[Tensor, Tensor] | None = None,
        *,
        limit: int | None = None,
        limit_eval: int | None = None,
        validation: int | None = 0,
        seed: int = 0,
    ) -> Self:
        """The data with held-out validation samples, and limits which keep the proportions of `labels` (train, test).

        `limit` training samples, chosen by the seed, remain besides the held-out ones. `limit_eval` test samples and
        those for validation, see `validation_size`, are the same for every seed. Samples need a method `subset`.
        """
        train: Any = self.train
        test: Any = self.test
        learnt, measured = labels or (torch.zeros(len(train)), torch.zeros(len(test)))
        kept, held = hold_out(learnt, validation, limit, self.groups)
        kept, tested = kept[choose(learnt[kept], limit, seed)], choose(measured, limit_eval, 0)
        return replace(
            self,
            train=train if len(kept) == len(train) else train.subset(kept),
            validation=train.subset(held) if len(held) else None,
            test=test if len(tested) == len(test) else test.subset(tested),
            groups=None,
        )


Key = tuple[int, Tensor]


@dataclass(eq=False)
class EpochSampler(Sampler[Key]):
    """Keys (epoch, indices) of one epoch's batches for one of `world_size` ranks.

    The key includes the epoch for loader processes that outlive an epoch. In training, the data set gives each rank
    equally many samples. In evaluation, rank r takes each world_size-th sample, and no sample repeats.
    """

    dataset: IndexedDataset
    batch_size: int
    shuffle: bool
    seed: int
    drop_last: bool
    start_batch: int
    rank: int
    world_size: int
    epoch: int = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        count, world = len(self.dataset), self.world_size
        mine = -(-count // world) if self.shuffle else len(range(self.rank, count, world))
        return mine // self.batch_size if self.drop_last else -(-mine // self.batch_size)

    def __iter__(self) -> Iterator[Key]:
        # Only the first pass of a resumed run starts late.
        start, self.start_batch = self.start_batch, 0
        epoch = self.epoch
        if self.shuffle:
            order = torch.from_numpy(self.dataset.training_order(self.seed, epoch, self.rank, self.world_size))
        else:
            order = torch.arange(self.rank, len(self.dataset), self.world_size)
        for batch in range(start, len(self)):
            yield epoch, order[batch * self.batch_size : (batch + 1) * self.batch_size]


class _Batches(Dataset[object]):
    """Batches as loader processes send them: whole for a GPU, since page-locked memory is copied in the background."""

    def __init__(self, dataset: IndexedDataset, whole: bool) -> None:
        self.dataset, self.whole = dataset, whole

    def __getitem__(self, index: Key) -> object:
        epoch, indices = index
        batch = self.dataset.read(indices, epoch)
        return self.dataset.transform_batch(batch) if self.whole else batch


class EpochLoader(DataLoader[object]):
    """A DataLoader over `IndexedDataset.read` and `transform_batch`, in the order of an `EpochSampler`."""

    def __iter__(self) -> Any:
        # Without fork, Python starts the workers as new interpreters.
        with safe_children():
            batches = super().__iter__()
        assert isinstance(self.dataset, _Batches)
        return batches if self.dataset.whole else map(self.dataset.dataset.transform_batch, batches)

    def set_epoch(self, epoch: int) -> None:
        assert isinstance(self.sampler, EpochSampler)
        self.sampler.set_epoch(epoch)


def make_loader(
    dataset: IndexedDataset,
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
) -> EpochLoader:
    """A loader whose batches are a function of (seed, epoch, rank), independent of the global random state.

    Args:
        dataset: for example `ImageSet.prepared`, or `PackedText`.
        batch_size: samples per batch and rank.
        shuffle: use a new order each epoch (training), else the data set's order.
        seed: seed of the order.
        workers: loader processes; they do not affect the batches.
        drop_last: leave out an incomplete last batch.
        start_batch: first batch of the first pass; earlier ones are not read. `len` stays that of a whole pass.
        rank, world_size: this process among those that share the samples.
        pin_memory: copy batches to page-locked memory, for CUDA.
    """
    if batch_size < 1:
        raise UserError(f"batch_size must be at least 1, got {batch_size}")
    if workers:
        _check_open_files(workers)
    sampler = EpochSampler(dataset, batch_size, shuffle, seed, drop_last, start_batch, rank, world_size)
    if drop_last and not len(sampler):
        raise UserError(
            f"a batch of {batch_size} x {world_size} does not fit into {len(dataset)} {dataset.unit}; "
            f"give a batch size of at most {max(len(dataset) // world_size, 1)}"
        )
    if shuffle:
        dataset.check_shares(world_size)
    return EpochLoader(
        _Batches(dataset, whole=pin_memory),
        # The sampler gives whole batches, so the loader must not collect samples.
        batch_size=None,
        sampler=sampler,
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=pin_memory,
        collate_fn=_same,
        worker_init_fn=_start_worker,
        # Otherwise each pass would draw from the global random state and break bit-equal resuming.
        generator=torch.Generator(),
    )


def _check_open_files(workers: int) -> None:
    """`UserError` if loader processes would wait forever for file descriptors; each tensor takes one."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 64 + 32 * workers
    if limit == resource.RLIM_INFINITY or limit >= needed:
        return
    if most != resource.RLIM_INFINITY and most < needed:
        raise UserError(f"workers={workers} needs {needed} open files, {most} are allowed; raise ulimit -n, or give 0")
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, most))


@contextmanager
def worker_errors() -> Iterator[None]:
    """Raise `UserError` if PyTorch reports within the block that a loader process has ended."""
    try:
        yield
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"a loader process has ended ({reason}); lower --workers or --batch-size") from None


def _same(batch: object) -> object:
    return batch


def _start_worker(worker: int) -> None:
    """Return memory, and ignore a SIGTERM to all processes of a run: the training process saves, and ends this one."""
    return_large_memory()
    if hasattr(signal, "sigwaitinfo"):  # macOS has none: there the run stops without saving
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

        def end_with_parent() -> None:
            while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
                pass
            os._exit(0)

        threading.Thread(target=end_with_parent, daemon=True).start()
