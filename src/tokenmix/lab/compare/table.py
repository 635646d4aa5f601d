"""Tables of comparisons: one definition for the terminal, Markdown, pages and notebooks."""

from collections.abc import Callable
from dataclasses import dataclass

import rich.table
from rich import box

from tokenmix.lab.compare.results import Results, Variant
from tokenmix.lab.data.lookup import short_name
from tokenmix.profiling.measure import Timing
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
