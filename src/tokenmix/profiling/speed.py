"""Interleaved timing of several functions, so that a machine that slows down slows all of them."""

import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from tokenmix.errors import UserError


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
