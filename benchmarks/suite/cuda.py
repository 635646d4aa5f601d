"""The clock of a CUDA device: how long it works, without the time that Python takes to tell it what to do."""

import statistics
import time
from collections.abc import Callable, Mapping

import torch

from tokenmix.profiling import Timing
from tokenmix.profiling.machine import orders

__all__ = ["cuda_rounds"]

FLUSHED = 256 << 20
"""Bytes written between two calls: several times the largest level-2 cache."""

WARMUP_SECONDS, WARMUP_ROUNDS = 0.3, 3
"""Warming up lasts at least so long, until the clocks are up, and so many rounds: a first call compiles."""

HEAD_START = 1.5
"""Times what a call takes to enqueue: so long the device waits before it."""

CYCLES = 10_000_000
"""Some milliseconds of waiting, by which the device's clock rate is taken."""


def cuda_rounds(
    functions: Mapping[str, Callable[[], object]], *, least: int, repeats: int, seconds: float
) -> dict[str, Timing]:
    """Seconds on the device of each function, in rounds, the level-2 cache emptied before each call.

    Before a call the device waits until all of its kernels are enqueued; as far as the driver's queue of about a
    thousand takes them.

    Args:
        functions: what to time, by name.
        least: rounds that are timed in any case.
        repeats: rounds at most.
        seconds: no round begins later than so long after the first.
    """
    cold = torch.empty(FLUSHED, dtype=torch.int8, device="cuda")
    enqueued = _warm_up(functions, cold)
    rate = _cycles_per_second()
    waits = {name: int(HEAD_START * taken * rate) for name, taken in enqueued.items()}
    runs: dict[str, list[float]] = {name: [] for name in functions}
    end = time.perf_counter() + seconds
    for round_, names in enumerate(orders(functions, repeats)):
        if round_ >= least and time.perf_counter() > end:
            break
        for name in names:
            runs[name].append(_time(functions[name], cold, waits[name]))
    assert all(statistics.median(times) > 0 for times in runs.values())
    return {name: Timing.of(times) for name, times in runs.items()}


def _warm_up(functions: Mapping[str, Callable[[], object]], cold: torch.Tensor) -> dict[str, float]:
    """Seconds that the host takes to enqueue each function: the median of its calls, each on an idle device."""
    calls: dict[str, list[float]] = {name: [] for name in functions}
    begin, rounds = time.perf_counter(), 0
    while rounds < WARMUP_ROUNDS or time.perf_counter() - begin < WARMUP_SECONDS:
        rounds += 1
        for name, function in functions.items():
            cold.zero_()
            torch.cuda.synchronize()
            start = time.perf_counter()
            function()
            calls[name].append(time.perf_counter() - start)
            torch.cuda.synchronize()
    return {name: statistics.median(times) for name, times in calls.items()}


def _cycles_per_second() -> float:
    start, end = _events()
    torch.cuda._sleep(1)  # Loads the kernel.
    start.record()
    torch.cuda._sleep(CYCLES)
    end.record()
    torch.cuda.synchronize()
    return CYCLES / (start.elapsed_time(end) / 1e3)


def _time(function: Callable[[], object], cold: torch.Tensor, wait: int) -> float:
    start, end = _events()
    cold.zero_()
    torch.cuda._sleep(wait)
    start.record()
    function()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
