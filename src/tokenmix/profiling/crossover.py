"""At which numbers of tokens one mixer is cheaper than another."""

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from tokenmix.profiling.target import layer_for

Ends = tuple[int | None, int | None]

LIMIT = 1 << 20
"""No larger number of tokens is looked at."""


@dataclass(frozen=True)
class Crossover:
    """Ranges of N, ends included, in which a mixer takes fewer multiply-adds than the reference; None = and beyond."""

    ranges: tuple[tuple[int, int | None], ...]

    def __str__(self) -> str:
        if not self.ranges:
            return "never"
        texts = []
        for first, last in self.ranges:
            if last is None:
                texts.append("always" if first == 1 else f"from N = {first:,}")
            else:
                texts.append(f"up to N = {last:,}" if first == 1 else f"N = {first:,} to {last:,}")
        return ", ".join(texts)


def find_crossover(name: str, dim: int, *, reference: str = "self", **kwargs: object) -> Crossover:
    """Where `macs` of a mixer is below that of self-attention of the same width, from the equations.

    Args:
        name: a name of `list_mixers()`.
        dim: width D of the tokens.
        reference: the mixer compared with.
        **kwargs: arguments for the layers that have them, such as `num_heads`.
    """

    def cheaper(n: int) -> bool:
        # On the meta device a layer has shapes and no numbers, so that a gate of a million tokens costs nothing.
        mine, other = (layer_for(mixer, dim, n, device="meta", **kwargs).macs(n) for mixer in (name, reference))
        return mine < other

    grid = sorted({round(2 ** (i / 2)) for i in range(2 * LIMIT.bit_length() - 1)})
    edges = [1] if cheaper(1) else []
    for (low, before), (high, after) in pairwise((n, cheaper(n)) for n in grid):
        if before != after:
            # It changes once between neighbours of the grid.
            between = range(low + 1, high + 1)
            edges.append(between[bisect_left(between, True, key=lambda n, before=before: cheaper(n) != before)])
    ends: list[int | None] = [edge - 1 for edge in edges[1::2]]
    if len(edges) % 2:
        ends.append(None)
    return Crossover(tuple(zip(edges[::2], ends)))


def measured_crossover(seconds: Mapping[int, float], reference: Mapping[int, float]) -> int | None:
    """The first N at which measured times cross, interpolated on logarithmic axes; None if they do not."""
    return next(_crossings(seconds, reference), None)


def faster_ranges(seconds: Mapping[int, float], reference: Mapping[int, float]) -> tuple[Ends, ...]:
    """Ranges of N in which measured times are below the reference's; an end that the sizes do not show is None."""
    edges: list[int | None] = list(_crossings(seconds, reference))
    smallest = min(seconds)
    if seconds[smallest] <= reference[smallest]:
        edges.insert(0, None)
    if len(edges) % 2:
        edges.append(None)
    return tuple(zip(edges[::2], edges[1::2]))


def _crossings(seconds: Mapping[int, float], reference: Mapping[int, float]) -> Iterator[int]:
    gaps = [(n, math.log(seconds[n] / reference[n])) for n in sorted(seconds)]
    for (low, before), (high, after) in pairwise(gaps):
        if (before > 0) != (after > 0):
            share = before / (before - after)
            yield round(math.exp(math.log(low) + share * math.log(high / low)))
