"""`tokenmix.cost`: a cost table for Python and notebooks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from tokenmix.errors import needs
from tokenmix.files import to_html, to_text
from tokenmix.profiling.cost import CostTable, Precision, cost_table
from tokenmix.profiling.cost_report import cost_rows, footnotes, sentences
from tokenmix.trust import from_caller

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class CostReport(CostTable):
    """Cost of mixers or models: a `CostTable` with a table, sentences and a figure."""

    def to_pandas(self) -> "pd.DataFrame":
        """A data frame with a row per name and size, in seconds and bytes; requires pandas."""
        with needs("to_pandas"):
            import pandas as pd

        size = "tokens" if self.axis == "tokens" else "img_size"
        return pd.DataFrame(
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

    def _lines(self) -> list[str]:
        return [*([f"warning: {self.warning}"] if self.warning else []), *sentences(self), *footnotes(self)]

    def __str__(self) -> str:
        return "\n".join([to_text(cost_rows(self)), "", *self._lines()])

    def _repr_html_(self) -> str:
        return to_html(cost_rows(self), " ".join(f"{line}." for line in self._lines()))


@from_caller
def cost(
    names: str | nn.Module | Sequence[str | nn.Module] | Mapping[str, str | nn.Module],
    sizes: int | Sequence[int] | None = None,
    dim: int | None = None,
    *,
    device: str = "cpu",
    precision: Precision = "fp32",
    repeats: int = 7,
    **kwargs: Any,
) -> CostReport:
    """Measure mixers at several numbers of tokens against self-attention, or models at several image sizes.

    Args:
        names: mixers of `list_mixers()`; or image models, as names (ours, timm's, torchvision's) or modules. A mapping
            gives each model a name for the table; a module in a list is named by its class.
        sizes: numbers of tokens N (default 196, 1,024 and 4,096); or sides of the image (default: the model's own).
        dim: width D of the tokens (default 256).
        device: cpu or cuda.
        precision: of weights and input.
        repeats: rounds of timing, fewer for slow calls.
        **kwargs: arguments passed to layers that accept them, such as `num_heads`.

    Returns:
        Parameters, multiply-adds, time and memory: `print` it, `.to_pandas()`, `.plot()`, `.row(name, size)`.

    Raises:
        UserError: as in `tokenmix.profiling.cost_table`.
    """
    if not isinstance(names, Mapping):
        subjects: dict[str, str | nn.Module] = {}
        for one in [names] if isinstance(names, str | nn.Module | type) else names:
            if isinstance(one, str):
                subjects[one] = one
                continue
            name = base = str(getattr(one, "__name__", type(one).__name__))
            number = 1
            while name in subjects:
                number += 1
                name = f"{base} {number}"
            subjects[name] = one
        names = subjects
    several = [sizes] if isinstance(sizes, int) else sizes
    table = cost_table(names, several, dim, device=device, precision=precision, repeats=repeats, **kwargs)
    return CostReport(**vars(table))
