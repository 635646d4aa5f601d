"""The table of a comparison: one definition of its columns for the terminal, Markdown and HTML."""

from collections.abc import Callable
from dataclasses import dataclass

from rich.table import Table

from tokenmix.measure.results import Results, Twin
from tokenmix.measure.units import count, milliseconds, ratio, size, spread

__all__ = ["Cell", "Column", "cells", "columns", "markdown_table", "rich_table"]


@dataclass(frozen=True)
class Column:
    """A column: its heading, the number behind a cell, the number as text, which way is better (None = neither)."""

    heading: str
    value: Callable[[Twin], float | None]
    text: Callable[[float], str]
    higher: bool | None
    relative: bool = False
    about: str = ""


@dataclass(frozen=True)
class Cell:
    """One cell: text, ratio to self-attention ("" if there is none to show), whether it is the column's best."""

    text: str
    ratio: str
    best: bool
    value: float | None


def columns(results: Results) -> list[Column]:
    """The columns of this comparison."""
    batch = results.step_batch
    return [
        Column(results.metric, lambda t: t.score, lambda v: f"{v:.4f}", results.higher, about="test set"),
        Column("parameters", lambda t: t.parameters, count, False, True),
        Column("MACs / image", lambda t: t.macs, count, False, True, "multiply-adds of a forward pass"),
        Column(
            "train images/s",
            lambda t: batch / t.step.median if t.step else None,
            lambda v: f"{v:,.0f}",
            True,
            True,
            f"forward, backward and update on {batch} images",
        ),
        Column(
            "forward ms",
            lambda t: t.latency.median if t.latency else None,
            milliseconds,
            False,
            True,
            "one image, median",
        ),
        Column("step memory", lambda t: t.step_memory, size, False, True, f"peak of a training step, {batch} images"),
        Column("inference memory", lambda t: t.inference_memory, size, False, True, f"peak of a pass, {batch} images"),
    ]


def cells(results: Results, twin: Twin) -> list[Cell]:
    """The cells of one twin."""
    reference = results.twin("self")
    return [_cell(results, column, twin, reference) for column in columns(results)]


def _cell(results: Results, column: Column, twin: Twin, reference: Twin | None) -> Cell:
    value = column.value(twin)
    if value is None:
        return Cell("–", "", False, None)
    text = column.text(value)
    if column.heading == results.metric:
        text = spread(value, twin.deviation)
    best = column.higher is not None and len(results.twins) > 1 and value == results.best(column.value, column.higher)
    base = column.value(reference) if reference and column.relative and twin is not reference else None
    return Cell(text, ratio(value, base) if base else "", best, value)


def rich_table(results: Results) -> Table:
    """For the terminal; the best of a column is bold and green."""
    table = Table(title=title(results), title_justify="left")
    table.add_column("mixer", no_wrap=True)
    for column in columns(results):
        table.add_column(column.heading, justify="right")
    for twin in results.twins:
        row = [f"[bold green]{cell.text}[/]" if cell.best else cell.text for cell in cells(results, twin)]
        table.add_row(twin.mixer, *row, end_section=bool(twin.message))
        if twin.message:
            table.add_row(f"[red]{twin.mixer} failed[/]", *[""] * len(row))
    return table


def markdown_table(results: Results) -> str:
    """For a README: a row for each twin, the best of a column bold, the ratio to self-attention in brackets."""
    headings = ["mixer", *(column.heading for column in columns(results))]
    lines = [f"| {' | '.join(headings)} |", f"|---|{'---:|' * (len(headings) - 1)}"]
    for twin in results.twins:
        shown = [_markdown_cell(cell) for cell in cells(results, twin)]
        lines.append(f"| {' | '.join([twin.mixer, *shown])} |")
    return "\n".join(lines)


def _markdown_cell(cell: Cell) -> str:
    text = f"**{cell.text}**" if cell.best else cell.text
    return f"{text} ({cell.ratio})" if cell.ratio else text


def title(results: Results) -> str:
    """What was compared, in a line."""
    seeds = results.config["seeds"]
    runs = f"{len(seeds)} seeds, mean ± standard deviation" if len(seeds) > 1 else f"seed {seeds[0]}"
    return f"{results.data.get('name', results.config['data'])}: {results.images:,} training images each, {runs}"
