"""The table of a comparison: one definition of its columns for the terminal, Markdown and HTML."""

from collections.abc import Callable
from dataclasses import dataclass

from rich import box
from rich.table import Table

from tokenmix.lab.compare.results import Results, Variant
from tokenmix.lab.data.lookup import short_name
from tokenmix.profiling.speed import Timing
from tokenmix.profiling.units import count, milliseconds, ratio, size, spread, to_markdown


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
    ratio: str
    best: bool
    value: float | None


def columns(results: Results) -> list[Column]:
    """The columns of this comparison."""
    batch, metric, unit = results.step_batch, results.metric, results.unit
    step, forward = f"peak of a training step, {batch} {unit}", "peak of a forward pass of one sample"
    rate, alone = f"forward, backward and update on {batch} {unit}, median", "one sample, median"
    return [
        Column(metric, metric, lambda t: t.score, lambda v: f"{v:.4f}", results.higher, "test set, best epoch"),
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
    reference = results.variant(results.reference)
    return [_cell(results, column, variant, reference) for column in columns(results)]


def _cell(results: Results, column: Column, variant: Variant, reference: Variant | None) -> Cell:
    value = column.value(variant)
    if value is None:
        return Cell("–", "", False, None)
    text = column.text(value)
    if column.heading == results.metric:
        text = spread(value, variant.deviation)
    best = len(results.variants) > 1 and _is_best(results, column, variant)
    compared = reference is not None and variant is not reference and column.heading != results.metric
    base = column.value(reference) if reference is not None and compared else None
    return Cell(text, ratio(value, base) if base else "", best, value)


def _is_best(results: Results, column: Column, variant: Variant) -> bool:
    """Whether the variant is first in the column, or tied with the first."""
    if column.heading == results.metric:
        return len(results.config["seeds"]) > 1 and variant in results.leaders()
    own = column.timing(variant)
    if own is not None:
        timings = [timing for timing in map(column.timing, results.variants) if timing is not None]
        return own.q1 <= min(timings, key=lambda timing: timing.median).q3
    return column.value(variant) == results.best_value(column.value, column.higher)


def baseline_rows(results: Results) -> list[tuple[str, str]]:
    """The baselines and their scores, as rows without costs."""
    return [(name, columns(results)[0].text(value)) for name, value in results.baselines.items()]


def rich_table(results: Results) -> Table:
    """For the terminal, 80 columns wide as long as names are short; the best of a column is bold and green."""
    table = Table(title=title(results), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("variant", no_wrap=True)
    shown = [i for i, column in enumerate(columns(results)) if column.short]
    for i in shown:
        table.add_column(columns(results)[i].short, justify="right", no_wrap=True)
    for variant in results.variants:
        row = [cells(results, variant)[i] for i in shown]
        table.add_row(variant.name, *(f"[bold green]{cell.text}[/]" if cell.best else cell.text for cell in row))
    for name, score in baseline_rows(results):
        table.add_row(f"[italic]{name}[/]", score)
    return table


def markdown_table(results: Results) -> str:
    """For a README: a row for each variant, the best of a column bold, the ratio to the reference in brackets."""
    headings = ["variant", *(column.heading for column in columns(results))]
    rows = [[variant.name, *map(_markdown_cell, cells(results, variant))] for variant in results.variants]
    rows += [[name, score, *[""] * (len(headings) - 2)] for name, score in baseline_rows(results)]
    return to_markdown(headings, rows)


def _markdown_cell(cell: Cell) -> str:
    text = f"**{cell.text}**" if cell.best else cell.text
    return f"{text} ({cell.ratio})" if cell.ratio else text


def title(results: Results) -> str:
    """What was compared, in a line."""
    seeds = results.config["seeds"]
    runs = f"{len(seeds)} seeds, mean ± standard deviation" if len(seeds) > 1 else f"seed {seeds[0]}"
    name = results.data.get("name", short_name(results.config["data"]))
    if results.budget != results.unit:
        return f"{name}: equal {results.budget} of training, {runs}"
    return f"{name}: {results.different_samples():,} training {results.unit}, {results.seen:,} counting repeats, {runs}"
