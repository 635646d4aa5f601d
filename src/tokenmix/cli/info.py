"""What `tokenmix info` prints: parameters and multiply-adds of a model part by part, published figures beside them."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape

from tokenmix.cli.listing import count_parameters, print_result, print_rows
from tokenmix.errors import UserError

__all__ = ["InfoRequest", "info"]

# Points of a cloud in ModelNet40 and in ShapeNet-part, as point models are trained on them.
POINTS = {"point-classification": 1024, "point-segmentation": 2048}


@dataclass(frozen=True)
class InfoRequest:
    """A model by name, and for what size of input; None where it is the model's own."""

    model: str
    img_size: int | tuple[int, int] | None = None
    num_points: int | None = None
    model_kwargs: Mapping[str, Any] | None = None


def info(request: InfoRequest, *, as_json: bool) -> None:
    """Print what a model has and takes."""
    if "_text_" in request.model:
        summary = _text(request)
    else:
        from tokenmix.models.families import task_of

        summary = _points(request) if task_of(request.model) in POINTS else _images(request)
    if as_json:
        print(json.dumps(summary, indent=2))
    elif "blocks" in summary:
        _print(summary)
    else:
        print_result({key: _grouped(value) for key, value in summary.items() if value is not None})


def _grouped(value: Any) -> Any:
    return f"{value:,}" if isinstance(value, int) else value


def _text(request: InfoRequest) -> dict[str, Any]:
    from tokenmix.text import describe

    for flag, value in (("--img-size", request.img_size), ("--num-points", request.num_points)):
        if value is not None:
            raise UserError(
                f"{request.model} is a text model, whose longest text is --model-kwargs max_position_embeddings=N; "
                f"leave {flag} {value} out"
            )
    return describe(request.model, **(request.model_kwargs or {}))


def _images(request: InfoRequest) -> dict[str, Any]:
    from tokenmix.models.families import build_model, task_of

    name = request.model
    if request.num_points is not None:
        raise UserError(f"{name} looks at images, not at points; leave --num-points {request.num_points} out")
    size = {} if request.img_size is None else {"img_size": request.img_size}
    model: Any = build_model(name, **size, **(request.model_kwargs or {}))
    if not hasattr(model, "macs"):
        raise UserError(f"{name!r} is not a tokenmix model; tokenmix info knows those of tokenmix list models")
    return {
        "model": name,
        "task": task_of(name),
        "mixer": model.mixer_name,
        "image": list(model.img_size),
        "grid": list(model.grid_size),
        "tokens": model.num_tokens,
        "parameters": count_parameters(model),
        "macs": model.macs(),
        "blocks": _blocks(model),
        "warnings": model.warnings() if hasattr(model, "warnings") else _warnings(model),
        **_beside(name, build_model(name, device="meta")),
    }


def _points(request: InfoRequest) -> dict[str, Any]:
    from tokenmix.models.families import task_of
    from tokenmix.tasks.points.models import create_point_model

    name = request.model
    if request.img_size is not None:
        raise UserError(f"{name} looks at points; give --num-points N in the place of --img-size {request.img_size}")
    if request.num_points is not None and request.num_points < 1:
        raise UserError(f"a cloud has at least 1 point, got --num-points {request.num_points}")
    task = task_of(name)
    assert task is not None
    n = POINTS[task] if request.num_points is None else request.num_points
    model = create_point_model(name, device="meta", **(request.model_kwargs or {}))
    return {
        "model": name,
        "task": task,
        "mixer": model.mixer_name,
        "points": n,
        "tokens": model.trunk.embedding.num_tokens(n),
        "parameters": count_parameters(model),
        "macs": model.macs(n),
        "blocks": [row._asdict() for row in model.cost_table(n)],
        "warnings": [],
        **_beside(name, create_point_model(name, device="meta")),
    }


def _blocks(model: Any) -> list[dict[str, Any]]:
    """One row for each block; models of several parts have rows of their own."""
    if hasattr(model, "cost_table"):
        return [row._asdict() for row in model.cost_table()]
    return [
        {
            "block": i,
            "mixer": type(getattr(b.mixer, "inner", b.mixer)).__name__,
            "mixer parameters": count_parameters(b.mixer),
            "mixer macs": b.mixer.macs(model.num_tokens),
        }
        for i, b in enumerate(model.blocks)
    ]


def _warnings(model: Any) -> list[str]:
    """Less-attention that takes no fewer multiply-adds than the self-attention in its place would."""
    from tokenmix.layers import LessAttention, SelfAttention

    mixers = [getattr(block.mixer, "inner", block.mixer) for block in getattr(model, "blocks", ())]
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


def _beside(name: str, preset: Any) -> dict[str, Any]:
    """The paper's figures, and ours of the preset: what was asked for may have another size or other arguments."""
    from tokenmix.models.published import PUBLISHED

    if name not in PUBLISHED:
        return {"published": None}
    theirs = PUBLISHED[name]
    if theirs.part is not None:
        row = next(row for row in preset.cost_table() if row[0] == theirs.part)
        return {"published": asdict(theirs), "preset": {"parameters": row.parameters}}
    ours: dict[str, Any] = {"parameters": count_parameters(preset)}
    if theirs.macs is not None:
        ours |= {"image": list(preset.img_size), "macs": preset.macs()}
    return {"published": asdict(theirs), "preset": ours}


def _print(summary: Mapping[str, Any]) -> None:
    from tokenmix.cost.units import count

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
    print_rows([{key: _readable(key, value) for key, value in row.items()} for row in summary["blocks"]])
    for line in summary["warnings"]:
        console.print(f"[yellow]warning:[/] {escape(line)}", soft_wrap=True)
    console.print(_published(summary), highlight=False, soft_wrap=True)


def _readable(column: str, value: Any) -> Any:
    """A large count with its unit, as the line above the table has it."""
    from tokenmix.cost.units import count

    return count(value) if isinstance(value, int) and column.endswith(("macs", "parameters", "vanilla")) else value


def _published(summary: Mapping[str, Any]) -> str:
    """The paper's figures beside ours in a sentence, and where they come from."""
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
