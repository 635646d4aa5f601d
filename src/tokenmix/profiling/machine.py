"""What this machine can do, what other programs took of it meanwhile, and whether a call is too much for it."""

import os
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

# The package's only private names of torch outside of cpu/ (tests/test_imports.py). There is no public way to run a
# call without its memory and see every storage that it would make: tensors without numbers on any device, a mode that
# sees each operator, and the tensors in what an operator returns.
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tokenmix.profiling.measure import time_interleaved
from tokenmix.profiling.units import size

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
SIDE = {"cpu": 1536, "cuda": 8192}
REPEATS = 9
LONG = 0.05
"""Seconds of a product that is not tried at a larger size."""


@dataclass(frozen=True)
class Ceilings:
    """Bytes a second of a triad, and multiply-adds a second of a matrix product of the type that was asked for."""

    bytes_per_second: float
    macs_per_second: float
    threads: int
    dtype: str
    array_bytes: int
    side: int


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """The best of a few runs of each, a second or two in all.

    The triad c = a + 2 b reads two arrays and writes one, each larger than the last-level cache; the reading of lines
    that are written into is not counted, as in STREAM. The product is of two square matrices.
    """
    caches = [file.read_text().strip() for file in CACHES.glob("index*/size")]
    last = max((int(text[:-1]) << {"K": 10, "M": 20, "G": 30}[text[-1]] for text in caches), default=0)
    # Twice the last-level cache; 64 MiB to 256 MiB.
    size = 1 << 30 if device.type == "cuda" else min(256 << 20, max(64 << 20, 2 * last))
    a, b, c = (torch.ones(size // 4, device=device) for _ in range(3))
    triad = _least_seconds(partial(torch.add, a, b, alpha=2.0, out=c), device)
    side, product = SIDE[device.type] // 8, 0.0
    while product < LONG and side < SIDE[device.type]:
        side *= 2
        left, right, out = torch.ones(3, side, side, device=device, dtype=dtype)
        product = _least_seconds(partial(torch.mm, left, right, out=out), device)
    threads, name = torch.get_num_threads(), str(dtype).removeprefix("torch.")
    return Ceilings(3 * size / triad, side**3 / product, threads, name, size, side)


def _least_seconds(fn: partial[object], device: torch.device) -> float:
    # The first run, which is not timed, also maps the pages.
    return min(time_interleaved({"": fn}, repeats=REPEATS, warmup=1, device=device)[""].runs)


BUSY = 0.2
"""CPUs that others may take beyond those that are left to them: about what an idle machine's services do."""

STAT = Path("/proc/stat")


class OtherWork:
    """CPU time that others took since this was made, on the CPUs that this process may run on. Linux only:
    elsewhere `cpus()` is None and `warning()` is empty.

        cpus = (busy time of these CPUs - this process's own) / time that has passed

    Time that a hypervisor took away counts as busy. Processes of this one count as its own once they have ended.
    """

    def __init__(self, stat: Path = STAT) -> None:
        self._stat = stat
        self._start = time.perf_counter(), self._busy(), _own()

    def cpus(self) -> float | None:
        """CPUs that others kept busy on average, since the start."""
        start, busy_before, own_before = self._start
        busy = self._busy()
        if busy is None or busy_before is None:
            return None
        passed = max(time.perf_counter() - start, 1e-9)
        return max(0.0, (busy - busy_before - (_own() - own_before)) / passed)

    def warning(self, threads: int) -> str:
        """A warning if others took CPUs that `threads` threads wanted, else ""."""
        cpus, ours = self.cpus(), len(_allowed())
        if cpus is None or cpus <= max(0, ours - threads) + BUSY:
            return ""
        return (
            f"other programs took {cpus:.1f} of {ours} CPUs meanwhile, so these times are unreliable; close them and "
            "measure again"
        )

    def _busy(self) -> float | None:
        """Seconds that the CPUs of this process have been busy since the system started."""
        try:
            lines = [line.split() for line in self._stat.read_text().splitlines() if line.startswith("cpu")]
        except OSError:
            return None
        names = {f"cpu{number}" for number in _allowed()}
        # user, nice, system, idle, iowait, irq, softirq, steal; guests are in user.
        ticks = [sum(map(int, (*fields[1:4], *fields[6:9]))) for fields in lines if fields[0] in names]
        return sum(ticks) / os.sysconf("SC_CLK_TCK") if len(ticks) == len(names) else None


def _allowed() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def _own() -> float:
    """Seconds of CPU that this process and those of its processes that have ended have taken."""
    taken = os.times()
    return taken.user + taken.system + taken.children_user + taken.children_system


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
        self.seen: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and (storage := leaf.untyped_storage()) not in self.seen:
                self.seen[storage] = amount = storage.nbytes()
                self.held += amount
                self.peak = max(self.peak, self.held)
                weakref.finalize(storage, self._let_go, amount)
        return out

    def _let_go(self, amount: int) -> None:
        self.held -= amount


def expected_peak(build: Callable[[], Callable[[], object]]) -> int:
    """Bytes at the peak of building something and calling it, found with shapes only: nothing is computed or taken."""
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
    units = {"days": 86400, "hours": 3600, "minutes": 60, "seconds": 0.5}
    unit = next(unit for unit, length in units.items() if least >= 2 * length)
    return (
        f"would take at least about {least / max(1, units[unit]):,.0f} {unit} a {'step' if which == 'step' else 'pass'}"
    )
