"""Types of options whose values are several on a command line: pairs, and lists separated by commas."""

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from tokenmix.files import user_path


def _value(text: str) -> Any:
    """A Python literal where it is one, else the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _pairs(args: list[str]) -> dict[str, Any]:
    bare = [arg for arg in args if "=" not in arg]
    if bare:
        raise ValueError(f"{bare[0]!r} is not of the form name=value; give NAME=VALUE")
    return {key: _value(text) for key, _, text in (arg.partition("=") for arg in args)}


def _list(metavar: str, convert: Callable[[str], Any], wanted: str) -> Any:
    def parse(args: list[str]) -> tuple[Any, ...]:
        values = []
        for word in filter(None, map(str.strip, args[0].split(","))):
            try:
                values.append(convert(word))
            except ValueError:
                raise ValueError(f"{word!r} is not {wanted}; separate values by commas") from None
        return tuple(values)

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=parse,
        is_instance=lambda x: isinstance(x, tuple),
        str_from_instance=lambda x: [",".join(map(str, x))],
    )


Pairs = Annotated[
    dict[str, Any],
    PrimitiveConstructorSpec(
        nargs="*",
        metavar="NAME=VALUE ...",
        instance_from_str=_pairs,
        is_instance=lambda x: isinstance(x, dict),
        str_from_instance=lambda x: [f"{k}={v}" for k, v in x.items()],
    ),
    tyro.conf.arg(help_behavior_hint=lambda default: f"(default: {default or 'none'})"),
]
Folders = Annotated[
    tuple[Path, ...] | None,
    PrimitiveConstructorSpec(
        nargs="*",
        metavar="FOLDER ...",
        instance_from_str=lambda args: None if args == ["none"] else tuple(map(user_path, args)),
        is_instance=lambda x: x is None or isinstance(x, tuple),
        str_from_instance=lambda x: ["none"] if x is None else list(map(str, x)),
    ),
]
Needed = Annotated[
    str, tyro.conf.arg(help_behavior_hint=lambda default: "(required)" if default == "''" else f"(default: {default})")
]
"""Text that is required where it has no default."""
Names = Annotated[
    tuple[str, ...],
    _list("A,B,C", str, "a name"),
    tyro.conf.arg(help_behavior_hint=lambda default: "(default: none)" if default == "''" else f"(default: {default})"),
]
Jobs = Annotated[
    int | None,
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="N|auto",
        instance_from_str=lambda args: None if args[0] == "auto" else int(args[0]),
        is_instance=lambda x: x is None or isinstance(x, int),
        str_from_instance=lambda x: ["auto" if x is None else str(x)],
    ),
]
Numbers = Annotated[tuple[int, ...], _list("1,2,3", int, "a whole number")]
Axis = Annotated[
    tuple[int, ...],
    _list("A,B,C", int, "a whole number"),
    tyro.conf.arg(help_behavior_hint=lambda default: "(default: none)" if default == "''" else f"(default: {default})"),
]
"""Whole numbers, none by default, of which each has a comparison of its own."""
Factors = Annotated[tuple[float, ...], _list("0.5,1,2", float, "a number")]
