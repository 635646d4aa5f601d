"""Cost of mixers or models by input size: parameters, multiply-adds, memory and latency on this machine."""

import math
import statistics
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tokenmix.errors import UserError
from tokenmix.files import make_folder, user_path
from tokenmix.ops.checks import check_choice, check_whole
from tokenmix.profiling.machine import (
    Ceilings,
    OtherWork,
    Pass,
    Timing,
    expected_peak,
    free_memory,
    measure_ceilings,
    peak_memory,
    time_interleaved,
    too_large,
    too_slow,
)
from tokenmix.profiling.table import (
    PASSES,
    CostRow,
    CostTable,
    Crossover,
    Ends,
    Precision,
    forward_seconds,
    upper_sizes,
)
from tokenmix.profiling.target import Measured, Target, layer_for, named, targets_for
from tokenmix.trust import from_caller

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DIM = 256
TOKENS = (196, 1024, 4096)
"""Images of 224, 512 and 1,024 px in patches of 16."""
SECONDS = 20.0
"""Approximate time budget for one size, in seconds; at least two rounds run."""
SAMPLE = 0.2
"""Approximate minimum total time of all calls of a cell, in seconds."""
RUN = 0.002
"""Seconds; several shorter calls are averaged into one time."""

FULL = "took more memory than the device has"

# Far beyond any memory; for larger sizes, byte counts overflow in PyTorch.
LARGEST_TOKENS = 1 << 28
LARGEST_SIDE = 1 << 16
LARGEST_DIM = 1 << 20
LIMIT = 1 << 20
"""Largest N in the search for the crossover of two mixers."""


@from_caller
def cost(
    names: str | nn.Module | Sequence[str | nn.Module] | Mapping[str, str | nn.Module],
    sizes: int | Sequence[int] | None = None,
    dim: int | None = None,
    *,
    device: str = "cpu",
    precision: Precision = "fp32",
    repeats: int = 7,
    out: str | Path | None = None,
    track: Callable[[Sequence[int]], Iterable[int]] = iter,
    **kwargs: Any,
) -> CostTable:
    """Measure mixers at several numbers of tokens against self-attention, or models at several image sizes.

    Args:
        names: mixers of `list_mixers()`; or image models, as names (ours, timm's, torchvision's) or modules. A mapping
            gives each model a name for the table; a module in a list is named by its class.
        sizes: numbers of tokens N (default 196, 1,024 and 4,096); or sides of the image (default: the model's own).
        dim: width D of the tokens (default 256).
        device: cpu or cuda.
        precision: of weights and input.
        repeats: rounds of timing, fewer for slow calls; short calls run several times per round. The names are
            interleaved.
        out: a folder for cost.json, cost.md and the figure; `.write(folder)` does the same later.
        track: wraps the sizes during measurement, for a progress bar such as `rich.progress.track`.
        **kwargs: arguments passed to layers that accept them, such as `num_heads`.

    Returns:
        Parameters, multiply-adds, time and memory: `print` it, `.best`, `.path`, `.to_pandas()`, `.plot()`, `.row(name,
        size)`.

    Raises:
        UserError: a name or the device is unknown; no layer accepts an argument; or a width or size is below 1, too
            large, or not accepted by a model.
    """
    if device not in ("cpu", "cuda"):
        raise UserError(f"unknown device {device!r}; costs are measured on cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("no CUDA device is available; measure on cpu")
    check_choice("precision", precision, DTYPES)
    check_whole(repeats=repeats)
    place, dtype = torch.device(device), DTYPES[precision]
    if dim is not None:
        _check_range("dim", [dim], LARGEST_DIM)
    if not isinstance(names, Mapping):
        names = named([names] if isinstance(names, str | nn.Module | type) else names)
    targets, mixers = targets_for(names, dim=dim or DIM, dtype=dtype, kwargs=kwargs)
    found = list(targets)
    reference, others = found[0], found[1:]
    if not mixers and (dim is not None or kwargs):
        raise UserError(
            f"dim={dim} and similar options apply to mixers only; {reference!r} is a model with its own width"
        )
    if sizes is None:
        sizes = TOKENS if mixers else targets[reference](device="meta").x.shape[2]
    sizes = [sizes] if isinstance(sizes, int) else sizes
    what, largest = ("numbers of tokens", LARGEST_TOKENS) if mixers else ("sides of images", LARGEST_SIDE)
    _check_range(what, sizes, largest)
    sizes = sorted(set(sizes))
    if out is not None:
        # Fail before minutes of measurement.
        make_folder(user_path(out))
    outlines = {n: {name: target(n, device="meta") for name, target in targets.items()} for n in sizes}
    counts = {n: {name: outline.counts() for name, outline in outlines[n].items()} for n in sizes}
    others_work = OtherWork()
    ceilings = measure_ceilings(place, dtype)
    by_size = {n: _measure(targets, n, outlines[n], counts[n], ceilings, place, repeats) for n in track(sizes)}
    # None if a time is noisy: growth and crossings would reflect noise.
    rows = {name: [by_size[n][name] for n in sizes] for name in found}
    steady = {
        name: {} if any("forward" in row.unsteady for row in rows[name]) else forward_seconds(rows[name])
        for name in found
    }
    both = {name: {n: s for n, s in steady[name].items() if n in steady[reference]} for name in others}
    table = CostTable(
        axis="tokens" if mixers else "pixels",
        dim=dim or DIM if mixers else None,
        device=str(place),
        precision=precision,
        ceilings=ceilings,
        rows=tuple(row for name in found for row in rows[name]),
        exponents={name: exponent({n if mixers else n**2: s for n, s in steady[name].items()}) for name in found},
        reference=reference,
        crossovers={name: find_crossover(name, dim or DIM, reference="self", **kwargs) for name in others}
        if mixers
        else {},
        measured={name: measured_crossover(both[name], steady[reference]) for name in others},
        faster={name: faster_ranges(both[name], steady[reference]) if both[name] else None for name in others},
        warning=others_work.warning(torch.get_num_threads()) if place.type == "cpu" else "",
    )
    return table if out is None else replace(table, path=table.write(out))


cost_table = cost
"""`tokenmix.cost` by the name that it has in `tokenmix.profiling`, where `cost` is this module."""


def _check_range(what: str, given: Sequence[int], largest: int) -> None:
    if not given or not all(isinstance(one, int) and 1 <= one <= largest for one in given):
        told = ", ".join(map(str, given)) or "none"
        raise UserError(f"{what} must be whole, at least 1 and at most {largest:,}, got {told}")


def _measure(
    targets: Mapping[str, Target],
    n: int,
    outlines: Mapping[str, Measured],
    counts: Mapping[str, Mapping[str, int]],
    ceilings: Ceilings,
    device: torch.device,
    repeats: int,
) -> dict[str, CostRow]:
    """Measure one row per name; passes that exceed memory or time are skipped with a reason, also after GPU errors."""
    top = ceilings.macs_per_second
    reasons = {name: _reasons(outline, counts[name]["macs"], top, device) for name, outline in outlines.items()}
    built: dict[str, Measured] = {}
    for name in (name for name in targets if not reasons[name]["forward"]):
        try:
            built[name] = targets[name](n, device=device)
        except torch.OutOfMemoryError:
            reasons[name] = dict.fromkeys(PASSES, FULL)
    for which in PASSES if device.type == "cuda" else ():
        for name in (name for name in built if not reasons[name][which]):
            try:
                getattr(built[name], which)()
            except torch.OutOfMemoryError:
                reasons[name][which] = FULL
    calls = [{name: getattr(b, which) for name, b in built.items() if not reasons[name][which]} for which in PASSES]
    forward, step = (_time(functions, repeats, device) for functions in calls)
    forward_peak, step_peak = ({name: peak_memory(call, device) for name, call in fs.items()} for fs in calls)
    return {
        name: CostRow(
            name=name,
            size=n,
            **counts[name],
            forward=forward.get(name),
            step=step.get(name),
            forward_memory=forward_peak.get(name),
            step_memory=step_peak.get(name),
            skipped=why["forward"],
            step_skipped=why["step"],
        )
        for name, why in reasons.items()
    }


def _reasons(outline: Measured, macs: int, macs_per_second: float, device: torch.device) -> dict[Pass, str]:
    """Reasons to skip passes, found in advance because a CPU process that exceeds memory is killed."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # free what PyTorch caches from earlier sizes
    free = free_memory() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    why: dict[Pass, str] = {"forward": "", "step": ""}
    for which in reversed(PASSES):
        peak = expected_peak(outline.dry_run(which, device))
        why[which] = too_large(peak, free) or too_slow(macs, macs_per_second, which)
        # A forward pass needs less time and memory.
        if not why[which]:
            break
    return why


def _time(functions: Mapping[str, Callable[[], object]], repeats: int, device: torch.device) -> dict[str, Timing]:
    """Seconds of each function; short calls run several times per round for a large enough sample."""
    once = time_interleaved(functions, repeats=1, warmup=1, device=device)
    least = {name: timing.median for name, timing in once.items()}
    short = {name: fn for name, fn in functions.items() if least[name] < SAMPLE}
    if short:
        # A single delayed call would look long enough.
        again = time_interleaved(short, repeats=2, warmup=0, device=device)
        least |= {name: min(least[name], *timing.runs) for name, timing in again.items()}
    least = {name: max(1e-6, seconds) for name, seconds in least.items()}
    rounds = max(min(2, repeats), min(repeats, int(SECONDS / 2 / max(1e-6, sum(least.values())))))
    wanted = {name: max(1, math.ceil(SAMPLE / rounds / seconds)) for name, seconds in least.items()}
    calls = {name: min(wanted[name], math.ceil(RUN / seconds)) for name, seconds in least.items()}
    turns = {name: math.ceil(wanted[name] / calls[name]) for name in least}
    return time_interleaved(functions, repeats=rounds, warmup=0, device=device, turns=turns, calls=calls)


def exponent(seconds: Mapping[int, float]) -> float | None:
    """p of seconds ~ N^p by least squares on logarithms over `upper_sizes`."""
    upper = upper_sizes(seconds)
    if len(upper) < 2:
        return None
    xs, ys = [math.log(n) for n in upper], [math.log(seconds[n]) for n in upper]
    return statistics.linear_regression(xs, ys).slope


def find_crossover(name: str, dim: int, *, reference: str = "self", **kwargs: object) -> Crossover:
    """Where a mixer needs fewer multiply-adds than self-attention of the same width, from the equations.

    Args:
        name: a name of `list_mixers()`.
        dim: width D of the tokens.
        reference: baseline mixer.
        **kwargs: arguments passed to layers that accept them, such as `num_heads`.
    """

    def cheaper(n: int) -> bool:
        # On the meta device a gate of a million tokens needs no memory.
        mine, other = (layer_for(mixer, dim, n, device="meta", **kwargs).macs(n) for mixer in (name, reference))
        return mine < other

    grid = sorted({round(2 ** (i / 2)) for i in range(2 * LIMIT.bit_length() - 1)})
    edges = [1] if cheaper(1) else []
    for (low, before), (high, after) in pairwise((n, cheaper(n)) for n in grid):
        if before != after:
            # One change between neighbours of the grid.
            between = range(low + 1, high + 1)
            edges.append(between[bisect_left(between, True, key=lambda n, before=before: cheaper(n) != before)])
    ends: list[int | None] = [edge - 1 for edge in edges[1::2]]
    if len(edges) % 2:
        ends.append(None)
    return Crossover(tuple(zip(edges[::2], ends)))


def measured_crossover(seconds: Mapping[int, float], reference: Mapping[int, float]) -> int | None:
    """The first N at which measured times cross, interpolated on logarithmic axes; None without a crossing."""
    ranges = faster_ranges(seconds, reference) if seconds else ()
    return next((end for ends in ranges for end in ends if end is not None), None)


def faster_ranges(seconds: Mapping[int, float], reference: Mapping[int, float]) -> tuple[Ends, ...]:
    """Ranges of N in which measured times are below the reference's; None for an end outside the sizes."""
    gaps = [(n, math.log(seconds[n] / reference[n])) for n in sorted(seconds)]
    edges: list[int | None] = [None] if gaps[0][1] <= 0 else []
    for (low, before), (high, after) in pairwise(gaps):
        if (before > 0) != (after > 0):
            share = before / (before - after)
            edges.append(round(math.exp(math.log(low) + share * math.log(high / low))))
    if len(edges) % 2:
        edges.append(None)
    return tuple(zip(edges[::2], edges[1::2]))
