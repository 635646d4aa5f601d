"""Print cost tables, write them to a folder, and count the external-attention paper's requirements table."""

import io
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import torch
from torch import nn

from tokenmix.environment import environment
from tokenmix.errors import UserError
from tokenmix.files import Values, make_folder, replace_file, to_json, write_json
from tokenmix.layers import ExternalAttention2d, SAGANAttention2d, SelfAttention
from tokenmix.layers.base import Mixer, count_parameters
from tokenmix.profiling.cost import CostRow, CostTable, Ends, Precision, cost_table, upper_sizes
from tokenmix.profiling.machine import SPREAD, Timing
from tokenmix.profiling.target import are_mixers
from tokenmix.profiling.units import count, milliseconds, size, to_markdown

if TYPE_CHECKING:
    from rich.table import Table

COSTS = ("params", "MACs", "fwd ms", "step ms", "fwd mem", "step mem")
RATES = ("GMAC/s", "of peak", "GB/s", "of peak", "bound by")

BOUND = 0.25
"""Fraction of a ceiling from which that ceiling is named as the bottleneck of a forward pass."""


def print_costs(
    subjects: Mapping[str, str | nn.Module],
    *,
    tokens: tuple[int, ...] | None = None,
    img_size: tuple[int, ...] | None = None,
    dim: int | None = None,
    device: str = "cpu",
    precision: Precision = "fp32",
    threads: int | None = None,
    out: Path | None = None,
    as_json: bool = False,
) -> None:
    """Run `tokenmix cost`: print tables or JSON, and write the output folder."""
    from rich.console import Console
    from rich.progress import track

    if not subjects:
        raise UserError("nothing to measure: name mixers or models, or ask for the paper's table with --table eanet")
    if threads is not None:
        cpus = os.cpu_count() or 1
        if not 1 <= threads <= cpus:
            raise UserError(f"threads must be at least 1 and at most the {cpus} CPUs here, got {threads}")
        torch.set_num_threads(threads)
    mixers = are_mixers(subjects)
    if (img_size if mixers else tokens) is not None:
        kind, right, wrong = ("mixer", "--tokens", "--img-size") if mixers else ("model", "--img-size", "--tokens")
        raise UserError(f"{next(iter(subjects))!r} is a {kind}: give {right} instead of {wrong}")
    if out is not None:
        # Fail before minutes of measurement.
        make_folder(out)
    shown = Console(stderr=True)
    table = cost_table(
        subjects,
        tokens if mixers else img_size,
        dim,
        device=device,
        precision=precision,
        track=partial(track, description="measuring", console=shown, transient=True, disable=not shown.is_terminal),
    )
    if out is not None:
        write_cost(table, out)
    if table.warning:
        print(f"warning: {table.warning}", file=sys.stderr)
    if as_json:
        print(to_json(table.to_json()))
        return
    console = Console()
    heading, ceilings = _title(table), _ceiling_line(table)
    console.print(_rich(table, heading, COSTS, [_costs(row) for row in table.rows]))
    console.print(_rich(table, ceilings, RATES, [_rates(table, row) for row in table.rows]))
    for line in [*sentences(table), *footnotes(table)]:
        console.print(line, highlight=False, markup=False)
    if out is not None:
        print(f"cost.json, cost.md, cost.png and cost.svg in {out}")


def write_cost(table: CostTable, folder: Path) -> None:
    from tokenmix.profiling.cost_figure import draw_cost

    make_folder(folder)
    write_json(folder / "cost.json", table.to_json())
    for suffix in ("png", "svg"):
        picture = io.BytesIO()
        draw_cost(table).savefig(picture, format=suffix, dpi=140)
        replace_file(folder / f"cost.{suffix}", picture.getvalue())
    replace_file(folder / "cost.md", markdown(table).encode())


def markdown(table: CostTable) -> str:
    """Both tables, their summary and the environment."""
    head, *costs = cost_rows(table)
    rates = [[row.name, f"{row.size:,}", *_rates(table, row)] for row in table.rows]
    where: Values = environment()
    measured = f"{where['cpu']}, torch {where['versions']['torch']}, {where['threads']} threads, {where['date']}"
    notes = "\n".join(f"- {line}" for line in [*sentences(table), *footnotes(table)])
    parts = [
        "# Costs",
        f"{_title(table)}. Measured on {measured}.",
        to_markdown(head, costs),
        f"Rates of a forward pass; {_ceiling_line(table)}.",
        to_markdown(["name", axis_of(table), *RATES], rates),
        f"Warning: {table.warning}." if table.warning else "",
        notes,
        "![Time and memory over size](cost.svg)",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _rich(table: CostTable, title: str, headings: Sequence[str], cells: Sequence[Sequence[str]]) -> "Table":
    from rich import box
    from rich.table import Table

    shown = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 0))
    shown.add_column("mixer" if table.axis == "tokens" else "model", no_wrap=True)
    for heading in (axis_of(table), *headings):
        shown.add_column(heading, justify="right", no_wrap=True)
    for i, (row, texts) in enumerate(zip(table.rows, cells)):
        last = i + 1 == len(table.rows) or table.rows[i + 1].name != row.name
        shown.add_row(row.name, f"{row.size:,}", *texts, end_section=last)
    return shown


def cost_rows(table: CostTable) -> list[list[str]]:
    """Cells of the cost table, header first."""
    return [["name", axis_of(table), *COSTS], *([row.name, f"{row.size:,}", *_costs(row)] for row in table.rows)]


def axis_of(table: CostTable) -> str:
    return "N" if table.axis == "tokens" else "px"


def _title(table: CostTable) -> str:
    sample = f"N tokens of width {table.dim}" if table.axis == "tokens" else "an image of px x px"
    return f"one sample, {sample}, {table.precision} on {table.device}; step = forward and backward"


def _ceiling_line(table: CostTable) -> str:
    top = table.ceilings
    return (
        f"this machine's ceilings: {top.macs_per_second / 1e9:,.0f} GMAC/s, {top.bytes_per_second / 1e9:.1f} GB/s "
        f"({top.threads} thread{'s' * (top.threads != 1)})"
    )


def _costs(row: CostRow) -> list[str]:
    times = [_time(row.forward, "forward" in row.unsteady), _time(row.step, "step" in row.unsteady)]
    peaks = ["-*" if peak is None else size(peak) for peak in (row.forward_memory, row.step_memory)]
    return [count(row.parameters), count(row.macs), *times, *peaks]


def _time(timing: Timing | None, unsteady: bool) -> str:
    return "-*" if timing is None else "~" * unsteady + milliseconds(timing.median)


def _rates(table: CostTable, row: CostRow) -> list[str]:
    macs, moved = row.macs_per_second, row.bytes_per_second
    if macs is None or moved is None:
        return ["-*"] * len(RATES)
    shares = macs / table.ceilings.macs_per_second, moved / table.ceilings.bytes_per_second
    bound = "arithmetic" if shares[0] >= shares[1] else "memory"
    # Far from both ceilings, call overhead, caches or exponentials dominate.
    bound = bound if max(shares) >= BOUND else "neither"
    return [f"{macs / 1e9:.3g}", f"{shares[0]:.0%}", f"{moved / 1e9:.3g}", f"{shares[1]:.0%}", bound]


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


CHANNELS, SIDE = 512, 128
SIZE = "an input of 1 x 512 x 128 x 128, as in the table of Guo et al., arXiv 2105.02358"
TRUST = "All figures are counted from our layers; the paper's own could not be looked up."


class Requirement(TypedDict):
    name: str
    layer: str
    parameters: int
    macs: int


def eanet_requirements() -> dict[str, Requirement]:
    shape: Values = {"device": "meta"}
    layers: dict[str, Mixer] = {
        "self-attention, one head": SelfAttention(CHANNELS, num_heads=1, qkv_bias=False, **shape),
        "SAGAN, official": SAGANAttention2d(CHANNELS, variant="official", **shape),
        "SAGAN, paper": SAGANAttention2d(CHANNELS, variant="paper", **shape),
        "SAGAN, compact": SAGANAttention2d(CHANNELS, variant="compact", **shape),
        "external attention, untied": ExternalAttention2d(CHANNELS, tie="none", **shape),
        "external attention, hard tie": ExternalAttention2d(CHANNELS, tie="hard", **shape),
    }
    found: dict[str, Requirement] = {}
    for name, layer in layers.items():
        # The other projections have no biases; our self-attention has an output bias.
        without = layer.proj.bias.numel() if isinstance(layer, SelfAttention) else 0
        found[name] = {
            "name": name,
            "layer": type(layer).__name__,
            "parameters": count_parameters(layer) - without,
            "macs": layer.macs(SIDE * SIDE),
        }
    return found


def print_requirements(*, as_json: bool) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    rows = list(eanet_requirements().values())
    if as_json:
        print(to_json({"schema": 2, "size": SIZE, "trust": TRUST, "rows": rows}))
        return
    table = Table(title=f"For {SIZE}", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("mechanism", "params", "MACs"):
        table.add_column(heading, justify="left" if heading == "mechanism" else "right")
    for row in rows:
        table.add_row(row["name"], f"{row['parameters']:,}", count(row["macs"]))
    console = Console()
    console.print(table)
    console.print(TRUST, highlight=False, markup=False)
