"""What a comparison found, as stored in results.json; and its tables: for terminal, pages and notebooks."""

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
import rich.table
from rich import box

from tokenmix.errors import UserError
from tokenmix.files import Values, read_json, write_json
from tokenmix.lab.compare.statistics import CONFIDENCE, Difference, difference, holm
from tokenmix.lab.data.lookup import short_name
from tokenmix.profiling.machine import Timing
from tokenmix.profiling.units import count, milliseconds, ratio, size, spread, to_markdown

SCHEMA = 5
IDENTITY, ORIGINAL, NONE = "identity", "original", "none"
"""The control without mixing, the model without a swap, and the model without an inserted block."""


@dataclass(frozen=True)
class Curve:
    """Values against training samples seen and against seconds of training."""

    samples: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Run:
    """One training of one variant. `score` and `confusion` are of the last epoch; None if the run failed.

    `rate` is training samples a second.
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


@dataclass(frozen=True)
class Growth:
    """A layer's forward pass over the number of tokens, for one sample: seconds, and bytes above weights and input."""

    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Variant:
    """One variant: what it has, what it costs, and its runs. Memory is bytes above weights, optimiser and input.

    `macs` are those of a forward pass of one sample, `layer_macs` those of one layer of its mixer, as wide and with as
    many tokens as in the model; None where they are not known. `steps` and `learning_rate` are those of each run, and
    `tuned` the scores on validation samples by the learning rates that were tried.
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

    @property
    def scores(self) -> list[float]:
        """Headline metric of the finished runs."""
        return [run.score for run in self.runs if run.score is not None]

    @property
    def score(self) -> float | None:
        """Mean over seeds; None if no run finished."""
        return statistics.mean(self.scores) if self.scores else None

    @property
    def deviation(self) -> float | None:
        """Sample standard deviation over seeds; None with fewer than two."""
        return statistics.stdev(self.scores) if len(self.scores) > 1 else None

    @property
    def forward_seconds(self) -> float | None:
        """Median of a forward pass of one sample."""
        return self.latency.median if self.latency else None

    def rate(self, batch_size: int) -> float | None:
        """Training samples a second, from the median step."""
        return batch_size / self.step.median if self.step else None

    @property
    def message(self) -> str:
        """What happened to the runs that did not finish; empty if all did."""
        return "; ".join(f"seed {run.seed}: {run.message}" for run in self.runs if run.status != "finished")


@dataclass(frozen=True)
class Example:
    """One test sample and each variant's prediction in words, with its probability where there is one."""

    index: int
    label: str
    answers: dict[str, tuple[str, float | None]]


@dataclass(frozen=True)
class Sampling:
    """How the scores of the runs vary together under the draw of the test samples.

    Attributes:
        samples: how many test samples all runs have in common.
        unit: what a sample is, in the plural.
        runs: folders of the runs with a score, in the order of the matrix.
        covariance: of their scores.
    """

    samples: int
    unit: str
    runs: list[str]
    covariance: list[list[float]]


@dataclass(frozen=True)
class Results:
    """A comparison.

    Attributes:
        command: what to type to repeat it.
        metric: name of the headline metric; `higher` says whether more is better.
        reference: name of the variant that the others are compared with.
        unit: what a sample is, in the plural.
        config: the resolved configuration.
        data: the data's own description (data.json).
        skeleton: what is known of the variants' common network: tokens, width, depth, size of images and patches.
        train: training samples that each variant was given.
        test: test samples.
        seen: training samples that each variant saw, one seen twice counted twice.
        step_batch: samples of the training step that was timed and watched.
        device: where it was trained and measured.
        warning: that other programs took part of the CPU meanwhile; empty if they did not.
        baselines: scores of simpler methods on the same data, by their names.
        sampling: what the draw of the test samples does to the scores; None if the runs kept no predictions.
    """

    command: str
    metric: str
    higher: bool
    reference: str
    unit: str
    config: Values
    data: Values
    classes: list[str]
    skeleton: Values
    train: int
    test: int
    seen: int
    step_batch: int
    device: str
    environment: Values
    variants: list[Variant]
    examples: list[Example] = field(default_factory=list)
    baselines: dict[str, float] = field(default_factory=dict)
    sampling: Sampling | None = None
    warning: str = ""
    schema: int = SCHEMA

    def variant(self, name: str) -> Variant | None:
        """The variant of that name, if it took part."""
        return next((variant for variant in self.variants if variant.name == name), None)

    @property
    def measure(self) -> str:
        """The headline metric in words."""
        known = {"map": "mAP", "miou": "mIoU", "instance_miou": "instance mIoU", "f1": "F1", "macro_f1": "macro F1"}
        return known.get(self.metric, self.metric.replace("_", " "))

    @property
    def budget(self) -> str:
        """What was equal for all variants."""
        return {"macs": "multiply-adds", "seconds": "seconds"}.get(self.config.get("budget", ""), self.unit)

    def different_samples(self) -> int:
        """Different samples that each variant was trained on; `seen` counts one each time that it is seen."""
        return min(self.seen, self.train)

    def difference(self, a: Variant, b: Variant) -> Difference:
        """How much better `a` is than `b`, over seeds and test samples; below 0 if it is worse."""
        sign = 1 if self.higher else -1
        ours, theirs = ([sign * score for score in variant.scores] for variant in (a, b))
        folders = [run.folder for variant in (a, b) for run in variant.runs if run.score is not None]
        if self.sampling is None or not set(folders) <= set(self.sampling.runs):
            return difference(ours, theirs)
        places = [self.sampling.runs.index(folder) for folder in folders]
        covariance = np.array(self.sampling.covariance)[np.ix_(places, places)]
        return difference(ours, theirs, covariance, self.sampling.samples)

    def ranked(self) -> list[Variant]:
        """The variants with a score, the best first."""
        scored = [variant for variant in self.variants if variant.score is not None]
        return sorted(scored, key=lambda variant: variant.score or 0.0, reverse=self.higher)

    def leaders(self) -> list[Variant]:
        """The variant of the best score, then those after it that chance can explain, by Holm at 5 %."""
        ranked = self.ranked()
        if not ranked:
            return []
        best, *others = ranked
        found = [self.difference(best, other) for other in others]
        # Of two numbers, of which nothing else is known, only equal ones are a tie.
        adjusted = holm([one.probability if one.known else float(one.value == 0) for one in found])
        return [best, *(other for other, p in zip(others, adjusted) if p >= 1 - CONFIDENCE)]

    @property
    def steady(self) -> bool:
        """Whether times can be compared: no other program was seen, and no time is noisy."""
        timings = (timing for variant in self.variants for timing in (variant.latency, variant.step) if timing)
        return not self.warning and not any(timing.noisy for timing in timings)

    def control(self) -> Variant | None:
        """The variant without mixing, if there is one."""
        return self.variant(IDENTITY) or self.variant(NONE)

    def attention(self) -> Variant | None:
        """What the control is held against: the model as it is, else self-attention, else the best that mixes."""
        mixing = (variant for variant in self.ranked() if variant.name not in (IDENTITY, NONE))
        return self.variant(ORIGINAL) or self.variant("self") or next(mixing, None)

    def mixing(self) -> Difference | None:
        """How much better `attention()` is than no mixing; None if one of the two has no score."""
        none, some = self.control(), self.attention()
        if none is None or some is None or none.score is None or some.score is None:
            return None
        return self.difference(some, none)

    def save(self, file: Path) -> None:
        """Write results.json."""
        write_json(file, asdict(self))


def load_results(file: Path) -> Results:
    """Read results.json back; `UserError` if it is of another schema."""
    plain = read_json(file)
    if plain.get("schema") != SCHEMA:
        raise UserError(f"{file} has schema {plain.get('schema')!r} instead of {SCHEMA}; repeat the comparison")
    return _loaded(Results, plain)


def _loaded(hint: Any, value: Any) -> Any:
    """A value of JSON as its annotation has it."""
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
    """A column: the number after a cell, that number as text, which way is better, and what it is.

    `short` is the heading on the terminal, "" for a column that is left out there; `timing` is what a time comes from.
    """

    heading: str
    short: str
    value: Callable[[Variant], float | None]
    text: Callable[[float], str]
    higher: bool
    about: str
    timing: Callable[[Variant], Timing | None] = lambda variant: None


@dataclass(frozen=True)
class Cell:
    """One cell: text, ratio to the reference ("" if there is none to show), whether it is the column's best.

    Ties are all the best: scores that chance could have put first (with one seed none), times whose quartiles overlap.
    """

    text: str
    ratio: str = ""
    best: bool = False
    value: float | None = None


@dataclass(frozen=True)
class Row:
    """A row: what its name means and what happened to its runs; `aside` if it is no variant."""

    name: str
    cells: list[Cell]
    about: str = ""
    message: str = ""
    aside: bool = False


@dataclass(frozen=True)
class Heading:
    """The heading of a column; `short` on the terminal, "" for a column that is left out there."""

    text: str
    short: str = ""
    about: str = ""
    link: str = ""
    sorts: bool = False


@dataclass(frozen=True)
class Table:
    """One table for the terminal, for Markdown and for the template table.html."""

    headings: list[Heading]
    rows: list[Row]
    title: str = ""

    def rich(self) -> rich.table.Table:
        """For the terminal, 80 columns wide as long as names are short; the best of a column is bold and green."""
        table = rich.table.Table(title=self.title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("variant", no_wrap=True)
        shown = [i for i, heading in enumerate(self.headings) if heading.short]
        for i in shown:
            table.add_column(self.headings[i].short, justify="right", no_wrap=True)
        for row in self.rows:
            texts = (f"[bold green]{c.text}[/]" if c.best else c.text for c in (row.cells[i] for i in shown))
            table.add_row(f"[italic]{row.name}[/]" if row.aside else row.name, *texts)
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


def columns(results: Results) -> list[Column]:
    """The columns of this comparison."""
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


def cells(results: Results, variant: Variant) -> list[Cell]:
    """The cells of one variant."""
    reference, found = results.variant(results.reference), []
    for column in columns(results):
        value, scores = column.value(variant), column.heading == results.measure
        if value is None:
            found.append(Cell("–"))
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
        found.append(Cell(text, ratio(value, base) if base else "", best and len(results.variants) > 1, value))
    return found


def table_of(results: Results) -> Table:
    """A row for each variant and, with its score alone, for each baseline."""
    shown = columns(results)
    rows = [Row(v.name, cells(results, v), about=v.about, message=v.message) for v in results.variants]
    empty = [Cell("")] * (len(shown) - 1)
    rows += [Row(name, [Cell(shown[0].text(v)), *empty], aside=True) for name, v in results.baselines.items()]
    seeds = results.config["seeds"]
    runs = f"{len(seeds)} seeds, mean ± standard deviation" if len(seeds) > 1 else f"seed {seeds[0]}"
    what = f"{results.different_samples():,} training {results.unit}, {results.seen:,} counting repeats"
    what = what if results.budget == results.unit else f"equal {results.budget} of training"
    what += f", {results.test:,} for testing"
    title = f"{results.data.get('name', short_name(results.config['data']))}: {what}, {runs}"
    return Table([Heading(c.heading, short=c.short, about=c.about, sorts=True) for c in shown], rows, title)
