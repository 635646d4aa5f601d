"""Figures of a report as inline SVG, coloured by the style sheet, so that they follow light and dark mode."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from statistics import fmean, median

import numpy as np

from tokenmix.lab.compare.results import Column, Curve, Results, Variant
from tokenmix.profiling.units import count, milliseconds

WIDTH, HEIGHT = 440, 280
LEFT, RIGHT, TOP, BOTTOM = 66, 14, 12, 42
FLOOR, END = HEIGHT - BOTTOM, WIDTH - RIGHT


@dataclass(frozen=True)
class Series:
    """Points of a variant; `index` sets colour and marker, `error` is half the length of a vertical bar."""

    name: str
    index: int
    xs: Sequence[float]
    ys: Sequence[float]
    error: float | None = None


@dataclass(frozen=True)
class Axis:
    """A linear or logarithmic axis: label, format of values, and range and marks once values are known."""

    label: str
    text: Callable[[float], str]
    log: bool = False
    low: float = 0.0
    high: float = 1.0
    start: float = LEFT
    end: float = END
    marks: list[float] = field(default_factory=list)

    def over(self, values: Sequence[float], *, across: bool) -> "Axis":
        """The axis for these values: over the width (linear from 0) or over the height."""
        low, high = min(values), max(values)
        if self.log:
            low, high = low / 1.25, high * 1.25
        else:
            pad = (high - low) * 0.06 or abs(high) * 0.05 or 1.0
            low, high = (0.0 if across else low - pad if low < 0 else max(0.0, low - pad)), high + pad
        start, end = (LEFT, END) if across else (FLOOR, TOP)
        return replace(self, low=low, high=high, start=start, end=end, marks=ticks(low, high, log=self.log))

    def __call__(self, value: float) -> float:
        low, high, value = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return self.start + (value - low) / (high - low) * (self.end - self.start)


def ticks(low: float, high: float, wanted: int = 6, *, log: bool = False) -> list[float]:
    """About `wanted` round numbers within [low, high]; at least three on a logarithmic axis."""
    if not high > low:
        return [low]
    if log:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8)):
            marks = [m * 10.0**p for p in powers for m in steps if low <= m * 10.0**p <= high]
            if len(marks) >= 3:
                return marks
        wanted = 3
    raw = (high - low) / wanted
    power = 10 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= raw)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def line_chart(series: Sequence[Series], x: Axis, y: Axis) -> str:
    drawn = [one for one in series if len(one.xs)]
    if not drawn:
        return '<p class="empty">No curve to draw: no run finished.</p>'
    x = x.over([v for one in drawn for v in one.xs], across=True)
    y = y.over([v for one in drawn for v in one.ys], across=False)
    lines = []
    for one in drawn:
        places = [(x(a), y(b)) for a, b in zip(one.xs, one.ys)]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
        shown = list(zip(places, one.ys))[0 if len(places) <= 40 else -1 :]
        dots = "".join(marker(one.index, *place, f"{one.name}: {y.text(value)}") for place, value in shown)
        lines.append(_group(one.index, f'<polyline points="{path}"/>{dots}'))
    return _chart(x, y, lines)


def scatter_chart(points: Sequence[Series], x: Axis, y: Axis, levels: Mapping[str, float], least: float = 0.0) -> str:
    """Single points with their names; `levels` are named horizontal lines, or arrows if they lie far from the points.

    The height spans at least `least`, so that differences by chance look small.
    """
    if not points:
        return '<p class="empty">No run finished: there is no point to draw.</p>'
    heights = [p.ys[0] + side * (p.error or 0) for p in points for side in (-1, 1)]
    low, high = min(heights), max(heights)
    if high - low < least:
        # Limit a share to 0 to 1.
        bottom, top = 0.0 if low >= 0 else -math.inf, 1.0 if high <= 1 else math.inf
        low, high = max(bottom, (low + high - least) / 2), min(top, (low + high + least) / 2)
        heights += [low, high]
    reach = max(high - low, 0.1 * abs(high))
    near = {name: value for name, value in levels.items() if low - reach <= value <= high + reach}
    x = x.over([p.xs[0] for p in points], across=True)
    y = y.over([*heights, *near.values()], across=False)
    drawn, above = [], -12.0
    for name, value in sorted(near.items(), key=lambda level: y(level[1])):
        # Below its line if the name of the line above is too near.
        place = y(value) + (11 if y(value) - above < 12 else -4)
        above = y(value)
        drawn.append(f'<path class="level" d="M{LEFT},{y(value):.1f}H{END}"/>')
        drawn.append(_text(END, place, f"{name} {y.text(value)}", "end"))
    for arrow, edge, is_above in (("↑", TOP - 2, True), ("↓", FLOOR - 6, False)):
        far = [(name, value) for name, value in levels.items() if name not in near and (value > high) is is_above]
        named = ", ".join(f"{name} {y.text(value)}" for name, value in far)
        drawn += [_text(END, edge, f"{named} {arrow}", "end")] if far else []
    places = [(x(p.xs[0]), y(p.ys[0])) for p in points]
    for p, (a, b), label in zip(points, places, place_labels(places, [p.name for p in points])):
        ends = [y(p.ys[0] + side * (p.error or 0)) for side in (-1, 1)]
        bar = f'<path class="bar" d="M{a:.1f},{ends[0]:.1f}V{ends[1]:.1f}"/>' if p.error else ""
        dot = marker(p.index, a, b, f"{p.name}: {x.text(p.xs[0])}, {y.text(p.ys[0])}")
        drawn.append(_group(p.index, f"{bar}{dot}{_text(*label, p.name, 'start', 'label')}"))
    return _chart(x, y, drawn)


def place_labels(places: Sequence[tuple[float, float]], names: Sequence[str]) -> list[tuple[float, float]]:
    """Left end of each label's baseline, next to its marker, with the least overlap with markers and labels."""
    taken = [(a - 6, b - 6, a + 6, b + 6) for a, b in places]
    found = []

    def hidden(spot: tuple[float, float]) -> float:
        """Overlap area of a label at this spot; leaving the frame counts as a large overlap."""
        left, top, right, bottom = spot[0], spot[1] - 9, spot[0] + width, spot[1] + 3
        outside = max(0.0, LEFT - left) + max(0.0, right - WIDTH) + max(0.0, -top) + max(0.0, bottom - FLOOR)
        shared = (
            max(0.0, min(right, r) - max(left, l)) * max(0.0, min(bottom, b) - max(top, t)) for l, t, r, b in taken
        )
        return sum(shared) + 1000 * outside

    for (a, b), name in zip(places, names):
        width = 7.0 * len(name)
        spots = [(a + s * 9 - (width if s < 0 else 0), b + 4 + dy) for dy in (0, -11, 11, -22, 22) for s in (1, -1)]
        left, base = min([*spots, (a - width / 2, b - 10), (a - width / 2, b + 18)], key=hidden)
        taken.append((left, base - 9, left + width, base + 3))
        found.append((left, base))
    return found


def marker(index: int, x: float, y: float, told: str = "") -> str:
    """Marker of a series; shapes differ, so that colour is not needed to distinguish series."""
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
    parts = [f'<path class="axis" d="M{LEFT},{TOP}V{FLOOR}H{END}"/>']
    for mark in y.marks:
        parts.append(f'<path class="grid-line" d="M{LEFT},{y(mark):.1f}H{END}"/>')
        parts.append(_text(LEFT - 6, y(mark) + 4, y.text(mark), "end"))
    parts += [_text(x(mark), FLOOR + 16, x.text(mark), "middle") for mark in x.marks]
    parts.append(_text((LEFT + END) / 2, HEIGHT - 6, x.label, "middle", "name"))
    side = _text(0, 0, y.label, "middle", "name")
    parts.append(f'<g transform="translate(11,{(TOP + FLOOR) / 2}) rotate(-90)">{side}</g>')
    box, title = f"0 0 {WIDTH} {HEIGHT}", escape(f"{y.label} against {x.label}")
    return f'<svg class="chart" viewBox="{box}" role="img" aria-label="{title}">{"".join([*parts, *drawn])}</svg>'


def _group(index: int, drawn: str) -> str:
    """Colours repeat after eight series; the class `t` identifies the series."""
    return f'<g class="s s{index % 8} t{index}">{drawn}</g>'


def _text(x: float, y: float, text: str, anchor: str, kind: str = "tick") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _short(value: float) -> str:
    return f"{value:.4g}"


def learning_curves(results: Results) -> list[str]:
    """Mean score and loss of the finished runs over samples, and over the median of their seconds."""
    over = {"samples": Axis(f"training {results.unit} seen", count), "seconds": Axis("seconds of training", _short)}
    charts = []
    for pick, label in (("score_curve", f"validation {results.measure}"), ("loss_curve", "training loss")):
        for name, x in over.items():
            series = []
            for i, variant in enumerate(results.variants):
                curves: list[Curve] = [getattr(run, pick) for run in variant.runs if run.status == "finished"]
                # Up to the last point that all runs have.
                xs = [median(v) for v in zip(*(getattr(c, name) for c in curves))]
                ys = [fmean(v) for v in zip(*(c.values for c in curves))]
                series.append(Series(variant.name, i, xs, ys))
            # A note says why there is no score.
            if pick == "loss_curve" or any(len(one.xs) for one in series):
                charts.append(line_chart(series, x, Axis(label, _short)))
    return charts


def growth_charts(results: Results) -> list[str]:
    """Time and memory of a layer's forward pass over the number of tokens; none without measured layers."""
    grown = [(v.name, i, v.growth) for i, v in enumerate(results.variants) if v.growth.tokens]
    if not grown:
        return []
    tokens = Axis("tokens N", count, log=True)
    times = [Series(name, i, growth.tokens, growth.seconds) for name, i, growth in grown]
    held = [(name, i, growth.tokens, [n / 2**20 for n in growth.memory]) for name, i, growth in grown]
    memory = [Series(*one) for one in held if all(one[-1])]
    return [
        line_chart(times, tokens, Axis("ms, forward pass of one layer", milliseconds, log=True)),
        line_chart(memory, tokens, Axis("MiB, peak memory of this pass", _short, log=True)),
    ]


def cost_charts(results: Results) -> list[str]:
    """The score over multiply-adds and over the step time."""
    charts, best = [], results.ranked()[:2]
    found = results.difference(*best) if len(best) == 2 else None
    # Differences by chance fill at most half of the height.
    least = 2 * found.critical if found is not None and found.known and not found.same else 0.0
    cost: Callable[[Variant], float | None]
    for label, text, cost in (
        ("MACs of one sample", count, lambda v: v.macs),
        ("ms of a training step", milliseconds, lambda v: v.step.median if v.step else None),
    ):
        points = [
            Series(v.name, i, [value], [v.score], v.deviation)
            for i, v in enumerate(results.variants)
            if v.score is not None and (value := cost(v))
        ]
        y = Axis(f"test {results.measure}", _short)
        charts.append(scatter_chart(points, Axis(label, text, log=True), y, results.baselines, least))
    return charts


def bars(results: Results, column: Column) -> list[tuple[str, int, float, str]]:
    """Bars of a column: variant, index, length in percent of the longest, and text, with half the IQR of a time."""
    values = [(i, variant, v) for i, variant in enumerate(results.variants) if (v := column.value(variant)) is not None]
    largest, found = max((v for _, _, v in values), default=0) or 1, []
    for i, variant, value in values:
        timing = column.timing(variant)
        around = "" if timing is None else f" ± {50 * timing.spread:.0f} %"
        found.append((variant.name, i, 100 * value / largest, f"{column.text(value)}{around}"))
    return found


def confusions(results: Results) -> dict[str, list[list[int]]]:
    """Confusion matrix of each variant that has one, summed over the seeds."""
    found = {v.name: [run.confusion for run in v.runs if run.confusion] for v in results.variants}
    return {name: np.sum(matrices, axis=0).tolist() for name, matrices in found.items() if matrices}
