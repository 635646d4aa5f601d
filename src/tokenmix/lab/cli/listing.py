"""What `tokenmix list` prints, and tables for the other verbs."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from tokenmix.errors import printable
from tokenmix.files import to_json
from tokenmix.lab.registry import DATA_SETS, TASKS
from tokenmix.registry import MODELS


def show(what: str, *, as_json: bool = False) -> None:
    """Print the table of mixers, models, tasks or data sets."""
    # What fits a terminal; --json has all of it.
    short: list[dict[str, Any]] | None = None
    if what == "mixers":
        from tokenmix.layers.table import MIXERS

        rows = [{"name": name, **asdict(spec.layer.capabilities), "about": spec.about} for name, spec in MIXERS.items()]
        short = [
            {"name": row["name"], "cost in N": "linear" if row["linear"] else "quadratic"}
            | {key: row[key] for key in ("length", "causal", "map", "about")}
            for row in rows
        ]
    elif what == "data":
        from tokenmix.lab.data import list_data

        rows = [asdict(entry) for entry in list_data()]
        # Files of the user's own, or of the hub, are not in the cache.
        elsewhere = {entry.name for entry in DATA_SETS if entry.variant != "none" and not entry.stored}
        short = [
            {key: row[key] for key in ("name", "about", "licence")}
            | {"cached": "–" if row["name"] in elsewhere else row["cached"]}
            for row in rows
        ]
    elif what == "models":
        rows = [{"name": entry.name, "task": ", ".join(entry.tasks), "about": entry.about} for entry in MODELS]
    else:
        rows = [{"name": entry.name, "about": entry.about} for entry in TASKS]
    if as_json:
        print(to_json(rows))
    else:
        print_rows(short or rows)


MOST_NAMED, MOST_LISTED = 40, 6
"""Entries by name, and in a row, that are printed without --json."""


def print_result(result: Any) -> None:
    """Print a dict as two columns, or a list of dicts as a table; what is long is left to --json, and said so."""
    if isinstance(result, Mapping):
        table = Table("", "", show_header=False, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for key, value in result.items():
            most = MOST_NAMED if isinstance(value, Mapping) else MOST_LISTED
            long = isinstance(value, Mapping | list) and len(value) > most
            table.add_row(printable(str(key)), f"{len(value)} entries, printed by --json" if long else _cell(value))
        Console(markup=False).print(table)
    else:
        print_rows(result)


def print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print dicts of the same keys as a table."""
    if not rows:
        print("nothing to list")
        return
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for key in rows[0]:
        table.add_column(printable(str(key)), no_wrap=key == "name", overflow="fold")
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    Console(markup=False).print(table)


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        rows = bool(value) and all(isinstance(v, list | tuple) for v in value)
        return ("\n" if rows else ", ").join(_cell(v) for v in value)
    if isinstance(value, Mapping):
        return ", ".join(f"{printable(str(k))} {_cell(v)}" for k, v in value.items())
    return printable(str(value))
