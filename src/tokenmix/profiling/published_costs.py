"""Our counts at the size of the external-attention paper's table of computational requirements."""

from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from tokenmix.files import to_json
from tokenmix.layers import ExternalAttention2d, SAGANAttention2d, SelfAttention
from tokenmix.layers.base import Mixer, count_parameters
from tokenmix.profiling.units import count

CHANNELS, SIDE = 512, 128
SIZE = "an input of 1 x 512 x 128 x 128, as in the table of Guo et al., arXiv 2105.02358"
TRUST = "All figures are counted from our layers; the paper's own could not be looked up."


@dataclass(frozen=True)
class Requirement:
    """Parameters and multiply-adds of one mechanism."""

    name: str
    layer: str
    parameters: int
    macs: int


def eanet_requirements() -> list[Requirement]:
    """The rows."""
    shape: dict[str, Any] = {"device": "meta"}
    return [
        _row("self-attention, one head", SelfAttention(CHANNELS, num_heads=1, qkv_bias=False, **shape)),
        *(
            _row(f"SAGAN, {v}", SAGANAttention2d(CHANNELS, variant=v, **shape))
            for v in ("official", "paper", "compact")
        ),
        _row("external attention, untied", ExternalAttention2d(CHANNELS, tie="none", **shape)),
        _row("external attention, hard tie", ExternalAttention2d(CHANNELS, tie="hard", **shape)),
    ]


def _row(name: str, layer: Mixer) -> Requirement:
    # The other projections have no biases; ours of self-attention has one after the output.
    without = layer.proj.bias.numel() if isinstance(layer, SelfAttention) else 0
    return Requirement(name, type(layer).__name__, count_parameters(layer) - without, layer.macs(SIDE * SIDE))


def print_requirements(*, as_json: bool) -> None:
    """`tokenmix cost --table eanet`."""
    rows = eanet_requirements()
    if as_json:
        print(to_json({"schema": 2, "size": SIZE, "trust": TRUST, "rows": [asdict(r) for r in rows]}))
        return
    table = Table(title=f"For {SIZE}", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("mechanism", "params", "MACs"):
        table.add_column(heading, justify="left" if heading == "mechanism" else "right")
    for row in rows:
        table.add_row(row.name, f"{row.parameters:,}", count(row.macs))
    console = Console()
    console.print(table)
    console.print(TRUST, highlight=False, markup=False)
