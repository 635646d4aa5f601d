"""Limits of this machine, and time and peak memory of calls.

Functions are timed in interleaved rounds, so that a slowdown affects all of them. Memory is read from the allocator.
"""

import os
import random
import statistics
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

# Private names of torch (tests/test_imports.py lists all). No public API runs a call without memory and shows each
# storage that the call would allocate. This needs tensors without data on any device, a mode that sees each operator,
# and the tensors in an operator's output.
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tokenmix.environment import filtered_stderr
from tokenmix.errors import UserError
from tokenmix.profiling.units import size

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
SIDE = {"cpu": 1536, "cuda": 8192}
REPEATS = 9
LONG = 0.05
"""Seconds; a matrix product that takes longer is not tried at a larger size."""


@dataclass(frozen=True)
class Ceilings:
    """Memory bandwidth of a triad in bytes per second, and multiply-adds per second of a matrix product in `dtype`."""

    bytes_per_second: float
    macs_per_second: float
    threads: int
    dtype: str
    array_bytes: int
    side: int


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Best of a few runs each, a second or two in total.

    The triad c = a + 2 b reads two arrays and writes one, each larger than the last-level cache. As in STREAM, reads
    caused by writes are not counted. The product multiplies two square matrices.
    """
    caches = [file.read_text().strip() for file in CACHES.glob("index*/size")]
    last = max((int(text[:-1]) << {"K": 10, "M": 20, "G": 30}[text[-1]] for text in caches), default=0)
    # Twice the last-level cache, within 64 MiB to 256 MiB.
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
    # The warm-up run also maps the pages.
    return min(time_interleaved({"": fn}, repeats=REPEATS, warmup=1, device=device)[""].runs)


BUSY = 0.2
"""CPUs that others may use beyond those left to them, about an idle machine's services."""

STAT = Path("/proc/stat")


class OtherWork:
    """CPU time used by other processes since construction, on this process's CPUs.

        cpus = (busy time of these CPUs - this process's own) / elapsed time

    Time taken by a hypervisor counts as busy. Child processes count as own once they have ended. Linux only: elsewhere
    `cpus()` is None and `warning()` is empty.
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
        """A warning if others used CPUs that `threads` threads needed, else ""."""
        cpus, ours = self.cpus(), len(_allowed())
        if cpus is None or cpus <= max(0, ours - threads) + BUSY:
            return ""
        return (
            f"other programs took {cpus:.1f} of {ours} CPUs meanwhile, so these times are unreliable; close them and "
            "measure again"
        )

    def _busy(self) -> float | None:
        """Busy seconds of this process's CPUs since the system started."""
        try:
            lines = [line.split() for line in self._stat.read_text().splitlines() if line.startswith("cpu")]
        except OSError:
            return None
        names = {f"cpu{number}" for number in _allowed()}
        # user, nice, system, idle, iowait, irq, softirq, steal; user includes guests.
        ticks = [sum(map(int, (*fields[1:4], *fields[6:9]))) for fields in lines if fields[0] in names]
        return sum(ticks) / os.sysconf("SC_CLK_TCK") if len(ticks) == len(names) else None


def _allowed() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def _own() -> float:
    """CPU seconds of this process and its ended children."""
    taken = os.times()
    return taken.user + taken.system + taken.children_user + taken.children_system


Pass = Literal["forward", "step"]

SHARE = 0.8
"""Fraction of free memory that a call may use; the estimate excludes scratch space inside kernels."""

LONGEST = 60.0
"""Seconds; calls with a larger minimum time are skipped."""


class _Ledger(TorchDispatchMode):
    """Adds up allocated storages and subtracts freed ones."""

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
    """Peak bytes of building something and calling it, from shapes only."""
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
    """Whether PyTorch rejected a tensor because its number of bytes overflows."""
    return any(
        said in str(error) for said in ("Storage size calculation overflowed", "integer multiplication overflow")
    )


def free_memory() -> int | None:
    """Free CPU memory for this process, in bytes: the machine's, or its container's if that is less."""
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
    """Why a call with this peak is skipped; "" if it can run."""
    if free is None or peak <= SHARE * free:
        return ""
    if peak == sys.maxsize:
        return "needs more memory than PyTorch can count"
    return f"needs about {size(peak)}, and {size(free)} of memory is free"


def too_slow(macs: int, macs_per_second: float, which: Pass) -> str:
    """Why a pass is skipped at this speed; "" if it can run. A step takes three times as long as a forward pass."""
    least = macs * (3 if which == "step" else 1) / macs_per_second
    if least <= LONGEST:
        return ""
    units = {"days": 86400, "hours": 3600, "minutes": 60, "seconds": 0.5}
    unit = next(unit for unit, length in units.items() if least >= 2 * length)
    return (
        f"would take at least about {least / max(1, units[unit]):,.0f} {unit} a {'step' if which == 'step' else 'pass'}"
    )


SPREAD = 0.5
"""Times are noisy if their interquartile range exceeds this fraction of the median."""


@dataclass(frozen=True)
class Timing:
    """Seconds per call: median and quartiles of `runs`, each of one call or the mean of several."""

    median: float
    q1: float
    q3: float
    runs: tuple[float, ...] = field(repr=False)

    @classmethod
    def of(cls, runs: list[float]) -> "Timing":
        q1, median, q3 = statistics.quantiles(runs, n=4, method="inclusive") if len(runs) > 1 else runs * 3
        return cls(median, q1, q3, tuple(runs))

    @property
    def spread(self) -> float:
        """Interquartile range over the median."""
        return (self.q3 - self.q1) / self.median

    @property
    def noisy(self) -> bool:
        """Whether the interquartile range exceeds `SPREAD` times the median, as when another program ran."""
        return self.spread > SPREAD


def time_interleaved(
    functions: Mapping[str, Callable[[], object]],
    *,
    repeats: int = 9,
    warmup: int = 2,
    device: torch.device | str | None = None,
    turns: Mapping[str, int] | None = None,
    calls: Mapping[str, int] | None = None,
) -> dict[str, Timing]:
    """Time functions in interleaved rounds, reshuffled each round with fixed seeds.

    Args:
        functions: what to time, by name.
        repeats: timed rounds.
        warmup: untimed rounds before them.
        device: a CUDA device to synchronize (default: CPU).
        turns: calls per round, by name (default 1).
        calls: consecutive calls averaged into one time, by name (default 1).

    Raises:
        UserError: `repeats` is below 1.
    """
    if repeats < 1:
        raise UserError(f"repeats must be at least 1, got {repeats}")
    cuda = torch.device(device or "cpu").type == "cuda"
    runs: dict[str, list[float]] = {name: [] for name in functions}
    entries = [name for name in functions for _ in range((turns or {}).get(name, 1))]
    for round_, names in enumerate(orders(entries, warmup + repeats)):
        for name in names:
            seconds = statistics.fmean(_time(functions[name], cuda) for _ in range((calls or {}).get(name, 1)))
            if round_ >= warmup:
                runs[name].append(seconds)
    return {name: Timing.of(times) for name, times in runs.items()}


def orders(names: Iterable[str], rounds: int) -> Iterator[list[str]]:
    """The names in a new random order per round: a function runs with the caches and memory left by its predecessor."""
    drawn, names = random.Random(0), list(names)
    for _ in range(rounds):
        drawn.shuffle(names)
        yield list(names)


def _time(fn: Callable[[], object], cuda: bool) -> float:
    if cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    fn()
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


_NOISE = (b"SyncActivityProfilerHandler", b"gpuGetDeviceCount", b"CPUAllocator.cpp")


def peak_memory(fn: Callable[[], object], device: torch.device | str | None = None) -> int:
    """Peak bytes during `fn()`, beyond those in use at the start.

    On the CPU, the allocator's events are summed in order (torch.profiler); freeing older memory is not credited. On
    CUDA, the value is the difference of `max_memory_allocated` and the memory in use before.

    Args:
        fn: called once; its result is dropped.
        device: where `fn` runs (default: CPU).

    Raises:
        UserError: the device's allocator cannot be observed, such as mps.
    """
    kind = torch.device(device or "cpu")
    if kind.type == "cuda":
        torch.cuda.synchronize(kind)
        torch.cuda.reset_peak_memory_stats(kind)
        before = torch.cuda.memory_allocated(kind)
        fn()
        torch.cuda.synchronize(kind)
        return torch.cuda.max_memory_allocated(kind) - before
    if kind.type != "cpu":
        raise UserError(f"peak memory is measured on cpu and cuda, not on {kind.type!r}; move the model to one of them")

    def without_noise(said: bytes) -> bytes:
        # The profiler prints these lines from C++, without a switch after torch is loaded.
        return b"".join(line for line in said.splitlines(keepends=True) if not any(mark in line for mark in _NOISE))

    watch = profile(profile_memory=True)
    with filtered_stderr(without_noise), watch:
        fn()
    assert watch.kineto_results is not None
    events = [e for e in watch.kineto_results.events() if e.name() == "[memory]"]
    sizes = sorted((e.start_ns(), e.nbytes()) for e in events)  # pyrefly: ignore[missing-attribute]
    return max(accumulate((size for _, size in sizes), initial=0))
