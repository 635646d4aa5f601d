"""`tokenmix doctor module:Class`: the property suite on a user's own layer."""

import contextlib
import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from tokenmix.errors import UserError, one_line, unknown_name
from tokenmix.layers.base import near_square
from tokenmix.layers.table import MIXERS
from tokenmix.registry import import_object
from tokenmix.testing.adapter import OfItself, adapted, adapting
from tokenmix.testing.harness import TOKEN_COUNTS, Builder, fresh, noise
from tokenmix.testing.report import Report, examine
from tokenmix.trust import from_caller

WIDTHS = (
    "dim",
    "d_model",
    "embed_dim",
    "channels",
    "in_channels",
    "dim_in",
    "hidden_size",
    "input_size",
    "in_dim",
    "width",
    "features",
)
HEADS = ("num_heads", "heads", "n_heads", "nhead", "n_head")
BATCH, DEFAULT_DIM, DEFAULT_TOKENS = 3, 32, 16


def print_report(target: str, dim: int | None = None, num_tokens: int | None = None, json: bool = False) -> int:
    """The command: prints the report; 1 if a property fails, else 0, also with advice."""
    # What a layer or the compiler prints is not part of the report.
    with contextlib.redirect_stdout(sys.stderr):
        report = doctor(target, dim=dim, num_tokens=num_tokens)
    if json:
        print(report.to_json())
    else:
        report.print()
    return 1 if report.failed else 0


@from_caller
def doctor(
    target: str,
    *,
    dim: int | None = None,
    num_tokens: int | None = None,
    only: Collection[str] | None = None,
    **kwargs: Any,
) -> Report:
    """Run every property that applies on a layer of the user's.

    Args:
        target: `module:Class` of an nn.Module with forward(x) or forward(x, mask), or `module:function` that builds
            one. The current folder is searched as well. Or a name of `tokenmix.list_mixers()`. Attention that takes
            queries, keys and values is given x for each of them.
        dim: width D to build it with; 32 if not given.
        num_tokens: number of tokens N of the example, given to the constructor if it asks for it; 16 if not given.
        only: names of properties, see `tokenmix.testing.PROPERTIES`; all if not given.
        **kwargs: further arguments of the constructor.

    Raises:
        UserError: the target cannot be imported, built or run.
    """
    spec = MIXERS.get(target)
    if spec is None and ":" not in target:
        raise UserError(f"{unknown_name('mixer', target, MIXERS)}; a layer of yours is module:Class")
    make, fixed = (import_object(target), {}) if spec is None else (spec.layer, spec.fixed)
    builder = Builder(make, _arguments(target, make, dim, num_tokens, {**fixed, **kwargs}))
    try:
        layer = _build_target(target, builder)
        if not isinstance(layer, nn.Module):
            raise UserError(
                f"{target} gives a {type(layer).__name__}, not a torch.nn.Module; name a class of layers, or a "
                "function that builds one"
            )
        if adapted(layer) is not layer:
            builder, layer = Builder(adapting(make), builder.kwargs), adapted(layer)
        x = _example(target, builder, layer, dim, num_tokens)
        verdicts = tuple(examine(builder, x, only))
    except SystemExit as stop:
        raise UserError(f"{target} calls sys.exit({stop.code!r}) when it is built or run; remove that call") from stop
    built = layer.inner if isinstance(layer, OfItself) else layer
    return Report(target, f"{type(built).__name__}({_shown(builder)})", tuple(x.shape), verdicts, tuple(_notes(layer)))


def _notes(layer: nn.Module) -> Iterator[str]:
    if isinstance(layer, OfItself):
        yield f"called as {layer.call_text()}"
    if not hasattr(layer, "capabilities"):
        yield (
            "to train, compare or swap in this layer by its name, derive it from tokenmix.layers.Mixer and state its "
            "capabilities: docs/guides/drop-in.md#your-own-mixer"
        )


def _arguments(
    target: str, make: Callable[..., Any], dim: int | None, num_tokens: int | None, given: Mapping[str, Any]
) -> dict[str, Any]:
    """What to call the constructor with, by the names of its arguments."""
    try:
        parameters = inspect.signature(make).parameters
    except (TypeError, ValueError) as error:
        raise UserError(f"{target} has no signature that Python can read; give a function that builds it") from error
    chosen: dict[str, Any] = {}
    for name, parameter in parameters.items():
        starred = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        required = parameter.default is parameter.empty and not starred
        value = _guess(name, dim, num_tokens, required)
        if value is not None:
            chosen[name] = value
        elif required and name not in given:
            raise UserError(
                f"{target} needs the argument {name!r}, which the doctor cannot guess; write a function without "
                f"arguments that builds the layer, and name it: {target.partition(':')[0]}:that_function"
            )
    return {**chosen, **given}


def _guess(name: str, dim: int | None, num_tokens: int | None, required: bool) -> int | None:
    """A value for an argument that is required, or that the user has given; None leaves the default."""
    if name in WIDTHS:
        return (dim or DEFAULT_DIM) if required else dim
    if name == "batch_first":
        return True
    if name in TOKEN_COUNTS:
        return (num_tokens or DEFAULT_TOKENS) if required else num_tokens
    return 4 if name in HEADS and required else None


def _build_target(target: str, builder: Builder) -> Any:
    try:
        return fresh(builder)
    except UserError:
        raise
    except Exception as error:
        remedy = "try another --dim or --num-tokens, or name a function without arguments that builds it"
        raise UserError(f"{target}({_shown(builder)}) fails with {one_line(error)}; {remedy}") from error


def _shown(builder: Builder) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in builder.kwargs.items())


def _example(target: str, builder: Builder, layer: nn.Module, dim: int | None, num_tokens: int | None) -> Tensor:
    """Input in the layout that the layer declares, else in the first whose shape it preserves."""
    width = dim or _stated(WIDTHS, builder, layer) or _first_width(layer) or DEFAULT_DIM
    tokens = num_tokens or _stated(TOKEN_COUNTS, builder, layer) or DEFAULT_TOKENS
    layouts = {"tokens": noise(BATCH, tokens, width), "2d": noise(BATCH, width, *near_square(tokens))}
    declared = getattr(getattr(layer, "capabilities", None), "layout", None)
    errors = []
    for name in (declared,) if declared in layouts else layouts:
        try:
            with torch.no_grad():
                answer = layer.eval()(layouts[name])
        except Exception as error:
            errors.append(f"{name} {tuple(layouts[name].shape)}: {one_line(error)}")
            continue
        if isinstance(answer, Tensor) and answer.shape == layouts[name].shape:
            return layouts[name]
        shown = tuple(answer.shape) if isinstance(answer, Tensor) else type(answer).__name__
        errors.append(f"{name} {tuple(layouts[name].shape)}: the output is {shown}, not a tensor of the same shape")
    raise UserError(
        f"{target} takes neither (B, N, D) nor (B, C, H, W); {'; '.join(errors)}; --dim and --num-tokens set the "
        "sizes; for a layer of other inputs write an nn.Module whose forward(x) calls it and returns a tensor of the "
        "shape of x, and name that"
    )


def _stated(names: tuple[str, ...], builder: Builder, layer: nn.Module) -> int | None:
    """The first whole number under one of the names: of an argument, else of an attribute."""
    values = chain(map(builder.kwargs.get, names), (getattr(layer, name, None) for name in names))
    return next((value for value in values if isinstance(value, int)), None)


def _first_width(layer: nn.Module) -> int | None:
    """The input width of the first linear layer or convolution."""
    for module in layer.modules():
        if isinstance(module, nn.Linear):
            return module.in_features
        if isinstance(module, nn.Conv1d | nn.Conv2d):
            return module.in_channels
    return None
