"""A confusion matrix as inline SVG."""

from collections.abc import Sequence
from html import escape

CELL = 24
WRITTEN_UP_TO = 12
"""Counts are written into the cells of matrices up to this many classes."""


def heatmap(counts: Sequence[Sequence[int]], names: Sequence[str]) -> str:
    """Rows are true classes, columns predictions; a cell's strength is the square root of its share of the row."""
    short = [name if len(name) <= 13 else f"{name[:12]}…" for name in names]
    margin = 8 + 6.2 * max(map(len, short))
    side = len(names) * CELL
    parts = [f'<rect class="box" x="{margin:.0f}" y="{margin:.0f}" width="{side}" height="{side}"/>']
    for i, name in enumerate(short):
        middle = margin + (i + 0.5) * CELL + 4
        parts.append(f'<text x="{margin - 6:.0f}" y="{middle:.0f}" text-anchor="end">{escape(name)}</text>')
        parts.append(f'<text transform="translate({middle:.0f},{margin - 6:.0f}) rotate(-90)">{escape(name)}</text>')
    for i, row in enumerate(counts):
        parts += [_cell(i, j, number, sum(row), names, margin) for j, number in enumerate(row) if number]
    box = f"0 0 {margin + side + 2:.0f} {margin + side + 2:.0f}"
    return f'<svg class="heat" viewBox="{box}" role="img" aria-label="confusion matrix">{"".join(parts)}</svg>'


def _cell(i: int, j: int, number: int, total: int, names: Sequence[str], margin: float) -> str:
    x, y, share = margin + j * CELL, margin + i * CELL, number / total
    kind = "right" if i == j else "wrong"
    # The square root lets a share of a few percent be seen next to the diagonal.
    strength = f'fill-opacity="{share**0.5:.2f}"'
    rect = f'<rect class="{kind}" x="{x:.0f}" y="{y:.0f}" width="{CELL}" height="{CELL}" {strength}/>'
    text = ""
    if len(names) <= WRITTEN_UP_TO:
        on = " on" if share > 0.35 else ""
        text = f'<text class="n{on}" x="{x + CELL / 2:.0f}" y="{y + CELL / 2 + 3:.0f}">{number}</text>'
    told = escape(f"{names[i]} taken for {names[j]}: {number} of {total}")
    return f"<g>{rect}{text}<title>{told}</title></g>"
