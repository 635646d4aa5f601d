"""Data sets: samples that are read a batch at a time, which of them are used, and draws by the index alone.

Batches come in an order that is a function of (seed, epoch). Other people's transforms draw from global random states;
here they do so under a seed and leave no trace.
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

from tokenmix.errors import UserError
from tokenmix.lab.data.reading import Skipped
from tokenmix.trust import safe_children

S = TypeVar("S")
Batch = TypeVar("Batch")
# A part that is held out: one sample in so many, none below the least (epochs could not be distinguished).
SHARE, LEAST, MOST = 10, 10, 10_000


def hash_indices(seed: int, epoch: int, indices: Tensor, purpose: int = 0) -> np.ndarray:
    """64 random bits for each index, a pure function of (seed, epoch, index); others for each `purpose`.

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
    # Not torch.manual_seed, which notes a call for each GPU of a process that has not used one yet.
    torch.default_generator.manual_seed(bits & 0x7FFFFFFFFFFFFFFF)


@contextmanager
def restored_random_state() -> Iterator[None]:
    """Python's, numpy's and torch's random states as they were, once the block is over."""
    python, numpy, torches = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.default_generator.set_state(torches)


class IndexedDataset(ABC, Generic[Batch]):
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
    def read(self, indices: Tensor, epoch: int) -> Batch:
        """The batch of these samples, as the task takes it."""

    def chosen(self, indices: Tensor) -> "IndexedDataset[Batch]":
        """The samples with these indices; each stays the function of its own index that it was."""
        return self if len(indices) == len(self) else _Chosen(self, indices)

    def training_order(self, seed: int, epoch: int, rank: int, world_size: int) -> np.ndarray:
        """The indices that one of `world_size` processes takes in an epoch, the same number for each.

        Here every world_size-th of one permutation: together the processes read what one process would read with
        batches as many times larger.
        """
        order = np.random.default_rng([abs(seed), epoch]).permutation(len(self))
        # Topped up from the start, so that every process takes the same number of steps.
        return np.resize(order, -(-len(self) // world_size) * world_size)[rank::world_size]

    def check_shares(self, world_size: int) -> None:
        """Raise `UserError` if the samples cannot be shared among this many processes."""
        return


def subset(dataset: IndexedDataset[Batch], count: int | None) -> IndexedDataset[Batch]:
    """`count` of the samples, evenly spread over them, so that no document or place has them all; all for None."""
    return dataset.chosen(spread(len(dataset), count))


def spread(length: int, count: int | None) -> Tensor:
    """`count` indices evenly spread over `length`; all if there are no more, or for None."""
    count = length if count is None else min(count, length)
    return torch.arange(count) * length // max(count, 1)


def balanced_order(dataset: IndexedDataset[Batch], labels: Tensor, sampler: str) -> IndexedDataset[Batch]:
    """The samples of these classes int64 (n,), which training takes in the order that `--sampler` names.

    shuffle is the order of the data set; in balanced an epoch takes as many of each class, give or take one, and as
    many in all as there are. Samples that are read in an order of their own, such as shards, are not balanced.
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
    """Samples of another data set by their indices; in a balanced order if their labels are given."""

    def __init__(self, dataset: IndexedDataset[Batch], indices: Tensor, labels: np.ndarray | None = None) -> None:
        self.dataset, self.indices, self.labels, self.unit = dataset, indices, labels, dataset.unit

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, indices: Tensor, epoch: int) -> Batch:
        return self.dataset.read(self.indices[indices], epoch)

    def training_order(self, seed: int, epoch: int, rank: int, world_size: int) -> np.ndarray:
        if self.labels is None:
            return super().training_order(seed, epoch, rank, world_size)
        rng, count = np.random.default_rng([abs(seed), epoch]), -(-len(self) // world_size) * world_size
        classes = rng.permutation(np.unique(self.labels))
        drawn = []
        for number, label in enumerate(classes):
            own = np.flatnonzero(self.labels == label)
            wanted = len(range(number, count, len(classes)))
            rounds = [rng.permutation(own) for _ in range(-(-wanted // len(own)))]
            drawn.append(np.concatenate(rounds)[:wanted])
        return rng.permutation(np.concatenate(drawn))[rank::world_size]


def choose(labels: Tensor, limit: int | None, seed: int) -> Tensor:
    """Indices of `limit` samples that keep the shares of the classes; of all if there are no more, or for None.

    A larger limit under the same seed contains the smaller one's samples.
    """
    if limit is not None and limit < 1:
        raise UserError(f"a limit of {limit} leaves no images; give 1 or more, or none for all of them")
    if limit is None or limit >= len(labels):
        return torch.arange(len(labels))
    rng = np.random.default_rng(abs(seed))
    order = rng.permutation(len(labels))
    shuffled = labels.numpy()[order]
    share = np.empty(len(order))
    for label in np.unique(shuffled):
        places = np.flatnonzero(shuffled == label)
        share[places] = (np.arange(len(places)) + rng.random()) / len(places)
    return torch.from_numpy(np.sort(order[np.argsort(share, kind="stable")[:limit]]))


def validation_size(count: int, asked: int | None, limit: int | None = None) -> int:
    """How many of `count` training samples are held out: as many as asked for, `UserError` if none would be left; else
    a tenth of those that are used, 10,000 at most, and none where that is fewer than 10.
    """
    if asked is None:
        tenth = min(count, limit or count) // SHARE
        return min(MOST, tenth) if tenth >= LEAST else 0
    if asked >= count:
        raise UserError(
            f"--validation {asked} leaves none of the {count} samples to train on; give {count // SHARE} or less, or "
            "0 for none"
        )
    return asked


def hold_out(labels: Tensor, asked: int | None, limit: int | None = None) -> tuple[Tensor, Tensor]:
    """Indices of the samples to train on, and of those held out for validation, in the shares of the classes.

    A function of labels and number alone: runs with other seeds hold out the same, and a larger part contains a
    smaller one.
    """
    size = validation_size(len(labels), asked, limit)
    held = torch.zeros(len(labels), dtype=torch.bool)
    if size:
        held[choose(labels, size, 0)] = True
    return (~held).nonzero().flatten(), held.nonzero().flatten()


@dataclass(frozen=True)
class DataSet(Generic[S]):
    """Samples for training and testing, whatever a sample is: what a reader returns.

    Attributes:
        train, test: the samples.
        classes: name of each label.
        source: one line: which home or package, version, licence, path.
        skipped: files that were left out.
        spec: what was asked for, which `load_data` fills in.
        validation: those of the training samples that are held out to choose by; None if there are none.
    """

    train: S
    test: S
    classes: list[str]
    source: str
    skipped: Sequence[Skipped] = ()
    spec: str = ""
    validation: S | None = None

    def split(
        self,
        labels: tuple[Tensor, Tensor] | None = None,
        *,
        limit: int | None = None,
        limit_eval: int | None = None,
        validation: int | None = 0,
        seed: int = 0,
    ) -> Self:
        """With samples held out for validation, and with limits; of samples that have a method `subset`.

        Args:
            labels: of the training and of the test samples, whose shares are kept.
            limit: keep this many training samples, chosen by the seed, of those that are not held out.
            limit_eval: keep this many test samples, the same for every seed.
            validation: as `validation_size` takes it.
            seed: chooses the samples that `limit` keeps, nothing else.
        """
        train: Any = self.train
        test: Any = self.test
        learnt, measured = labels or (torch.zeros(len(train)), torch.zeros(len(test)))
        kept, held = hold_out(learnt, validation, limit)
        kept, tested = kept[choose(learnt[kept], limit, seed)], choose(measured, limit_eval, 0)
        return replace(
            self,
            train=train if len(kept) == len(train) else train.subset(kept),
            validation=train.subset(held) if len(held) else None,
            test=test if len(tested) == len(test) else test.subset(tested),
        )


Key = tuple[int, Tensor]


@dataclass(eq=False)
class EpochSampler(Sampler[Key]):
    """Keys (epoch, indices) of the batches of one epoch for one of `world_size` processes.

    The epoch travels in the key, so that loader processes that outlive an epoch know it. While training, the data set
    says what each rank takes, and it is as much for each; while evaluating, rank r takes each world_size-th sample
    and none comes twice.
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
        """The epoch whose order comes next; Lightning calls it before each one."""
        self.epoch = epoch

    def __len__(self) -> int:
        count, world = len(self.dataset), self.world_size
        mine = -(-count // world) if self.shuffle else len(range(self.rank, count, world))
        return mine // self.batch_size if self.drop_last else -(-mine // self.batch_size)

    def __iter__(self) -> Iterator[Key]:
        # Only the pass that a run is resumed in starts late.
        start, self.start_batch = self.start_batch, 0
        epoch = self.epoch
        if self.shuffle:
            order = torch.from_numpy(self.dataset.training_order(self.seed, epoch, self.rank, self.world_size))
        else:
            order = torch.arange(self.rank, len(self.dataset), self.world_size)
        for batch in range(start, len(self)):
            yield epoch, order[batch * self.batch_size : (batch + 1) * self.batch_size]


class _Batches(Dataset[object]):
    def __init__(self, dataset: IndexedDataset) -> None:
        self.dataset = dataset

    def __getitem__(self, index: Key) -> object:
        epoch, indices = index
        return self.dataset.read(indices, epoch)


class EpochLoader(DataLoader[object]):
    """A DataLoader whose batches are those of `IndexedDataset.read`, in the order of an `EpochSampler`."""

    def __init__(self, dataset: IndexedDataset, sampler: EpochSampler, *, workers: int, pin_memory: bool) -> None:
        super().__init__(
            _Batches(dataset),
            # The sampler gives whole batches, so the loader itself must not collect any.
            batch_size=None,
            sampler=sampler,
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=pin_memory,
            collate_fn=_same,
            worker_init_fn=_pass_over_sigterm,
            # Without one of its own, each pass would draw from the global random state and break bit-equal resuming.
            generator=torch.Generator(),
        )

    def __iter__(self) -> Any:
        # Python starts the workers as new interpreters where it does not fork.
        with safe_children():
            return super().__iter__()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, on which the order and the samples depend."""
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
    """A loader whose batches are a function of (seed, epoch, rank); nothing of it draws from the global random state.

    Args:
        dataset: for example `ImageSet.prepared`, or `PackedText`.
        batch_size: samples of one batch of one process.
        shuffle: in a new order each epoch (training); else in the set's own order.
        seed: of the order.
        workers: loader processes; the batches do not depend on it.
        drop_last: leave out a last batch that is not full.
        start_batch: the first pass begins at this batch without reading those before; `len` stays that of a whole pass.
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
    return EpochLoader(dataset, sampler, workers=workers, pin_memory=pin_memory)


def _check_open_files(workers: int) -> None:
    """`UserError` where loader processes would wait for ever for a file descriptor, which carries each tensor."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 64 + 32 * workers
    if limit == resource.RLIM_INFINITY or limit >= needed:
        return
    if most != resource.RLIM_INFINITY and most < needed:
        raise UserError(f"workers={workers} needs {needed} open files, {most} are allowed; raise ulimit -n, or give 0")
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, most))


@contextmanager
def worker_errors() -> Iterator[None]:
    """Raise `UserError` where PyTorch reports, at any place within the block, that a loader process has ended."""
    try:
        yield
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"a loader process has ended ({reason}); lower --workers or --batch-size") from None


def _same(batch: object) -> object:
    return batch


def _pass_over_sigterm(worker: int) -> None:
    """Ignore a SIGTERM that all processes of a run get: the one that trains saves, and ends this one."""
    if hasattr(signal, "sigwaitinfo"):  # macOS has none: there the run stops without saving
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

        def end_with_parent() -> None:
            while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
                pass
            os._exit(0)

        threading.Thread(target=end_with_parent, daemon=True).start()
