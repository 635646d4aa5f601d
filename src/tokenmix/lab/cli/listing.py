"""What `tokenmix list` prints, and tables for the other verbs."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from tokenmix.errors import printable
from tokenmix.files import to_json


def show(what: str, *, as_json: bool = False) -> None:
    """Print the table of mixers, models, tasks or data sets."""
    rows = {"mixers": _mixers, "models": _models, "tasks": _tasks, "data": _data}[what]()
    if as_json:
        print(to_json(rows))
    else:
        print_rows([SHORT[what](row) if what in SHORT else row for row in rows])


def _mixers() -> list[dict[str, Any]]:
    from tokenmix.layers.table import MIXERS

    return [{"name": name, **asdict(spec.layer.capabilities), "about": spec.about} for name, spec in MIXERS.items()]


def _short_mixer(row: dict[str, Any]) -> dict[str, Any]:
    """A mixer's row that fits a terminal; --json has all of it."""
    kept = {key: row[key] for key in ("length", "causal", "map", "about")}
    return {"name": row["name"], "cost in N": "linear" if row["linear"] else "quadratic", **kept}


def _short_data(row: dict[str, Any]) -> dict[str, Any]:
    """A data set's row that fits a terminal; --json has all of it."""
    from tokenmix.lab.registry import DATA_SETS

    entry = DATA_SETS[row["name"]]
    elsewhere = entry.variant != "none" and not entry.stored  # files of the user's own, or of the hub
    return {**{key: row[key] for key in ("name", "about", "licence")}, "cached": "–" if elsewhere else row["cached"]}


def _models() -> list[dict[str, Any]]:
    from tokenmix.registry import MODELS

    return [{"name": entry.name, "task": ", ".join(entry.tasks), "about": entry.about} for entry in MODELS]


SHORT = {"mixers": _short_mixer, "data": _short_data}


def _tasks() -> list[dict[str, Any]]:
    from tokenmix.lab.registry import TASKS

    return [{"name": entry.name, "about": entry.about} for entry in TASKS]


def _data() -> list[dict[str, Any]]:
    from tokenmix.lab.data import list_data

    return [asdict(entry) for entry in list_data()]


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
