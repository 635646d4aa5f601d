"""Time and peak memory of calls.

Several functions are timed by turns, so that a machine that slows down slows all of them. Memory is read from the
allocator, so that what fused kernels take is counted.
"""

import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.autograd.profiler import profile

from tokenmix.environment import filtered_stderr
from tokenmix.errors import UserError

SPREAD = 0.5
"""Times whose quartiles are farther apart than this share of their median are noisy."""


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: median and quartiles of `runs`, each of one call or the mean of several."""

    median: float
    q1: float
    q3: float
    runs: tuple[float, ...]

    @classmethod
    def of(cls, runs: list[float]) -> "Timing":
        """The summary of these times."""
        q1, median, q3 = statistics.quantiles(runs, n=4, method="inclusive") if len(runs) > 1 else runs * 3
        return cls(median, q1, q3, tuple(runs))

    @property
    def spread(self) -> float:
        """Distance of the quartiles, as a share of the median."""
        return (self.q3 - self.q1) / self.median

    @property
    def noisy(self) -> bool:
        """Whether the quartiles are more than `SPREAD` of the median apart, as where another program ran."""
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
    """Time functions in interleaved rounds, in an order reshuffled each round (the same shuffles in every call).

    Args:
        functions: what to time, by name.
        repeats: rounds that are timed.
        warmup: rounds before them that are not.
        device: a CUDA device to wait for; the CPU if not given.
        turns: how often each function comes in a round, by name; once if not given.
        calls: of how many calls in a row each of its times is the mean, by name; of one if not given.

    Raises:
        UserError: fewer than one round.
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
    """The names in an order that is drawn for each round, so that no function always follows the same one.

    A function runs with the caches and the free memory that the one before it leaves.
    """
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
    """Bytes held at the peak of `fn()`, above what was held when it started.

    On the CPU the allocator's own events are summed in order (torch.profiler); memory that was allocated before and is
    freed inside is not credited. On CUDA this is the difference of `max_memory_allocated` and what was held before.

    Args:
        fn: called once. What it returns is dropped.
        device: where `fn` runs; the CPU if not given.

    Raises:
        UserError: a device whose allocator cannot be watched, such as mps.
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
        # The profiler's own lines come from C++ and have no switch that works once torch is loaded.
        return b"".join(line for line in said.splitlines(keepends=True) if not any(mark in line for mark in _NOISE))

    watch = profile(profile_memory=True)
    with filtered_stderr(without_noise), watch:
        fn()
    assert watch.kineto_results is not None
    events = [e for e in watch.kineto_results.events() if e.name() == "[memory]"]
    sizes = sorted((e.start_ns(), e.nbytes()) for e in events)  # pyrefly: ignore[missing-attribute]
    return max(accumulate((size for _, size in sizes), initial=0))
