"""Results as tables of text, and the output of `tokenmix info`."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tokenmix.errors import UserError, as_user_error, printable
from tokenmix.files import Values
from tokenmix.registry import Arguments, is_foreign

MOST_NAMED, MOST_LISTED = 40, 6
"""Entries by name, and entries in a row, printed without --json."""


def print_result(result: Arguments | Sequence[Values]) -> None:
    """Print a dict as two columns, or a list of dicts as a table; long values are replaced by a hint to --json."""
    if isinstance(result, Mapping):
        table = Table("", "", show_header=False, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for key, value in result.items():
            most = MOST_NAMED if isinstance(value, Mapping) else MOST_LISTED
            long = isinstance(value, Mapping | list) and len(value) > most
            table.add_row(printable(str(key)), f"{len(value)} entries, printed by --json" if long else _cell(value))
        Console(markup=False).print(table)
    else:
        print_rows(result)


def print_rows(rows: Sequence[Values]) -> None:
    """Print dicts with equal keys as a table."""
    if not rows:
        print("nothing to list")
        return
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for key in rows[0]:
        table.add_column(printable(str(key)), no_wrap=key == "name", overflow="fold")
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    Console(markup=False).print(table)


def _cell(value: object) -> str:
    if value is None or value != value:  # NaN
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        rows = bool(value) and all(isinstance(v, list | tuple) for v in value)
        return ("\n" if rows else ", ").join(_cell(v) for v in value)
    if isinstance(value, Mapping):
        rows = bool(value) and all(isinstance(v, Mapping) for v in value.values())
        space, end = (": ", "\n") if rows else (" ", ", ")
        return end.join(f"{printable(str(k))}{space}{_cell(v)}" for k, v in value.items())
    return printable(str(value))


def summarize_foreign(name: str, sizes: Arguments, model_kwargs: Arguments) -> Values:
    """Parameters and multiply-adds of a third-party model on a colour image, of its own size or 224 pixels."""
    import torch

    from tokenmix.models.foreign import IMAGENET, load_foreign
    from tokenmix.models.interface import pair
    from tokenmix.models.registry import create_on_meta, of_size
    from tokenmix.swap.probe import example_of, model_macs

    if "num_points" in sizes:
        raise UserError(f"{name} takes images; leave --num-points out")
    size = sizes.get("img_size")
    if is_foreign(name):
        height, width = pair(size or 224)
        model = load_foreign(name, {**IMAGENET, "img_size": (height, width)}, **model_kwargs)
        image = torch.zeros(1, 3, height, width)
    else:
        model = of_size(partial(create_on_meta, name, **model_kwargs), size)
        example: Any = example_of(model, size)
        (image,) = example
        height, width = image.shape[2:]
    # A third-party forward pass may raise anything.
    with as_user_error(f"{name} does not run on a colour image of {height} x {width} (", "); give --img-size"):
        macs = model_macs(model, (image,))
    parameters = sum(p.numel() for p in model.parameters())
    return {"model": name, "image": [height, width], "parameters": parameters, "macs": macs}


def print_blocks(summary: Values) -> None:
    """Print the parts of a model with their costs, and published figures beside ours."""
    from tokenmix.profiling.units import count

    console = Console()
    if "points" in summary:
        size, grid = f"{summary['points']} points", ""
    else:
        size = "{} x {} px".format(*summary["image"])
        grid = " ({} x {})".format(*summary["grid"])
    mixer = f" ({summary['mixer']})" if summary["mixer"] else ""
    console.print(
        f"[bold]{summary['model']}[/]{mixer} for {summary['task']} at {size}: {summary['tokens']} tokens{grid}, "
        f"{summary['parameters'] / 1e6:.3f} M parameters, {count(summary['macs'])} multiply-adds",
        soft_wrap=True,
    )
    rows: list[Values] = []
    # Neighbouring rows that differ only in their block number become one row, such as "0 to 3, each".
    for _, equal in groupby(summary["blocks"], key=lambda row: {name: row[name] for name in row if name != "block"}):
        first, *others = map(dict, equal)
        if others and "block" in first:
            first, others = first | {"block": f"{first['block']} to {others[-1]['block']}, each"}, []
        rows += [first, *others]
    for row in rows:
        for column, value in row.items():
            if isinstance(value, int) and column.endswith(("macs", "parameters", "vanilla")):
                row[column] = count(value)
    print_rows(rows)
    for line in summary["warnings"]:
        console.print(f"[yellow]warning:[/] {escape(line)}", soft_wrap=True)
    console.print(_published(summary), highlight=False, soft_wrap=True)


def _published(summary: Values) -> str:
    """A sentence on the paper's figures and ours, with the source."""
    theirs = summary["published"]
    if theirs is None:
        return "Ours are counted from the equations; nothing is published for this model."
    preset, told = summary["preset"], []
    if theirs["parameters"] is not None:
        digits = max(2, len(str(theirs["parameters"]).partition(".")[2]))
        ours = f"{preset['parameters'] / 1e6:.{digits}f}"
        told.append(f"parameters {theirs['parameters']} M published, {ours} M here")
    if theirs["macs"] is not None:
        at = f"at {preset['image'][0]} px"
        told.append(f"multiply-adds {theirs['macs']} G {at} published, {preset['macs'] / 1e9:.2f} G here")
    if theirs["top1"] is not None:
        told.append(f"ImageNet top-1 {theirs['top1']} % published, not reproduced here")
    part = "" if theirs["part"] is None else f", its {theirs['part']}"
    return f"The preset {summary['model']}{part}: {'; '.join(told)}. Source: {theirs['source']}."
