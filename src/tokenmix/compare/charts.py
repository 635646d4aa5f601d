"""Charts as inline SVG: their colours come from the page's style sheet, so they follow light and dark."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 440, 280
LEFT, RIGHT, TOP, BOTTOM = 66, 14, 12, 42


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
    """Linear or logarithmic mapping of values to pixels, with its ticks."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False
    marks: list[float] = field(default_factory=list)

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


def _axis(values: Sequence[float], start: float, end: float, *, log: bool = False, from_zero: bool = False) -> Axis:
    low, high = min(values), max(values)
    if log:
        low, high = low / 1.25, high * 1.25
        return Axis(low, high, start, end, True, _log_ticks(low, high))
    pad = (high - low) * 0.06 or abs(high) * 0.05 or 1.0
    low, high = (0.0 if from_zero else low - pad), high + pad
    return Axis(low, high, start, end, marks=ticks(low, high))


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
    x = _axis([v for s in drawn for v in s.xs], LEFT, WIDTH - RIGHT, log=log, from_zero=True)
    y = _axis([v for s in drawn for v in s.ys], HEIGHT - BOTTOM, TOP, log=log)
    body = "".join(_line(s, x, y, y_text) for s in drawn)
    return _svg(_frame(x, y, x_label, y_label, x_text, y_text) + body, f"{y_label} against {x_label}")


def _line(series: Series, x: Axis, y: Axis, y_text: Callable[[float], str]) -> str:
    places = [(x(a), y(b)) for a, b in zip(series.xs, series.ys)]
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
    few = len(places) <= 40
    shown = list(zip(places, series.ys)) if few else [(places[-1], series.ys[-1])]
    dots = "".join(marker(series.index, *place, f"{series.name}: {y_text(value)}") for place, value in shown)
    return f'<g class="{_class(series.index)}"><polyline points="{path}"/>{dots}</g>'


def scatter_chart(
    points: Sequence[Point],
    x_label: str,
    y_label: str,
    x_text: Callable[[float], str],
    y_text: Callable[[float], str],
    levels: Mapping[str, float] | None = None,
) -> str:
    """Points with their names next to them, on a logarithmic x axis; `levels` are horizontal lines by their name."""
    if not points:
        return '<p class="empty">No run finished: there is no point to draw.</p>'
    x = _axis([p.x for p in points], LEFT, WIDTH - RIGHT, log=True)
    levels = levels or {}
    heights = [p.y + side * (p.error or 0) for p in points for side in (-1, 1)]
    y = _axis([*heights, *levels.values()], HEIGHT - BOTTOM, TOP)
    places = [(x(p.x), y(p.y)) for p in points]
    labels = place_labels(places, [p.name for p in points])
    body = "".join(
        _dot(point, place, label, y, f"{x_text(point.x)}, {y_text(point.y)}")
        for point, place, label in zip(points, places, labels)
    )
    lines = "".join(
        f'<path class="level" d="M{LEFT},{y(value):.1f}H{WIDTH - RIGHT}"/>'
        + _text(WIDTH - RIGHT, y(value) - 4, f"{name} {y_text(value)}", "end")
        for name, value in levels.items()
    )
    return _svg(_frame(x, y, x_label, y_label, x_text, y_text) + lines + body, f"{y_label} against {x_label}")


def _dot(point: Point, place: tuple[float, float], label: tuple[float, float], y: Axis, told: str) -> str:
    (a, b), error = place, point.error or 0.0
    bar = f'<path class="bar" d="M{a:.1f},{y(point.y - error):.1f}V{y(point.y + error):.1f}"/>' if error else ""
    name = _text(label[0], label[1], point.name, "start", "label")
    return f'<g class="{_class(point.index)}">{bar}{marker(point.index, a, b, f"{point.name}: {told}")}{name}</g>'


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


def _frame(
    x: Axis, y: Axis, x_label: str, y_label: str, x_text: Callable[[float], str], y_text: Callable[[float], str]
) -> str:
    floor, middle = HEIGHT - BOTTOM, (TOP + HEIGHT - BOTTOM) / 2
    parts = [f'<path class="axis" d="M{LEFT},{TOP}V{floor}H{WIDTH - RIGHT}"/>']
    for mark in y.marks:
        place = y(mark)
        parts.append(f'<path class="grid-line" d="M{LEFT},{place:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(_text(LEFT - 6, place + 4, y_text(mark), "end"))
    for mark in x.marks:
        parts.append(_text(x(mark), floor + 16, x_text(mark), "middle"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, x_label, "middle", "name"))
    parts.append(f'<g transform="translate(11,{middle}) rotate(-90)">{_text(0, 0, y_label, "middle", "name")}</g>')
    return "".join(parts)


def _class(index: int) -> str:
    """Colours repeat after eight; `t` names the series itself."""
    return f"s s{index % 8} t{index}"


def _text(x: float, y: float, text: str, anchor: str, kind: str = "tick") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(body: str, title: str) -> str:
    return f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{body}</svg>'
