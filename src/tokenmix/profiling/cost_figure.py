"""Figure of time and memory over size, on logarithmic axes."""

from itertools import chain, pairwise
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from tokenmix.profiling.units import milliseconds, size

if TYPE_CHECKING:
    from tokenmix.profiling.table import CostRow, CostTable

# Okabe and Ito's colour-blind safe palette; markers and names also distinguish the lines.
COLOURS = ("#222222", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f5539")
MARKERS = "osD^vPX*"


def draw_cost(table: "CostTable") -> Figure:
    """Forward time above peak memory of a forward pass, narrow for phones; the reference dashed, crossings marked."""
    figure = Figure(figsize=(5, 7.2), layout="constrained")
    upper, lower = figure.subplots(2)
    for i, name in enumerate(table.names):
        rows = [row for row in table.rows if row.name == name and row.forward is not None]
        # With its exponent in the legend.
        power, size_of = table.exponents[name], "N" if table.axis == "tokens" else "pixels"
        label = name if power is None else f"{name}  ~ {size_of}$^{{{power:.2f}}}$"
        _line(upper, i, rows, [row.forward.median * 1e3 for row in rows if row.forward], label)
        _line(lower, i, rows, [max(1, row.forward_memory or 0) for row in rows], name)
    noisy = [(row.size, row.forward.median * 1e3) for row in table.rows if row.forward and "forward" in row.unsteady]
    if noisy:
        upper.plot(*zip(*noisy), "o", markersize=3.5, color="white", zorder=5)
        upper.annotate("hollow: noisy, see ~", (1, 0), xycoords="axes fraction", ha="right", va="bottom", fontsize=9)
    # A ring at each crossing with the reference, labelled with the size.
    reference = [(r.size, r.forward.median * 1e3) for r in table.rows if r.name == table.reference and r.forward]
    for i, name in enumerate(table.names):
        for crossing in filter(None, chain.from_iterable(table.faster.get(name) or ())):
            place = crossing, float(np.exp(np.interp(np.log(crossing), *np.log(reference).T)))
            style = {"color": COLOURS[i % len(COLOURS)]}
            upper.plot(*place, "o", markersize=13, markerfacecolor="none", **style)
            upper.annotate(f"{crossing:,}", place, (9, -11), textcoords="offset points", fontsize=9, **style)
    _finish(upper, table, "forward pass, ms")
    _finish(lower, table, "peak memory of a forward pass")
    upper.yaxis.set_major_formatter(FuncFormatter(lambda value, _: milliseconds(value / 1e3)))
    lower.set_yscale("log", base=2)
    lower.yaxis.set_major_formatter(FuncFormatter(lambda value, _: size(value)))
    if any(row.forward for row in table.rows):
        _refine(upper, 10, (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0))
        _refine(lower, 2, (1.0, 1.25, 1.5, 1.75))
        upper.legend(frameon=False)
    return figure


def _refine(axes: Axes, base: int, steps: tuple[float, ...]) -> None:
    """Add ticks between powers of the base if the axis spans fewer than two powers."""
    low, high = axes.get_ylim()
    if high / low < base**2:
        axes.yaxis.set_major_locator(LogLocator(base=base, subs=steps))


def _line(axes: Axes, index: int, rows: "list[CostRow]", values: list[float] | list[int], label: str) -> None:
    if not rows:
        return
    colour = COLOURS[index % len(COLOURS)]
    axes.loglog(
        [row.size for row in rows],
        values,
        color=colour,
        marker=MARKERS[index % len(MARKERS)],
        markersize=6,
        linewidth=1.8,
        linestyle="--" if index == 0 else "-",
        label=label,
    )


def _finish(axes: Axes, table: "CostTable", label: str) -> None:
    sizes = sorted({row.size for row in table.rows})
    apart = (sizes[-1] / sizes[0]) ** 0.1  # a nearer size has no label, as it would run into the next
    sizes = [a for a, b in pairwise(sizes) if b >= apart * a] + sizes[-1:]
    axes.set_xlabel("tokens N" if table.axis == "tokens" else "side of the image, px")
    axes.set_title(label, fontsize=11, loc="left")
    axes.xaxis.set_major_locator(FixedLocator([float(n) for n in sizes]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(True, which="major", color="#dddddd", linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
