"""Memory and time that a call would take, estimated beforehand: a cell that does not fit is skipped, not killed."""

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

# The package's only private names of torch outside of cpu/ (tests/test_imports.py). There is no public way to run a
# call without its memory and see every storage that it would make: tensors without numbers on any device, a mode that
# sees each operator, and the tensors in what an operator returns.
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tokenmix.profiling.units import size

Pass = Literal["forward", "step"]

SHARE = 0.8
"""Part of the free memory that a call may take: scratch space inside kernels is not part of the estimate."""

LONGEST = 60.0
"""Seconds: a call whose least time is longer is not made."""


class _Ledger(TorchDispatchMode):
    """Adds up the storages that operations make, and takes off those that are let go."""

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = 0
        self.seen: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._note(leaf.untyped_storage())
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        if storage in self.seen:
            return
        self.seen[storage] = amount = storage.nbytes()
        self.held += amount
        self.peak = max(self.peak, self.held)
        weakref.finalize(storage, self._let_go, amount)

    def _let_go(self, amount: int) -> None:
        self.held -= amount


def expected_peak(build: Callable[[], Callable[[], object]]) -> int:
    """Bytes at the peak of building something and calling it, found with shapes only: nothing is computed or taken.

    Args:
        build: makes tensors on the device where they will be, and returns what is called.
    """
    ledger = _Ledger()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), ledger:
            call = build()
            call()
    except RuntimeError as error:
        if not overflowed(error):
            raise
        return sys.maxsize
    return ledger.peak


def overflowed(error: Exception) -> bool:
    """Whether PyTorch refused a tensor since the number of its bytes is none that it can hold."""
    return any(
        said in str(error) for said in ("Storage size calculation overflowed", "integer multiplication overflow")
    )


def free_memory() -> int | None:
    """Bytes that this process may still take on the CPU: the machine's, or its container's if that is less."""
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
    try:
        group = Path("/sys/fs/cgroup")
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):
        return free
    return min(free, max(0, limit - used))


def too_large(peak: int, free: int | None) -> str:
    """Why a call with this peak is not made; "" if it can be."""
    if free is None or peak <= SHARE * free:
        return ""
    if peak == sys.maxsize:
        return "needs more memory than PyTorch can count"
    return f"needs about {size(peak)}, and {size(free)} of memory is free"


def too_slow(macs: int, macs_per_second: float, which: Pass) -> str:
    """Why a pass of this many multiply-adds forward is not made on a machine that does that many; "" if it can be.

    Each product of a forward pass has two in the backward pass, so that a step takes three times as long.
    """
    least = macs * (3 if which == "step" else 1) / macs_per_second
    if least <= LONGEST:
        return ""
    return f"would take at least about {_duration(least)} a {'step' if which == 'step' else 'pass'}"


def _duration(seconds: float) -> str:
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:,.0f} {unit}"
    return f"{seconds:.0f} seconds"
