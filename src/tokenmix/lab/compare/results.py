"""Results of a comparison, as stored in results.json; and their tables for terminal, pages and notebooks."""

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
import rich.table
from rich import box
from rich.markup import escape

from tokenmix.errors import UserError
from tokenmix.files import Values, read_json, write_json
from tokenmix.lab.compare.statistics import CONFIDENCE, Difference, difference, holm
from tokenmix.lab.data.lookup import short_name
from tokenmix.profiling.machine import Timing
from tokenmix.profiling.units import count, milliseconds, ratio, size, spread, to_markdown

SCHEMA = 5
IDENTITY, ORIGINAL, NONE = "identity", "original", "none"
"""The control without mixing, the unchanged model, and the model without an inserted block."""
OF = " of "
"""Between a metric and a class."""
WORDS = {
    "map": "mAP",
    "mar": "mAR",
    "miou": "mIoU",
    "iou": "IoU",
    "f1": "F1",
    "auc": "AUC",
    "ece": "ECE",
    "top5": "top-5",
}


def metric_name(key: str) -> str:
    """Usual name of a metric, as in "macro F1" and "recall of dog"."""
    metric, of, part = key.partition(OF)
    words = metric.replace("per_class", "map").replace("class_iou", "iou").split("_")
    return " ".join(WORDS.get(word, word) for word in words) + of + part


@dataclass(frozen=True)
class Curve:
    """Values over training samples and over seconds of training."""

    samples: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Run:
    """One training of one variant; `rate` is training samples per second.

    `score` and `metrics`, the other numbers of the test set, are of the best epoch on validation samples, of the last
    without any.
    """

    seed: int
    folder: str
    status: str
    message: str = ""
    score: float | None = None
    seconds: float | None = None
    rate: float | None = None
    score_curve: Curve = field(default_factory=Curve)
    loss_curve: Curve = field(default_factory=Curve)
    confusion: list[list[int]] | None = None
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Growth:
    """Forward pass of a layer over the number of tokens, for one sample: seconds, and bytes above weights and input."""

    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Variant:
    """One variant, its costs and its runs. Memory is bytes above weights, optimiser and input.

    `macs` are those of a forward pass of one sample, `layer_macs` those of one layer of its mixer at the model's width
    and number of tokens; None if unknown. `steps` and `learning_rate` are those of each run. `tuned` are the validation
    scores of the learning rates that were tried.
    """

    name: str
    about: str
    parameters: int
    macs: int | None = None
    layer_macs: int | None = None
    crossover: str | None = None
    latency: Timing | None = None
    step: Timing | None = None
    step_memory: int | None = None
    inference_memory: int | None = None
    runs: list[Run] = field(default_factory=list)
    growth: Growth = field(default_factory=Growth)
    steps: int | None = None
    learning_rate: float | None = None
    tuned: dict[str, float | None] = field(default_factory=dict)

    def __repr__(self) -> str:
        score = "no score" if self.score is None else spread(self.score, self.deviation)
        macs = "" if self.macs is None else f", {count(self.macs)} MACs"
        return f"<{self.name}: {score}, {count(self.parameters)} parameters{macs}>"

    @property
    def scores(self) -> list[float]:
        """Scores of the finished runs, in the main metric."""
        return [run.score for run in self.runs if run.score is not None]

    @property
    def score(self) -> float | None:
        """Mean over seeds; None if no run finished."""
        return statistics.mean(self.scores) if self.scores else None

    @property
    def deviation(self) -> float | None:
        """Sample standard deviation over seeds; None for fewer than two."""
        return statistics.stdev(self.scores) if len(self.scores) > 1 else None

    @property
    def forward_seconds(self) -> float | None:
        """Median time of a forward pass of one sample."""
        return self.latency.median if self.latency else None

    def rate(self, batch_size: int) -> float | None:
        """Training samples per second, from the median step."""
        return batch_size / self.step.median if self.step else None

    @property
    def message(self) -> str:
        """Messages of the runs that did not finish; empty if all did."""
        return "; ".join(f"seed {run.seed}: {run.message}" for run in self.runs if run.status != "finished")


@dataclass(frozen=True)
class Example:
    """One test sample and each variant's prediction as text, with its probability if known."""

    index: int
    label: str
    answers: dict[str, tuple[str, float | None]]


@dataclass(frozen=True)
class Sampling:
    """Covariance of the runs' scores under the draw of the test samples."""

    samples: int  # number of test samples that all runs have in common
    unit: str  # plural name of the samples
    runs: list[str]  # folders of the runs with a score, in the order of the matrix
    covariance: list[list[float]]  # covariance of their scores


@dataclass(frozen=True)
class Results:
    """A comparison."""

    command: str  # command line that repeats it
    metric: str  # name of the main metric
    higher: bool  # whether more is better
    reference: str  # name of the variant that the others are compared with
    unit: str  # plural name of the samples
    config: Values  # the resolved configuration
    data: Values  # the data's own description (data.json)
    classes: list[str]
    skeleton: Values  # description of the variants' common network: tokens, width, depth, size of images and patches
    train: int  # training samples of each variant
    test: int  # test samples
    seen: int  # training samples that each variant saw, with repetitions
    step_batch: int  # samples of the training step that was measured
    device: str  # device of training and measurement
    environment: Values
    variants: list[Variant]
    examples: list[Example] = field(default_factory=list)
    baselines: dict[str, float] = field(default_factory=dict)  # scores of simpler methods on the same data, by name
    # Covariance of the scores under the draw of the test samples; None if the runs kept no predictions.
    sampling: Sampling | None = None
    warning: str = ""  # other programs that used the CPU meanwhile; empty if none did
    # Mixers that would make the original model again, and have no row of their own.
    same: list[str] = field(default_factory=list)
    schema: int = SCHEMA

    def variant(self, name: str) -> Variant | None:
        return next((variant for variant in self.variants if variant.name == name), None)

    @property
    def measure(self) -> str:
        return metric_name(self.metric)

    @property
    def budget(self) -> str:
        """The quantity that was equal for all variants."""
        return {"macs": "multiply-adds", "seconds": "seconds"}.get(self.config.get("budget", ""), self.unit)

    def different_samples(self) -> int:
        """Number of different training samples of each variant; `seen` counts repetitions."""
        return min(self.seen, self.train)

    def repeats(self) -> str:
        """Remark on the number of samples if some were seen several times."""
        if self.seen <= self.train:
            return ""
        incomplete = " without incomplete batches" * bool(self.train % self.step_batch)
        return f", {self.seen:,} counting repeats{incomplete}"

    def difference(self, a: Variant, b: Variant) -> Difference:
        """Advantage of `a` over `b`, over seeds and test samples; negative if `a` is worse."""
        sign = 1 if self.higher else -1
        ours, theirs = ([sign * score for score in variant.scores] for variant in (a, b))
        folders = [run.folder for variant in (a, b) for run in variant.runs if run.score is not None]
        if self.sampling is None or not set(folders) <= set(self.sampling.runs):
            return difference(ours, theirs)
        indices = [self.sampling.runs.index(folder) for folder in folders]
        covariance = np.array(self.sampling.covariance)[np.ix_(indices, indices)]
        return difference(ours, theirs, covariance, self.sampling.samples)

    def ranked(self) -> list[Variant]:
        """The variants with a score, best first."""
        scored = [variant for variant in self.variants if variant.score is not None]
        return sorted(scored, key=lambda variant: variant.score or 0.0, reverse=self.higher)

    def leaders(self) -> list[Variant]:
        """The best variant, then those whose difference from it chance can explain, by Holm at 5 %."""
        ranked = self.ranked()
        if not ranked:
            return []
        best, *others = ranked
        found = [self.difference(best, other) for other in others]
        # Of two numbers without further knowledge only equal ones are a tie.
        adjusted = holm([one.probability if one.known else float(one.value == 0) for one in found])
        return [best, *(other for other, p in zip(others, adjusted) if p >= 1 - CONFIDENCE)]

    @property
    def steady(self) -> bool:
        """Whether times are comparable: no other program was seen, and no time is noisy."""
        timings = (timing for variant in self.variants for timing in (variant.latency, variant.step) if timing)
        return not self.warning and not any(timing.noisy for timing in timings)

    def control(self) -> Variant | None:
        return self.variant(IDENTITY) or self.variant(NONE)

    def attention(self) -> Variant | None:
        """Counterpart of the control: the unchanged model, else self-attention, else the best that mixes."""
        mixing = (variant for variant in self.ranked() if variant.name not in (IDENTITY, NONE))
        return self.variant(ORIGINAL) or self.variant("self") or next(mixing, None)

    def mixing(self) -> Difference | None:
        """Advantage of `attention()` over no mixing; None if one of them has no score."""
        none, some = self.control(), self.attention()
        if none is None or some is None or none.score is None or some.score is None:
            return None
        return self.difference(some, none)

    def difference_table(self) -> list[dict[str, str | float]]:
        """Difference of each variant from the reference, above 0 if the variant is better.

        Each row has the 95 % interval from `low` to `high`, and the p-value by Holm. It is empty where the share of
        chance is unknown.
        """
        base = self.variant(self.reference)
        others = [v for v in self.variants if v is not base and v.score is not None]
        if base is None or base.score is None:
            return []
        known = {v.name: found for v in others if (found := self.difference(v, base)).known}
        return [
            {"variant": name, "reference": base.name, "difference": one.value, "low": low, "high": high, "p": p}
            for (name, one), p in zip(known.items(), holm([one.probability for one in known.values()]))
            for low, high in [one.interval()]
        ]

    def save(self, file: Path) -> None:
        write_json(file, {**asdict(self), "differences": self.difference_table()})


def load_results(file: Path) -> Results:
    """Read results.json; `UserError` for another schema."""
    plain = read_json(file)
    plain.pop("differences", None)
    if plain.get("schema") != SCHEMA:
        raise UserError(f"{file} has schema {plain.get('schema')!r} instead of {SCHEMA}; repeat the comparison")
    return _loaded(Results, plain)


def _loaded(hint: Any, value: Any) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if value is None or not (args or is_dataclass(hint)):
        return value
    if is_dataclass(hint):
        hints = get_type_hints(hint)
        return hint(**{name: _loaded(hints[name], item) for name, item in value.items()})  # type: ignore[operator]
    if origin is dict:
        return {key: _loaded(args[1], item) for key, item in value.items()}
    if origin is list:
        return [_loaded(args[0], item) for item in value]
    return tuple(value) if origin is tuple else _loaded(args[0], value)


@dataclass(frozen=True)
class Column:
    """A column: the number of a variant, its text, which direction is better, and a description.

    `short` is the heading on the terminal, "" to omit the column there. `timing` is the source of a time.
    """

    heading: str
    short: str
    value: Callable[[Variant], float | None]
    text: Callable[[float], str]
    higher: bool
    about: str
    timing: Callable[[Variant], Timing | None] = lambda variant: None


@dataclass(frozen=True)
class TableCell:
    """One cell: text, ratio to the reference ("" for none), and whether it is the column's best.

    Ties are all best: scores that chance could have put first (none with one seed), times with overlapping quartiles.
    """

    text: str
    ratio: str = ""
    best: bool = False
    value: float | None = None


@dataclass(frozen=True)
class Row:
    """A row with a description of its name and messages of its runs; `aside` if it is no variant."""

    name: str
    cells: list[TableCell]
    about: str = ""
    message: str = ""
    aside: bool = False


@dataclass(frozen=True)
class Heading:
    """Heading of a column; `short` as in `Column`."""

    text: str
    short: str = ""
    about: str = ""
    link: str = ""
    sorts: bool = False


@dataclass(frozen=True)
class Table:
    """One table for the terminal, Markdown and the template table.html."""

    headings: list[Heading]
    rows: list[Row]
    title: str = ""

    def rich(self) -> rich.table.Table:
        """For the terminal: the best of a column is bold and green; what is too long wraps, the widest column first."""
        table = rich.table.Table(title=escape(self.title), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 0))
        table.add_column("variant", overflow="fold")
        shown = [i for i, heading in enumerate(self.headings) if heading.short]
        for i in shown:
            table.add_column(self.headings[i].short.replace(" ", "\n"), justify="right", overflow="fold")
        for row in self.rows:
            texts = (f"[bold green]{c.text}[/]" if c.best else c.text for c in (row.cells[i] for i in shown))
            table.add_row(f"[italic]{escape(row.name)}[/]" if row.aside else escape(row.name), *texts)
        return table

    def markdown(self) -> str:
        """For a README: the best of a column bold, the ratio to the reference in brackets."""
        headings = [f"[{h.text}]({h.link}/results.md)" if h.link else h.text for h in self.headings]
        rows = []
        for row in self.rows:
            texts = (f"**{cell.text}**" if cell.best else cell.text for cell in row.cells)
            ratios = (f" ({cell.ratio})" if cell.ratio else "" for cell in row.cells)
            rows.append([row.name, *map("".join, zip(texts, ratios))])
        return to_markdown(["variant", *headings], rows)


def metrics_of(results: Results) -> Table | None:
    """The metrics besides the headline's, as means over seeds, those of classes last; None if no run has one."""
    names = list(dict.fromkeys(name for v in results.variants for run in v.runs for name in run.metrics))
    names.sort(key=lambda name: OF in name)
    rows = []
    for variant in results.variants:
        found = [[run.metrics[name] for run in variant.runs if name in run.metrics] for name in names]
        means = [statistics.mean(values) if values else None for values in found]
        cells = [TableCell("–" if mean is None else f"{mean:.4f}", value=mean) for mean in means]
        rows.append(Row(variant.name, cells, about=variant.about))
    title = f"Other metrics{', means over the seeds' if len(results.config['seeds']) > 1 else ''}"
    return Table([Heading(metric_name(name), sorts=True) for name in names], rows, title) if names else None


def differences_of(results: Results) -> Table | None:
    """`Results.difference_table` as a table; None if it is empty."""
    names = {"difference": "difference", "95 % interval": "interval", "p (Holm)": "p"}
    rows = [
        Row(
            str(row["variant"]),
            [
                TableCell(f"{row['difference']:+.4f}"),
                TableCell(f"{row['low']:+.4f} to {row['high']:+.4f}"),
                TableCell(f"{row['p']:.3f}" if float(row["p"]) >= 0.001 else "< 0.001"),
            ],
        )
        for row in results.difference_table()
    ]
    networks = ", networks of one seed" if len(results.config["seeds"]) == 1 else ""
    title = f"Advantage in {results.measure} over {results.reference}{networks}"
    return Table([Heading(name, short) for name, short in names.items()], rows, title) if rows else None


def columns(results: Results) -> list[Column]:
    batch, metric, unit = results.step_batch, results.measure, results.unit
    step, forward = f"peak of a training step, {batch} {unit}", "peak of a forward pass of one sample"
    rate, alone = f"forward, backward and update on {batch} {unit}, median", "one sample, median"
    return [
        Column(
            metric,
            metric.replace("balanced", "bal."),
            lambda t: t.score,
            lambda v: f"{v:.4f}",
            results.higher,
            "test set, best epoch",
        ),
        Column("parameters", "params", lambda t: t.parameters, count, False, "learned numbers"),
        Column("MACs", "MACs", lambda t: t.macs, count, False, "multiply-adds of a forward pass of one sample"),
        Column(
            f"train {unit}/s", "train/s", lambda t: t.rate(batch), lambda v: f"{v:,.0f}", True, rate, lambda t: t.step
        ),
        Column("forward ms", "fwd ms", lambda t: t.forward_seconds, milliseconds, False, alone, lambda t: t.latency),
        Column("step memory", "memory", lambda t: t.step_memory, size, False, step),
        Column("inference memory", "", lambda t: t.inference_memory, size, False, forward),
    ]


def cells(results: Results, variant: Variant) -> list[TableCell]:
    reference, found = results.variant(results.reference), []
    for column in columns(results):
        value, scores = column.value(variant), column.heading == results.measure
        if value is None:
            found.append(TableCell("–"))
            continue
        timing = column.timing(variant)
        if scores:
            best = len(results.config["seeds"]) > 1 and variant in results.leaders()
        elif timing is not None:
            timings = [one for one in map(column.timing, results.variants) if one is not None]
            best = results.steady and timing.q1 <= min(timings, key=lambda one: one.median).q3
        else:
            values = (v for v in map(column.value, results.variants) if v is not None)
            best = value == (max if column.higher else min)(values)
        alone = scores or (timing is not None and not results.steady)
        base = None if reference is None or reference is variant or alone else column.value(reference)
        text = spread(value, variant.deviation) if scores else column.text(value)
        found.append(TableCell(text, ratio(value, base) if base else "", best and len(results.variants) > 1, value))
    return found


def table_of(results: Results) -> Table:
    """A row per variant, and per baseline with its score only."""
    shown = columns(results)
    rows = [Row(v.name, cells(results, v), about=v.about, message=v.message) for v in results.variants]
    empty = [TableCell("")] * (len(shown) - 1)
    rows += [Row(name, [TableCell(shown[0].text(v)), *empty], aside=True) for name, v in results.baselines.items()]
    seeds = results.config["seeds"]
    runs = f"{len(seeds)} seeds, mean ± standard deviation" if len(seeds) > 1 else f"seed {seeds[0]}"
    steps = f", in {results.variants[0].steps:,} steps" if results.variants[0].steps else ""
    what = f"{results.different_samples():,} training {results.unit}{results.repeats()}{steps}"
    what = what if results.budget == results.unit else f"equal {results.budget} of training"
    what += f", {results.test:,} for testing"
    title = f"{results.data.get('name', short_name(results.config['data']))}: {what}, {runs}"
    return Table([Heading(c.heading, short=c.short, about=c.about, sorts=True) for c in shown], rows, title)
