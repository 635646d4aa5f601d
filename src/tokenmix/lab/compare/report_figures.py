"""The figures of a report: learning curves, cost, confusion matrices."""

from statistics import fmean

from tokenmix.lab.compare.charts import Point, Series, heatmap, line_chart, scatter_chart
from tokenmix.lab.compare.columns import Column
from tokenmix.lab.compare.results import Curve, Results, Variant
from tokenmix.profiling.units import count, milliseconds


def learning_curves(results: Results) -> list[str]:
    """Score and loss, each over the samples seen and over the seconds, as SVG."""
    samples, seconds = (f"training {results.unit} seen", count), ("seconds of training", lambda v: f"{v:,.4g}")
    charts = []
    for pick, y_label in (("score_curve", f"validation {results.metric}"), ("loss_curve", "training loss")):
        for over, (x_label, x_text) in (("samples", samples), ("seconds", seconds)):
            series = [_mean_series(i, variant, pick, over) for i, variant in enumerate(results.variants)]
            charts.append(line_chart(series, x_label, y_label, x_text, _short))
    return charts


def _mean_series(index: int, variant: Variant, pick: str, over: str) -> Series:
    """The mean over seeds, point by point, as far as every finished run has points."""
    curves: list[Curve] = [getattr(run, pick) for run in variant.runs if run.status == "finished"]
    xs, ys = ([fmean(v) for v in zip(*(getattr(curve, name) for curve in curves))] for name in (over, "values"))
    return Series(variant.name, index, xs, ys)


def _short(value: float) -> str:
    return f"{value:.4g}"


def growth_charts(results: Results) -> list[str]:
    """Time and memory of a layer's forward pass over the number of tokens, as SVG."""
    grown = [(i, variant.name, variant.growth) for i, variant in enumerate(results.variants)]
    times = [Series(name, i, growth.tokens, growth.seconds) for i, name, growth in grown]
    memory = [
        Series(name, i, growth.tokens, [held / 2**20 for held in growth.memory])
        for i, name, growth in grown
        if all(growth.memory)
    ]
    label = "tokens N of one sample"
    if not any(series.xs for series in times):
        return []
    return [
        line_chart(times, label, "ms of a layer's forward pass", count, milliseconds, log=True),
        line_chart(memory, label, "MiB of peak memory of that pass", count, _short, log=True),
    ]


def cost_charts(results: Results) -> list[str]:
    """The score over multiply-adds and over the time of a step, as SVG."""
    finished = [(i, t) for i, t in enumerate(results.variants) if t.score is not None]
    score = f"test {results.metric}"
    by_macs = [Point(t.name, i, t.macs, t.score or 0, t.deviation) for i, t in finished if t.macs]
    timed = [(i, t) for i, t in finished if t.step]
    by_time = [Point(t.name, i, t.step.median if t.step else 0, t.score or 0, t.deviation) for i, t in timed]
    return [
        scatter_chart(by_macs, "MACs of one sample", score, count, _short, results.baselines),
        scatter_chart(by_time, "ms of a training step", score, milliseconds, _short, results.baselines),
    ]


def bars(results: Results, column: Column) -> list[tuple[str, int, float, str]]:
    """A column as bars, of the variants that have it: mixer, index, length in percent of the longest, and text."""
    values = [(i, variant.name, column.value(variant)) for i, variant in enumerate(results.variants)]
    largest = max((v for _, _, v in values if v is not None), default=0) or 1
    return [(mixer, i, 100 * v / largest, column.text(v)) for i, mixer, v in values if v is not None]


def confusions(results: Results) -> list[tuple[str, str]]:
    """Mixer and its confusion matrix over all seeds, as SVG; none for a variant without one."""
    found = []
    for variant in results.variants:
        matrices = [run.confusion for run in variant.runs if run.confusion]
        if matrices:
            total = [[sum(counts) for counts in zip(*rows)] for rows in zip(*matrices)]
            found.append((variant.name, heatmap(total, results.classes)))
    return found
