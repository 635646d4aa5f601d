"""Print cost tables, and count the external-attention paper's requirements table."""

import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from tokenmix.errors import UserError
from tokenmix.files import Values, to_json, to_text
from tokenmix.layers import ExternalAttention2d, SAGANAttention2d, SelfAttention
from tokenmix.layers.base import Mixer, count_parameters
from tokenmix.profiling.cost import cost_table
from tokenmix.profiling.table import (
    CostTable,
    Precision,
    ceiling_line,
    cost_rows,
    footnotes,
    rate_rows,
    sentences,
    title_of,
)
from tokenmix.profiling.target import are_mixers
from tokenmix.profiling.units import count

if TYPE_CHECKING:
    from rich.table import Table


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
    shown = Console(stderr=True)
    table = cost_table(
        subjects,
        tokens if mixers else img_size,
        dim,
        device=device,
        precision=precision,
        out=out,
        track=partial(track, description="measuring", console=shown, transient=True, disable=not shown.is_terminal),
    )
    if table.warning:
        print(f"warning: {table.warning}", file=sys.stderr)
    if as_json:
        print(to_json(table.to_json()))
        return
    console = Console()
    console.print(_rich(table, title_of(table), cost_rows(table)))
    console.print(_rich(table, ceiling_line(table), rate_rows(table)))
    for line in [*sentences(table), *footnotes(table)]:
        console.print(line, highlight=False, markup=False)
    if out is not None:
        print(f"cost.json, cost.md, cost.png and cost.svg in {out}")


def _rich(table: CostTable, title: str, rows: Sequence[Sequence[str]]) -> "Table":
    from rich import box
    from rich.table import Table

    shown = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 0))
    shown.add_column("mixer" if table.axis == "tokens" else "model", no_wrap=True)
    for heading in rows[0][1:]:
        shown.add_column(heading, justify="right", no_wrap=True)
    for row, following in pairwise([*rows[1:], [""]]):
        shown.add_row(*row, end_section=following[0] != row[0])
    return shown


CHANNELS, SIDE = 512, 128
SIZE = "an input of 1 x 512 x 128 x 128, as in the table of Guo et al., arXiv 2105.02358"
TRUST = "All figures are counted from our layers; the paper's own could not be looked up."


def eanet_requirements() -> dict[str, Values]:
    shape: Values = {"device": "meta"}
    layers: dict[str, Mixer] = {
        "self-attention, one head": SelfAttention(CHANNELS, num_heads=1, qkv_bias=False, **shape),
        "SAGAN, official": SAGANAttention2d(CHANNELS, variant="official", **shape),
        "SAGAN, paper": SAGANAttention2d(CHANNELS, variant="paper", **shape),
        "SAGAN, compact": SAGANAttention2d(CHANNELS, variant="compact", **shape),
        "external attention, untied": ExternalAttention2d(CHANNELS, tie="none", **shape),
        "external attention, hard tie": ExternalAttention2d(CHANNELS, tie="hard", **shape),
    }
    found: dict[str, Values] = {}
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
    rows = list(eanet_requirements().values())
    if as_json:
        print(to_json({"schema": 2, "size": SIZE, "trust": TRUST, "rows": rows}))
        return
    cells = [[str(row["name"]), f"{row['parameters']:,}", count(row["macs"])] for row in rows]
    print(f"For {SIZE}\n\n{to_text([['mechanism', 'params', 'MACs'], *cells])}\n\n{TRUST}")
