"""Charts and matrices as inline SVG: their colours come from the page's style sheet, so they follow light and dark."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 440, 280
LEFT, RIGHT, TOP, BOTTOM = 66, 14, 12, 42

CELL = 24
WRITTEN_UP_TO = 12
"""Counts are written into the cells of matrices up to this many classes."""


@dataclass(frozen=True)
class Series:
    """One line: `index` picks colour and marker."""

    name: str
    index: int
    xs: Sequence[float]
    ys: Sequence[float]


@dataclass(frozen=True)
class Point:
    """One labelled point; `error` is half the length of its vertical bar."""

    name: str
    index: int
    x: float
    y: float
    error: float | None = None


@dataclass(frozen=True)
class Axis:
    """Linear or logarithmic mapping of values to pixels, with its label, its ticks and how their values are written."""

    label: str
    text: Callable[[float], str]
    low: float
    high: float
    start: float
    end: float
    marks: list[float]
    log: bool

    def __call__(self, value: float) -> float:
        low, high, value = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return self.start + (value - low) / (high - low) * (self.end - self.start)


def ticks(low: float, high: float, wanted: int = 6) -> list[float]:
    """Round numbers within [low, high], about as many as wanted."""
    if not high > low:
        return [low]
    raw = (high - low) / wanted
    power = 10 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= raw)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _axis(label: str, text: Callable[[float], str], values: Sequence[float], *, across: bool, log: bool) -> Axis:
    """Over the width, linear from 0; or over the height."""
    low, high = min(values), max(values)
    if log:
        low, high = low / 1.25, high * 1.25
    else:
        pad = (high - low) * 0.06 or abs(high) * 0.05 or 1.0
        low, high = (0.0 if across else low - pad), high + pad
    start, end = (LEFT, WIDTH - RIGHT) if across else (HEIGHT - BOTTOM, TOP)
    return Axis(label, text, low, high, start, end, _log_ticks(low, high) if log else ticks(low, high), log)


def _log_ticks(low: float, high: float) -> list[float]:
    for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8)):
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        marks = [m * 10.0**p for p in powers for m in steps if low <= m * 10.0**p <= high]
        if len(marks) >= 3:
            return marks
    return ticks(low, high, 3)


def line_chart(
    series: Sequence[Series],
    x_label: str,
    y_label: str,
    x_text: Callable[[float], str],
    y_text: Callable[[float], str],
    *,
    log: bool = False,
) -> str:
    """Lines with markers at their points; with `log` both axes are logarithmic."""
    drawn = [s for s in series if len(s.xs)]
    if not drawn:
        return '<p class="empty">No curve to draw: no run finished, or nothing was held out for validation.</p>'
    x = _axis(x_label, x_text, [v for s in drawn for v in s.xs], across=True, log=log)
    y = _axis(y_label, y_text, [v for s in drawn for v in s.ys], across=False, log=log)
    return _chart(x, y, [_line(s, x, y) for s in drawn])


def _line(series: Series, x: Axis, y: Axis) -> str:
    places = [(x(a), y(b)) for a, b in zip(series.xs, series.ys)]
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
    few = len(places) <= 40
    shown = list(zip(places, series.ys)) if few else [(places[-1], series.ys[-1])]
    dots = "".join(marker(series.index, *place, f"{series.name}: {y.text(value)}") for place, value in shown)
    return f'<g class="{_class(series.index)}"><polyline points="{path}"/>{dots}</g>'


def scatter_chart(
    points: Sequence[Point],
    x_label: str,
    y_label: str,
    x_text: Callable[[float], str],
    y_text: Callable[[float], str],
    levels: Mapping[str, float] | None = None,
) -> str:
    """Points with their names next to them, on a logarithmic x axis; `levels` are horizontal lines by their name.

    A level far from the points is left out: it would press them together.
    """
    if not points:
        return '<p class="empty">No run finished: there is no point to draw.</p>'
    heights = [p.y + side * (p.error or 0) for p in points for side in (-1, 1)]
    low, high = min(heights), max(heights)
    reach = max(high - low, 0.1 * abs(high))
    near = {name: value for name, value in (levels or {}).items() if low - reach <= value <= high + reach}
    x = _axis(x_label, x_text, [p.x for p in points], across=True, log=True)
    y = _axis(y_label, y_text, [*heights, *near.values()], across=False, log=False)
    labels = place_labels([(x(p.x), y(p.y)) for p in points], [p.name for p in points])
    lines, above = [], -12.0
    for name, value in sorted(near.items(), key=lambda level: y(level[1])):
        # Below its line where the name of the line above is in the way.
        place = y(value) + (11 if y(value) - above < 12 else -4)
        above = y(value)
        lines.append(
            f'<path class="level" d="M{LEFT},{y(value):.1f}H{WIDTH - RIGHT}"/>'
            + _text(WIDTH - RIGHT, place, f"{name} {y_text(value)}", "end")
        )
    return _chart(x, y, lines + [_dot(point, x, y, label) for point, label in zip(points, labels)])


def _dot(point: Point, x: Axis, y: Axis, label: tuple[float, float]) -> str:
    a, error = x(point.x), point.error or 0.0
    bar = f'<path class="bar" d="M{a:.1f},{y(point.y - error):.1f}V{y(point.y + error):.1f}"/>' if error else ""
    dot = marker(point.index, a, y(point.y), f"{point.name}: {x.text(point.x)}, {y.text(point.y)}")
    return f'<g class="{_class(point.index)}">{bar}{dot}{_text(*label, point.name, "start", "label")}</g>'


def place_labels(places: Sequence[tuple[float, float]], names: Sequence[str]) -> list[tuple[float, float]]:
    """Left end of each label's base line: next to its marker, where it covers other markers and labels least."""
    taken = [(a - 6, b - 6, a + 6, b + 6) for a, b in places]
    found = []
    for (a, b), name in zip(places, names):
        width = 7.0 * len(name)
        spots = [(a + s * 9 - (width if s < 0 else 0), b + 4 + dy) for dy in (0, -11, 11, -22, 22) for s in (1, -1)]
        spots += [(a - width / 2, b - 10), (a - width / 2, b + 18)]
        boxes = [(left, base - 9, left + width, base + 3) for left, base in spots]
        best = min(range(len(spots)), key=lambda i: _hidden(boxes[i], taken))
        taken.append(boxes[best])
        found.append(spots[best])
    return found


def _hidden(box: tuple[float, ...], taken: Sequence[tuple[float, ...]]) -> float:
    """Area that a box shares with those taken; leaving the frame counts as covering much."""
    left, top, right, bottom = box
    outside = max(0.0, LEFT - left) + max(0.0, right - WIDTH) + max(0.0, -top) + max(0.0, bottom - (HEIGHT - BOTTOM))
    shared = (max(0.0, min(right, r) - max(left, l)) * max(0.0, min(bottom, b) - max(top, t)) for l, t, r, b in taken)
    return sum(shared) + 1000 * outside


def marker(index: int, x: float, y: float, told: str = "") -> str:
    """The mark of a series, of a shape of its own, so that colour is not needed to tell them apart."""
    shapes = (
        '<circle r="4"/>',
        '<rect x="-3.6" y="-3.6" width="7.2" height="7.2"/>',
        '<path d="M0,-4.8 4.4,3.4 -4.4,3.4z"/>',
        '<path d="M0,-5 5,0 0,5 -5,0z"/>',
        '<path d="M0,4.8 4.4,-3.4 -4.4,-3.4z"/>',
        '<path d="M-4,-1.4h2.6v-2.6h2.8v2.6h2.6v2.8h-2.6v2.6h-2.8v-2.6h-2.6z"/>',
        '<circle r="4" class="hollow"/>',
        '<rect x="-3.4" y="-3.4" width="6.8" height="6.8" class="hollow"/>',
    )
    hint = f"<title>{escape(told)}</title>" if told else ""
    return f'<g class="m" transform="translate({x:.1f},{y:.1f})">{shapes[(index + index // 8) % len(shapes)]}{hint}</g>'


def _chart(x: Axis, y: Axis, drawn: Sequence[str]) -> str:
    floor, middle = HEIGHT - BOTTOM, (TOP + HEIGHT - BOTTOM) / 2
    parts = [f'<path class="axis" d="M{LEFT},{TOP}V{floor}H{WIDTH - RIGHT}"/>']
    for mark in y.marks:
        place = y(mark)
        parts.append(f'<path class="grid-line" d="M{LEFT},{place:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(_text(LEFT - 6, place + 4, y.text(mark), "end"))
    for mark in x.marks:
        parts.append(_text(x(mark), floor + 16, x.text(mark), "middle"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, x.label, "middle", "name"))
    parts.append(f'<g transform="translate(11,{middle}) rotate(-90)">{_text(0, 0, y.label, "middle", "name")}</g>')
    box, title = f"0 0 {WIDTH} {HEIGHT}", escape(f"{y.label} against {x.label}")
    return f'<svg class="chart" viewBox="{box}" role="img" aria-label="{title}">{"".join([*parts, *drawn])}</svg>'


def _class(index: int) -> str:
    """Colours repeat after eight; `t` names the series itself."""
    return f"s s{index % 8} t{index}"


def _text(x: float, y: float, text: str, anchor: str, kind: str = "tick") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


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
        parts += [_count_cell(i, j, number, sum(row), names, margin) for j, number in enumerate(row) if number]
    box = f"0 0 {margin + side + 2:.0f} {margin + side + 2:.0f}"
    return f'<svg class="heat" viewBox="{box}" role="img" aria-label="confusion matrix">{"".join(parts)}</svg>'


def _count_cell(i: int, j: int, number: int, total: int, names: Sequence[str], margin: float) -> str:
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
