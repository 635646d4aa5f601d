"""Human-readable numbers and tables."""

import math
from collections.abc import Sequence


def count(number: float) -> str:
    """1234567 as `1.23 M`."""
    return _scaled(number, 1000, ("", " k", " M", " G", " T", " P"))


def size(number: float) -> str:
    """Bytes as `1.23 MiB`."""
    return _scaled(number, 1024, (" B", " KiB", " MiB", " GiB", " TiB"))


def _scaled(number: float, base: int, units: tuple[str, ...]) -> str:
    step = 0
    while abs(number) >= base and step + 1 < len(units):
        number, step = number / base, step + 1
    text = f"{number:.0f}" if step == 0 or abs(number) >= 100 else f"{number:.3g}"
    return text + units[step]


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:,.0f}"


def ratio(value: float, reference: float) -> str:
    """`1.8×`, with two significant digits."""
    if not reference or not math.isfinite(value / reference):
        return "–"
    return f"{value / reference:.2g}×"


def spread(mean: float, deviation: float | None) -> str:
    """`0.8123 ± 0.0040`; the mean alone without a deviation."""
    return f"{mean:.4f}" if deviation is None else f"{mean:.4f} ± {deviation:.4f}"


def to_markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with right-aligned numbers after the first column."""
    shown = [[cell.replace("|", "\\|").replace("\n", " ") for cell in cells] for cells in (headings, *rows)]
    lines = [f"| {' | '.join(cells)} |" for cells in shown]
    return "\n".join([lines[0], f"|---|{'---:|' * (len(headings) - 1)}", *lines[1:]])
