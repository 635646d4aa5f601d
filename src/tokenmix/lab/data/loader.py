"""Batches in an order that is a function of (seed, epoch) alone."""

import os
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from tokenmix.errors import UserError
from tokenmix.lab.data.indexed import IndexedDataset
from tokenmix.trust import safe_children

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
