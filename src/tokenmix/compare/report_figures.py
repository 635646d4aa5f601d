"""The figures of a report: learning curves, cost, confusion matrices."""

from collections.abc import Callable, Sequence
from html import escape

from tokenmix.compare.charts import Point, Series, line_chart, marker, scatter_chart
from tokenmix.compare.columns import Column, columns
from tokenmix.compare.heatmap import heatmap
from tokenmix.compare.results import Curve, Results, Twin
from tokenmix.cost.units import count, milliseconds

__all__ = ["confusion_section", "cost_section", "learning_section"]


def learning_section(results: Results) -> str:
    def drawn(pick: str, over: str, x_label: str, y_label: str, x_text: Callable[[float], str]) -> str:
        series = [_mean_series(i, twin, pick, over) for i, twin in enumerate(results.twins)]
        return line_chart(series, x_label, y_label, x_text, _short)

    images, seconds = (
        ("images", "training images seen", count),
        ("seconds", "seconds of training", lambda v: f"{v:,.4g}"),
    )
    score, loss = ("score_curve", f"test {results.metric}"), ("loss_curve", "training loss")
    charts = [drawn(pick, over, x, y, text) for pick, y in (score, loss) for over, x, text in (images, seconds)]
    shown = "".join(f'<figure class="card">{chart}</figure>' for chart in charts)
    several = " Each line is the mean over the seeds." if len(results.config["seeds"]) > 1 else ""
    return (
        '<section><h2>Learning</h2><p class="soft">Left against the images seen, which are equal for all; right '
        f"against the seconds that they took. A click on a name hides it.{several}</p>{_legend(results)}"
        f'<div class="grid">{shown}</div></section>'
    )


def _legend(results: Results) -> str:
    items = "".join(
        f'<li><button type="button" aria-pressed="true" data-index="{i}"><svg class="s{i % 8}" viewBox="-7 -7 14 14">'
        f"{marker(i, 0, 0)}</svg>{escape(twin.mixer)}</button></li>"
        for i, twin in enumerate(results.twins)
    )
    return f'<ul class="legend">{items}</ul>'


def _mean_series(index: int, twin: Twin, pick: str, over: str) -> Series:
    """The mean over seeds, point by point, as far as every finished run has points."""
    curves: list[Curve] = [getattr(run, pick) for run in twin.runs if run.status == "finished"]
    xs, ys = ([_mean(v) for v in zip(*(getattr(curve, name) for curve in curves))] for name in (over, "values"))
    return Series(twin.mixer, index, xs, ys)


def _short(value: float) -> str:
    return f"{value:.4g}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def cost_section(results: Results) -> str:
    finished = [(i, t) for i, t in enumerate(results.twins) if t.score is not None]
    score = f"test {results.metric}"
    by_macs = [Point(t.mixer, i, t.macs, t.score or 0, t.deviation) for i, t in finished]
    timed = [(i, t) for i, t in finished if t.step]
    by_time = [Point(t.mixer, i, t.step.median if t.step else 0, t.score or 0, t.deviation) for i, t in timed]
    charts = [
        scatter_chart(by_macs, "MACs of one image", score, count, _short),
        scatter_chart(by_time, "ms of a training step", score, milliseconds, _short),
    ]
    bars = [_bars(results, column) for column in columns(results)[3:]]
    shown = "".join(f'<figure class="card">{part}</figure>' for part in [*charts, *bars])
    return f'<section><h2>Cost</h2><div class="grid">{shown}</div></section>'


def _bars(results: Results, column: Column) -> str:
    values = [(i, twin, column.value(twin)) for i, twin in enumerate(results.twins)]
    largest = max((v for _, _, v in values if v is not None), default=0) or 1
    rows = "".join(
        f'<b>{escape(twin.mixer)}</b><div class="s{i % 8}"><i style="width:{100 * v / largest:.1f}%"></i></div>'
        f"<span>{escape(column.text(v))}</span>"
        for i, twin, v in values
        if v is not None
    )
    told = f"{column.about}; {'more' if column.higher else 'less'} is better"
    return f'<h3>{escape(column.heading)}</h3><div class="bars">{rows}</div><p class="note">{escape(told)}</p>'


def confusion_section(results: Results) -> str:
    figures = []
    for twin in results.twins:
        matrices = [run.confusion for run in twin.runs if run.confusion]
        if matrices:
            total = [[sum(counts) for counts in zip(*rows)] for rows in zip(*matrices)]
            figures.append(
                f'<figure class="card"><h3>{escape(twin.mixer)}</h3>{heatmap(total, results.classes)}</figure>'
            )
    if not figures:
        return ""
    seeds = ", summed over the seeds" if len(results.config["seeds"]) > 1 else ""
    return (
        '<section><h2>Confusion</h2><p class="soft">Rows are the true classes, columns the answers on the test images '
        f'after the last epoch{seeds}, as the scores are.</p><div class="grid three">{"".join(figures)}</div></section>'
    )
