"""What `tokenmix list` and `tokenmix info` print."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tokenmix.errors import UserError, unknown_name

__all__ = ["fetch_data", "info", "print_result", "show"]


def show(what: str, *, as_json: bool = False) -> None:
    """Print the table of mixers, models, tasks or data sets."""
    rows = {"mixers": _mixers, "models": _models, "tasks": _tasks, "data": _data}[what]()
    if as_json:
        print(json.dumps(rows, indent=2, default=str))
    else:
        _print_rows([SHORT[what](row) if what in SHORT else row for row in rows])


def _mixers() -> list[dict[str, Any]]:
    from tokenmix.layers.table import MIXERS

    return [{"name": name, **asdict(spec.layer.capabilities), "about": spec.about} for name, spec in MIXERS.items()]


def _short_mixer(row: dict[str, Any]) -> dict[str, Any]:
    """A mixer's row that fits a terminal; --json has all of it."""
    return {
        "name": row["name"],
        "cost in N": "linear" if row["linear"] else "quadratic",
        "length": row["length"],
        "causal": row["causal"],
        "map": row["map"],
        "about": row["about"],
    }


def _short_data(row: dict[str, Any]) -> dict[str, Any]:
    """A data set's row that fits a terminal; --json has all of it."""
    return {key: row[key] for key in ("name", "size", "licence", "cached")}


SHORT = {"mixers": _short_mixer, "data": _short_data}


def _models() -> list[dict[str, Any]]:
    from tokenmix.models.families import build_model, list_all_models

    def row(name: str) -> dict[str, Any]:
        model = build_model(name, device="meta")
        return {"name": name, "parameters": _count(model), "mixer": getattr(model, "mixer_name", "")}

    return [row(name) for name in list_all_models()] + _text_models()


def _text_models() -> list[dict[str, Any]]:
    from tokenmix.text import describe, list_configs

    described = {name: describe(name) for name in list_configs()}
    return [{"name": name, "parameters": d["parameters"], "mixer": d["mixer"]} for name, d in described.items()]


def _tasks() -> list[dict[str, Any]]:
    from tokenmix.tasks import TASKS

    return [{"name": name, "about": spec.about} for name, spec in TASKS.items()]


def _data() -> list[dict[str, Any]]:
    from tokenmix.data import list_data
    from tokenmix.data.dense import list_dense
    from tokenmix.data.points import list_points
    from tokenmix.data.text import list_text

    return [asdict(entry) for entry in (*list_data(), *list_text(), *list_dense(), *list_points())]


def fetch_data(name: str) -> str:
    """Fetch a data set of any kind unless it is in the cache; returns the line that says where it came from."""
    from tokenmix.data import DATA_SETS, get
    from tokenmix.data.dense import DENSE, get_dense
    from tokenmix.data.points import POINT_SETS, get_points
    from tokenmix.data.text import get_text
    from tokenmix.data.text.table import CORPORA, LABELLED

    kind = name.partition(":")[0]
    texts = {**CORPORA, **LABELLED}
    for known, fetch in ((DATA_SETS, get), (texts, get_text), (DENSE, get_dense), (POINT_SETS, get_points)):
        if kind in known:
            return fetch(name)
    raise unknown_name("data set", name, (*DATA_SETS, *texts, *DENSE, *POINT_SETS))


def info(
    model_name: str, *, img_size: int | tuple[int, int] | None, model_kwargs: Mapping[str, Any], as_json: bool
) -> None:
    """Print parameters and multiply-adds of a model, of an image model block by block."""
    if "_text_" in model_name:
        _text_info(model_name, img_size, model_kwargs, as_json=as_json)
        return
    from tokenmix.measure.units import count
    from tokenmix.models.families import build_model
    from tokenmix.models.published import PUBLISHED

    size = {} if img_size is None else {"img_size": img_size}
    model: Any = build_model(model_name, **size, **model_kwargs)
    if not hasattr(model, "macs"):
        raise UserError(f"{model_name!r} is not a tokenmix model; tokenmix info knows those of tokenmix list models")
    n, grid = model.num_tokens, model.grid_size
    summary = {
        "model": model_name,
        "mixer": model.mixer_name,
        "image": list(model.img_size),
        "tokens": n,
        "parameters": _count(model),
        "macs": model.macs(),
        "blocks": _blocks(model),
        "warnings": model.warnings() if hasattr(model, "warnings") else _warnings(model),
        "published": asdict(PUBLISHED[model_name]) if model_name in PUBLISHED else None,
    }
    if summary["published"] is not None:
        # What was asked for may have another size or other arguments than what was published.
        preset: Any = build_model(model_name, device="meta")
        summary["preset"] = {"image": list(preset.img_size), "parameters": _count(preset), "macs": preset.macs()}
    if as_json:
        print(json.dumps(summary, indent=2))
        return
    console = Console()
    console.print(
        f"[bold]{model_name}[/] ({model.mixer_name}) at {model.img_size[0]} x {model.img_size[1]} px: {n} tokens "
        f"({grid[0]} x {grid[1]}), {summary['parameters'] / 1e6:.3f} M parameters, "
        f"{count(summary['macs'])} multiply-adds",
        soft_wrap=True,
    )
    _print_rows(summary["blocks"])
    for line in summary["warnings"]:
        console.print(f"[yellow]warning:[/] {escape(line)}", soft_wrap=True)
    console.print(_beside(summary), highlight=False, soft_wrap=True)


def _text_info(name: str, img_size: Any, model_kwargs: Mapping[str, Any], *, as_json: bool) -> None:
    from tokenmix.text import describe

    if img_size is not None:
        raise UserError(
            f"{name} is a text model, whose longest text is --model-kwargs max_position_embeddings=N; "
            f"leave --img-size {img_size} out"
        )
    summary = describe(name, **model_kwargs)
    if as_json:
        print(json.dumps(summary, indent=2))
    else:
        print_result({key: value for key, value in summary.items() if value is not None})


def _beside(summary: Mapping[str, Any]) -> str:
    """The paper's figures beside ours, and where they come from."""
    theirs = summary["published"]
    if theirs is None:
        return "Ours are counted from the equations; nothing is published for this model."
    preset = summary["preset"]
    told = [
        f"{label} {theirs[key]}{unit} published{ours}"
        for key, label, unit, ours in (
            ("parameters", "parameters", " M", f", {preset['parameters'] / 1e6:.2f} M here"),
            ("macs", "multiply-adds", f" G at {preset['image'][0]} px", f", {preset['macs'] / 1e9:.2f} G here"),
            ("top1", "ImageNet top-1", " %", ", not reproduced here"),
        )
        if theirs[key] is not None
    ]
    return f"The preset {summary['model']}: {'; '.join(told)}. Source: {theirs['source']}."


def _warnings(model: Any) -> list[str]:
    """Less-attention that takes no fewer multiply-adds than the self-attention in its place would."""
    from tokenmix.layers import LessAttention, SelfAttention

    mixers = [getattr(block.mixer, "inner", block.mixer) for block in model.blocks]
    less = [mixer for mixer in mixers if isinstance(mixer, LessAttention)]
    if not less:
        return []
    n, layer = model.num_tokens, less[0]
    own, vanilla = layer.macs(n), SelfAttention(layer.dim, num_heads=layer.num_heads, device="meta").macs(n)
    if own < vanilla:
        return []
    return [
        f"the {len(less)} less-attention layers do not pay at {n} tokens, {own / 1e6:.4g} M multiply-adds against "
        f"{vanilla / 1e6:.4g} M of self-attention; they do with fewer tokens, that is a smaller image or larger "
        "patches, or in a wider model"
    ]


def _blocks(model: Any) -> list[dict[str, Any]]:
    """One row for each block. A pyramid has rows of its own, with what a vanilla layer would take in the place."""
    if hasattr(model, "cost_table"):
        return [row._asdict() for row in model.cost_table()]
    return [
        {
            "block": i,
            "mixer": type(getattr(b.mixer, "inner", b.mixer)).__name__,
            "mixer parameters": _count(b.mixer),
            "mixer macs": b.mixer.macs(model.num_tokens),
        }
        for i, b in enumerate(model.blocks)
    ]


def print_result(result: Any) -> None:
    """Print a dict as two columns, or a list of dicts as a table."""
    if isinstance(result, Mapping):
        table = Table("", "", show_header=False)
        for key, value in result.items():
            if isinstance(value, Mapping | list) and len(value) > 6:
                continue
            table.add_row(str(key), _cell(value))
        Console().print(table)
    else:
        _print_rows(result)


def _print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    if not rows:
        print("nothing to list")
        return
    table = Table()
    for key in rows[0]:
        table.add_column(str(key), no_wrap=key == "name", overflow="fold")
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    Console().print(table)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        rows = bool(value) and all(isinstance(v, list | tuple) for v in value)
        return ("\n" if rows else ", ").join(_cell(v) for v in value)
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_cell(v)}" for k, v in value.items())
    return str(value)


def _count(module: Any) -> int:
    return sum(p.numel() for p in module.parameters())
