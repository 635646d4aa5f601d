"""The table of computational requirements of the external-attention paper, with our counts beside the printed ones."""

import json
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from tokenmix.cost.units import count
from tokenmix.layers import ExternalAttention2d, SAGANAttention2d, SelfAttention
from tokenmix.layers.base import Mixer

__all__ = ["Requirement", "eanet_requirements", "print_requirements"]

CHANNELS, SIDE = 512, 128
SOURCE = "Guo et al., arXiv 2105.02358, computational requirements for an input of 1 x 512 x 128 x 128"
TRUST = "[M]: printed figures as remembered, not looked up; [C]: our own arithmetic"
MEBI = 1 << 20
# (millions of parameters, G multiply-adds), in the table's order.
PRINTED: dict[str, tuple[float, float]] = {
    "SA": (1.00, 292.0),
    "DANet": (4.82, 79.5),
    "A2": (1.01, 25.7),
    "APC": (2.03, 17.6),
    "DM": (3.00, 35.1),
    "ACF": (0.75, 79.5),
    "Ham": (0.50, 17.6),
    "EA": (0.55, 9.2),
}


@dataclass(frozen=True)
class Requirement:
    """One mechanism: our counts, None where we do not have it; the printed ones, None where the table has none."""

    name: str
    layer: str
    parameters: int | None
    macs: int | None
    printed: str | None
    printed_mparams: float | None
    printed_gmacs: float | None
    trust: str
    gap: str


def eanet_requirements() -> list[Requirement]:
    """The rows, mechanisms of ours first."""
    shape: dict[str, Any] = {"device": "meta"}
    rows = [
        _row("self-attention, one head", SelfAttention(CHANNELS, num_heads=1, qkv_bias=False, **shape), "SA"),
        *(
            _row(f"SAGAN, {v}", SAGANAttention2d(CHANNELS, variant=v, **shape))
            for v in ("official", "paper", "compact")
        ),
        _row("external attention, untied", ExternalAttention2d(CHANNELS, tie="none", **shape), "EA"),
        _row("external attention, hard tie", ExternalAttention2d(CHANNELS, tie="hard", **shape), "EA"),
    ]
    known = {row.printed for row in rows}
    others = [_missing(name) for name in PRINTED if name not in known]
    return [*rows, *others]


def _row(name: str, layer: Mixer, printed: str | None = None) -> Requirement:
    tokens = SIDE * SIDE
    # The table's projections have no biases; ours of self-attention has one behind the output.
    without = layer.proj.bias.numel() if isinstance(layer, SelfAttention) else 0
    parameters, macs = sum(p.numel() for p in layer.parameters()) - without, layer.macs(tokens)
    theirs = PRINTED.get(printed or "", (None, None))
    gap = _gap(parameters, macs, theirs)
    return Requirement(name, type(layer).__name__, parameters, macs, printed, *theirs, "M" if printed else "C", gap)


def _missing(name: str) -> Requirement:
    return Requirement(name, "", None, None, name, *PRINTED[name], "M", "not in tokenmix")


def _gap(parameters: int, macs: int, theirs: tuple[float | None, float | None]) -> str:
    """How far ours are from the printed figures, the parameters in both meanings of a million."""
    if theirs[0] is None or theirs[1] is None:
        return "not in the table"
    decimal, binary = (parameters / million / theirs[0] - 1 for million in (1e6, MEBI))
    return f"params {decimal:+.1%} ({binary:+.1%} if M is 2^20), MACs {macs / 1e9 / theirs[1] - 1:+.1%}"


def print_requirements(*, as_json: bool) -> int:
    """`tokenmix cost --table eanet`; returns the exit code."""
    rows = eanet_requirements()
    if as_json:
        print(json.dumps({"schema": 1, "source": SOURCE, "trust": TRUST, "rows": [asdict(r) for r in rows]}, indent=2))
        return 0
    table = Table(title=SOURCE, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("mechanism", "params", "MACs", "printed", "gap"):
        table.add_column(heading, justify="left" if heading in ("mechanism", "gap") else "right")
    for row in rows:
        table.add_row(*_cells(row))
    console = Console()
    console.print(table)
    console.print(TRUST, highlight=False, markup=False)
    return 0


def _cells(row: Requirement) -> tuple[str, ...]:
    ours = ("-", "-") if row.macs is None else (f"{row.parameters:,}", count(row.macs))
    printed = f"{row.printed_mparams:.2f} M, {row.printed_gmacs:g} G \\[{row.trust}]" if row.printed else "-"
    return row.name, *ours, printed, row.gap
