"""A cost table: one row per mixer or model and size, with its text, its data frame and its figure."""

import io
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tokenmix.environment import environment
from tokenmix.errors import UserError
from tokenmix.files import Values, make_folder, replace_file, to_frame, to_html, to_text, user_path, write_json
from tokenmix.profiling.machine import SPREAD, Ceilings, Pass, Timing
from tokenmix.profiling.units import count, milliseconds, size, to_markdown

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

Precision = Literal["fp32", "bf16", "fp16"]
PASSES: tuple[Pass, Pass] = ("forward", "step")

COSTS = ("params", "MACs", "fwd ms", "step ms", "fwd mem", "step mem")
RATES = ("GMAC/s", "of peak", "GB/s", "of peak", "bound by")

BOUND = 0.25
"""Fraction of a ceiling from which that ceiling is named as the bottleneck of a forward pass."""

Ends = tuple[int | None, int | None]


@dataclass(frozen=True)
class Crossover:
    """Ranges of N, ends included, in which a mixer needs fewer multiply-adds than the reference; None = unbounded."""

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


@dataclass(frozen=True)
class CostRow:
    """One mixer or model at one size, for one sample. Times are in seconds, memory in bytes beyond weights and input.

    Attributes:
        size: number of tokens, or side of the image in pixels.
        macs: multiply-adds of a forward pass; from the equations, or counted for models from other libraries.
        traffic: minimum bytes that a forward pass moves: input, weights and output once.
        forward, step, forward_memory, step_memory: None if not run.
        skipped: why nothing was run, "" if the forward pass was.
        step_skipped: why the step was not run, "" if it was.
    """

    name: str
    size: int
    parameters: int
    macs: int
    traffic: int
    forward: Timing | None
    step: Timing | None
    forward_memory: int | None
    step_memory: int | None
    skipped: str = ""
    step_skipped: str = ""

    @property
    def unsteady(self) -> tuple[Pass, ...]:
        """Passes with noisy times."""
        return tuple(w for w in PASSES if (timing := getattr(self, w)) is not None and timing.noisy)

    @property
    def macs_per_second(self) -> float | None:
        """Of the forward pass."""
        return None if self.forward is None else self.macs / self.forward.median

    @property
    def bytes_per_second(self) -> float | None:
        """Of the forward pass, for the minimum traffic."""
        return None if self.forward is None else self.traffic / self.forward.median


@dataclass(frozen=True)
class CostTable:
    """Cost of several mixers or models, with a table, sentences and a figure; `step` is a forward and backward pass.

    Attributes:
        axis: meaning of a row's size: tokens, or pixels of a side.
        dim: width D of the tokens; None for models.
        device, precision: device and number format.
        ceilings: bandwidth and arithmetic limits of the machine.
        rows: one row per name and size.
        exponents: p of seconds ~ N^p for a forward pass over the upper half of the sizes; N counts tokens, or pixels of
            the whole image. None with one size or unsteady times.
        reference: baseline: self-attention, or the first model.
        crossovers: where the mixer needs fewer multiply-adds than self-attention; empty for models.
        measured: first size at which the forward pass becomes faster or slower than the reference; None without a
            crossing or with unsteady times.
        faster: ranges of sizes in which the forward pass is faster than the reference, with None for an end outside the
            sizes. None instead of ranges if no size has both times, or times are unsteady.
        warning: set if other programs used the CPU and times are unreliable, else "".
        path: folder with cost.json, cost.md and the figure; None if nothing was written.
    """

    axis: Literal["tokens", "pixels"]
    dim: int | None
    device: str
    precision: Precision
    ceilings: Ceilings
    rows: tuple[CostRow, ...]
    exponents: Mapping[str, float | None]
    reference: str
    crossovers: Mapping[str, Crossover]
    measured: Mapping[str, int | None]
    faster: Mapping[str, tuple[Ends, ...] | None]
    warning: str = ""
    path: Path | None = None

    @property
    def best(self) -> dict[int, CostRow]:
        """The row with the fastest forward pass (median) of each size, by size."""
        best = dict[int, CostRow]()
        for row in sorted(self.rows, key=lambda row: (row.size, row.forward.median if row.forward else math.inf)):
            best.setdefault(row.size, row)
        return best

    @property
    def names(self) -> list[str]:
        """The mixers or models, the reference first."""
        return list(self.exponents)

    @property
    def unsteady(self) -> set[str]:
        return {row.name for row in self.rows if "forward" in row.unsteady}

    def seconds(self, name: str) -> dict[int, float]:
        """Forward times by size."""
        return forward_seconds(row for row in self.rows if row.name == name)

    def row(self, name: str, size: int) -> CostRow:
        """The row of one name and size; `UserError` if it was not measured."""
        for row in self.rows:
            if (row.name, row.size) == (name, size):
                return row
        measured = ", ".join(f"{row.name} {row.size}" for row in self.rows)
        raise UserError(f"{name} was not measured at {size}; measured: {measured}")

    def to_json(self) -> Values:
        plain = asdict(self)
        del plain["path"]
        plain["crossovers"] = {name: str(crossover) for name, crossover in self.crossovers.items()}
        for cell, row in zip(plain["rows"], self.rows):
            cell |= {"macs_per_second": row.macs_per_second, "bytes_per_second": row.bytes_per_second}
            cell["unsteady"] = list(row.unsteady)
        return {"schema": 3, **plain, "environment": environment()}

    def to_pandas(self) -> "pd.DataFrame":
        """A data frame with a row per name and size, in seconds and bytes; requires pandas."""
        size = "tokens" if self.axis == "tokens" else "img_size"
        return to_frame(
            {
                "name": row.name,
                size: row.size,
                "parameters": row.parameters,
                "macs": row.macs,
                "forward_seconds": row.forward.median if row.forward else None,
                "step_seconds": row.step.median if row.step else None,
                "forward_memory": row.forward_memory,
                "step_memory": row.step_memory,
                "unsteady": bool(row.unsteady),
            }
            for row in self.rows
        )

    def plot(self) -> "Figure":
        """Forward time and peak memory over size, on logarithmic axes."""
        from tokenmix.profiling.cost_figure import draw_cost

        return draw_cost(self)

    def write(self, out: str | Path) -> Path:
        """Write cost.json, cost.md and the figure as PNG and SVG; return the folder."""
        out = user_path(out)
        make_folder(out)
        write_json(out / "cost.json", self.to_json())
        for suffix in ("png", "svg"):
            picture = io.BytesIO()
            self.plot().savefig(picture, format=suffix, dpi=140)
            replace_file(out / f"cost.{suffix}", picture.getvalue())
        replace_file(out / "cost.md", markdown(self).encode())
        return out

    def _lines(self) -> list[str]:
        return [*([f"warning: {self.warning}"] if self.warning else []), *sentences(self), *footnotes(self)]

    def __str__(self) -> str:
        return "\n".join([to_text(cost_rows(self)), "", *self._lines()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return to_html(cost_rows(self), " ".join(f"{line}." for line in self._lines()))


def upper_sizes(sizes: Iterable[int]) -> list[int]:
    """The upper half of the sizes, at least two if possible, for the growth exponent."""
    ordered = sorted(sizes)
    return ordered[-max(2, (len(ordered) + 1) // 2) :]


def forward_seconds(rows: Iterable[CostRow]) -> dict[int, float]:
    return {row.size: row.forward.median for row in rows if row.forward is not None}


def cost_rows(table: CostTable) -> list[list[str]]:
    """Cells of the cost table, header first."""
    return [["name", axis_of(table), *COSTS], *([row.name, f"{row.size:,}", *_costs(row)] for row in table.rows)]


def rate_rows(table: CostTable) -> list[list[str]]:
    """Cells of the table of rates of a forward pass, header first."""
    return [["name", axis_of(table), *RATES], *([row.name, f"{row.size:,}", *_rates(table, row)] for row in table.rows)]


def axis_of(table: CostTable) -> str:
    return "N" if table.axis == "tokens" else "px"


def _costs(row: CostRow) -> list[str]:
    times = ["-*" if t is None else "~" * t.noisy + milliseconds(t.median) for t in (row.forward, row.step)]
    peaks = ["-*" if peak is None else size(peak) for peak in (row.forward_memory, row.step_memory)]
    return [count(row.parameters), count(row.macs), *times, *peaks]


def _rates(table: CostTable, row: CostRow) -> list[str]:
    macs, moved = row.macs_per_second, row.bytes_per_second
    if macs is None or moved is None:
        return ["-*"] * len(RATES)
    shares = macs / table.ceilings.macs_per_second, moved / table.ceilings.bytes_per_second
    bound = "arithmetic" if shares[0] >= shares[1] else "memory"
    # Far from both ceilings, call overhead, caches or exponentials dominate.
    bound = bound if max(shares) >= BOUND else "neither"
    noisy = "~" * (row.forward is not None and row.forward.noisy)
    numbers = f"{macs / 1e9:.3g}", f"{shares[0]:.0%}", f"{moved / 1e9:.3g}", f"{shares[1]:.0%}"
    return [*(noisy + number for number in numbers), bound]


def footnotes(table: CostTable) -> list[str]:
    """Reasons for skipped measurements, and the meaning of the noise mark."""
    unit = "tokens" if table.axis == "tokens" else "px"
    lines = []
    for row in table.rows:
        what, why = (row.name, row.skipped) if row.skipped else (f"a step of {row.name}", row.step_skipped)
        lines += [f"* {what} at {row.size:,} {unit} was not run: it {why}"] if why else []
    if any(row.unsteady for row in table.rows):
        lines.append(
            f"~ says little: the quartiles of these times are more than {SPREAD:.0%} of their median apart; measure "
            "again on a quieter machine"
        )
    return lines


def sentences(table: CostTable) -> list[str]:
    """A line per name: growth, and where it is faster than the reference."""
    lines = []
    for name in table.names:
        parts = [_growth(table, name)]
        if name in table.crossovers:
            parts.append(f"fewer MACs than self-attention: {table.crossovers[name]}")
        if name != table.reference:
            parts.append(_comparison(table, name))
        sentence = "; ".join(part for part in parts if part)
        lines += [f"{name}: {sentence}"] if sentence else []
    return lines


def _growth(table: CostTable, name: str) -> str:
    if name in table.unsteady:
        return "no growth exponent: its forward times are noisy (~)"
    power = table.exponents[name]
    if power is None:
        return ""
    upper = upper_sizes(table.seconds(name))
    growth = f"time grows as {'N' if table.axis == 'tokens' else 'pixels'}^{power:.2f}"
    if len(upper) == 2:
        return f"{growth} between {_at(table, *upper)}"
    return f"{growth} over the {len(upper)} sizes from {_at(table, upper[0])} to {_at(table, upper[-1])}"


def _comparison(table: CostTable, name: str) -> str:
    ranges, reference = table.faster[name], table.reference
    unsteady = [other for other in (name, reference) if other in table.unsteady]
    if unsteady:
        return f"not compared with {reference}: forward times of {' and '.join(unsteady)} are noisy (~)"
    if ranges is None:
        return ""
    if ranges in ((), ((None, None),)):
        both = [n for n in table.seconds(name) if n in table.seconds(reference)]
        everywhere = len(both) > 1 and len(both) == len({row.size for row in table.rows})
        where = "all of these sizes" if everywhere else _at(table, *both)
        return f"{'faster' if ranges else 'slower'} than {reference} at {where}"
    return f"faster than {reference} {' and '.join(_range(table, ends) for ends in ranges)}"


def _range(table: CostTable, ends: Ends) -> str:
    first, last = ends
    if first is None or last is None:
        return f"up to about {_at(table, last or 0)}" if first is None else f"from about {_at(table, first)} on"
    return f"from about {_at(table, first)} to {_at(table, last)}"


def _at(table: CostTable, *sizes: int) -> str:
    """`N = 64`, or `N = 64 and 256`; `32 px` for images."""
    *before, last = [f"{n:,}" for n in sizes]
    listed = f"{', '.join(before)} and {last}" if before else last
    return f"N = {listed}" if table.axis == "tokens" else f"{listed} px"


def markdown(table: CostTable) -> str:
    """Both tables, their summary and the environment."""
    costs, rates = cost_rows(table), rate_rows(table)
    where: Values = environment()
    measured = f"{where['cpu']}, torch {where['versions']['torch']}, {where['threads']} threads, {where['date']}"
    notes = "\n".join(f"- {line}" for line in [*sentences(table), *footnotes(table)])
    parts = [
        "# Costs",
        f"{title_of(table)}. Measured on {measured}.",
        to_markdown(costs[0], costs[1:]),
        f"Rates of a forward pass; {ceiling_line(table)}.",
        to_markdown(rates[0], rates[1:]),
        f"Warning: {table.warning}." if table.warning else "",
        notes,
        "![Time and memory over size](cost.svg)",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def title_of(table: CostTable) -> str:
    sample = f"N tokens of width {table.dim}" if table.axis == "tokens" else "an image of px x px"
    return f"one sample, {sample}, {table.precision} on {table.device}; step = forward and backward"


def ceiling_line(table: CostTable) -> str:
    top = table.ceilings
    return (
        f"this machine's ceilings: {top.macs_per_second / 1e9:,.0f} GMAC/s, {top.bytes_per_second / 1e9:.1f} GB/s "
        f"({top.threads} thread{'s' * (top.threads != 1)})"
    )
