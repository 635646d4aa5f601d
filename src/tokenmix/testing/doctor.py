"""`tokenmix doctor module:Class`: run the property checks on a user's layer, with output for people and programs."""

import contextlib
import inspect
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Literal

import torch
from torch import Tensor, nn

from tokenmix.errors import UserError, as_user_error, one_line, unknown_name
from tokenmix.files import Values, to_json
from tokenmix.layers.base import near_square
from tokenmix.layers.table import MIXERS
from tokenmix.ops.checks import check_whole
from tokenmix.registry import Arguments, import_object
from tokenmix.testing.harness import (
    TOKEN_COUNTS,
    Advice,
    Build,
    Builder,
    NotApplicable,
    NotFinite,
    OfItself,
    PropertyFailure,
    fresh,
    noise,
)
from tokenmix.testing.properties import PROPERTIES
from tokenmix.trust import from_caller

Status = Literal["pass", "FAIL", "advice", "skipped"]
COLOURS = {"pass": "green", "FAIL": "bold red", "advice": "yellow", "skipped": "dim"}


@dataclass(frozen=True)
class Verdict:
    """Outcome of one property: requirement, observation, and a failure's observed or usual cause."""

    property: str
    status: Status
    about: str
    detail: str
    cause: str

    def explanation(self) -> str:
        if self.status in ("FAIL", "advice"):
            usual = self.cause == PROPERTIES[self.property].cause
            return f"{self.detail}. {'Usual cause' if usual else 'Cause'}: {self.cause}."
        return self.detail if self.status == "skipped" else self.about


@dataclass(frozen=True)
class Report:
    """All verdicts on one layer, its construction and input, and notes on missing features."""

    target: str
    layer: str
    input: tuple[int, ...]
    verdicts: tuple[Verdict, ...]
    notes: tuple[str, ...] = ()

    def named(self, status: Status) -> list[str]:
        return [verdict.property for verdict in self.verdicts if verdict.status == status]

    @property
    def failed(self) -> list[str]:
        """Names of failed properties."""
        return self.named("FAIL")

    @property
    def advised(self) -> list[str]:
        """Names of optional properties that the layer lacks."""
        return self.named("advice")

    def to_json(self) -> str:
        return to_json(asdict(self) | {"failed": self.failed, "advised": self.advised})

    def print(self) -> None:
        from rich import box
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        console = Console()
        title = escape(f"{self.target}: {self.layer} on input {self.input}")
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
        table.add_column("property", no_wrap=True)
        table.add_column("")
        table.add_column("what was seen", overflow="fold")
        for verdict in self.verdicts:
            colour = COLOURS[verdict.status]
            table.add_row(verdict.property, f"[{colour}]{verdict.status}[/]", escape(verdict.explanation()))
        console.print(table)
        counts = f"{len(self.named('pass'))} passed, {len(self.failed)} failed, {len(self.named('skipped'))} skipped"
        console.print(f"{counts}{': ' + ', '.join(self.failed) if self.failed else ''}", highlight=False)
        if self.advised:
            console.print(f"advice, which does not count as a failure: {', '.join(self.advised)}", highlight=False)
        for note in self.notes:
            console.print(escape(note), highlight=False)


def examine(build: Build, x: Tensor, only: Collection[str] | None = None) -> Iterator[Verdict]:
    """Run all or the named properties on layers of `build`; an exception of the layer is a failure."""
    for unknown in sorted(set(only or ()) - set(PROPERTIES)):
        raise unknown_name("property", unknown, PROPERTIES)
    broken = ""
    for name, row in PROPERTIES.items():
        if only is not None and name not in only:
            continue
        status: Status = "pass"
        detail, cause = "", row.cause
        try:
            if broken:
                raise NotApplicable(broken)
            row.check(build, x)
        except NotApplicable as reason:
            status, detail = "skipped", str(reason)
        except PropertyFailure as failure:
            status = "advice" if isinstance(failure, Advice) else "FAIL"
            detail, cause = str(failure), failure.cause or row.cause
            broken = "is not measured, as the output is not finite" if isinstance(failure, NotFinite) else ""
        except Exception as error:
            status, detail = "FAIL", one_line(error)
        yield Verdict(name, status, row.about, detail.rstrip("."), cause)


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
    """Print the report; return 1 if a property fails, else 0, also with advice."""
    # Keep output of the layer or the compiler out of the report.
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
    **kwargs: object,
) -> Report:
    """Run every applicable property check on a user's layer.

    Args:
        target: `module:Class` of an nn.Module with forward(x) or forward(x, mask), or `module:function` that builds
            one, also in the current folder; or a name of `tokenmix.list_mixers()`. Attention over queries, keys and
            values receives x for each.
        dim: width D of the layer (default 32).
        num_tokens: number of tokens N of the example (default 16); also passed to a constructor that requires it.
        only: names of properties, see `tokenmix.testing.PROPERTIES` (default: all).
        **kwargs: further arguments of the constructor.

    Raises:
        UserError: the target cannot be imported, built or run.
    """
    check_whole(**{name: value for name, value in (("dim", dim), ("num_tokens", num_tokens)) if value is not None})
    spec = MIXERS.get(target)
    if spec is None and ":" not in target:
        raise UserError(f"{unknown_name('mixer', target, MIXERS)}; a layer of yours is module:Class")
    make, fixed = (import_object(target), {}) if spec is None else (spec.layer, spec.fixed)
    builder = Builder(make, _arguments(target, make, dim, num_tokens, {**fixed, **kwargs}))
    try:
        remedy = "try another --dim or --num-tokens, or name a function without arguments that builds it"
        with as_user_error(f"{target}({_shown(builder)}) fails with ", f"; {remedy}"):
            layer = fresh(builder)
        if not isinstance(layer, nn.Module):
            raise UserError(
                f"{target} gives a {type(layer).__name__}, not a torch.nn.Module; name a class of layers, or a "
                "function that builds one"
            )
        x = _example(target, builder, layer, dim, num_tokens)
        verdicts = tuple(examine(builder, x, only))
    except SystemExit as stop:
        raise UserError(f"{target} calls sys.exit({stop.code!r}) when it is built or run; remove that call") from stop
    built, notes = (layer.inner, [f"called as {layer.call_text()}"]) if isinstance(layer, OfItself) else (layer, [])
    if not hasattr(layer, "capabilities"):
        notes.append(
            "to train, compare or swap in this layer by its name, derive it from tokenmix.layers.Mixer and state its "
            "capabilities (help(tokenmix.layers.Capabilities))"
        )
    return Report(target, f"{type(built).__name__}({_shown(builder)})", tuple(x.shape), verdicts, tuple(notes))


def _arguments(
    target: str, make: Callable[..., object], dim: int | None, num_tokens: int | None, given: Arguments
) -> Values:
    try:
        parameters = inspect.signature(make).parameters
    except (TypeError, ValueError) as error:
        raise UserError(f"{target} has no signature that Python can read; give a function that builds it") from error
    chosen: Values = {}
    for name, parameter in parameters.items():
        starred = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        required = parameter.default is parameter.empty and not starred
        if name in WIDTHS:
            value = dim or (DEFAULT_DIM if required else None)
        elif name in TOKEN_COUNTS:
            value = num_tokens or (DEFAULT_TOKENS if required else None)
        else:
            value = True if name == "batch_first" else 4 if name in HEADS and required else None
        if value is not None:
            chosen[name] = value
        elif required and name not in given:
            raise UserError(
                f"{target} needs the argument {name!r}, which the doctor cannot guess; write a function without "
                f"arguments that builds the layer, and name it: {target.partition(':')[0]}:that_function"
            )
    return {**chosen, **given}


def _shown(builder: Builder) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in builder.kwargs.items())


def _example(target: str, builder: Builder, layer: nn.Module, dim: int | None, num_tokens: int | None) -> Tensor:
    """Input in the layout that the layer declares, or else the first layout whose shape the layer preserves."""
    first = next((m for m in layer.modules() if isinstance(m, nn.Linear | nn.Conv1d | nn.Conv2d)), None)
    known = _stated(WIDTHS, builder, layer) or getattr(first, "in_features", getattr(first, "in_channels", DEFAULT_DIM))
    width = dim or known
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
    """The first integer argument, or else attribute, with one of the names."""
    values = chain(map(builder.kwargs.get, names), (getattr(layer, name, None) for name in names))
    return next((value for value in values if isinstance(value, int)), None)
