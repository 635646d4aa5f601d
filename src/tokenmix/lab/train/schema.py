"""Configs as nested frozen dataclasses: construction checks each value against its annotation.

The command line, recipes, saved runs and Python share these checks. Names of leaves are unique within a document.
"""

import ast
import dataclasses
import functools
import math
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, Union, get_args, get_origin, get_type_hints

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from tokenmix.errors import UserError, unknown_name
from tokenmix.files import Values, user_path

T = TypeVar("T")
WORDS: dict[type, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    Path: "a path",
    dict: "a table",
    list: "a list",
}


FREE = {"free": True}
"""Field metadata: where, how fast or how often the run works, not its result. Resumed runs may change the field."""
RESUMABLE = {**FREE, "resumable": True}
"""Field metadata: as `FREE`; the field may also be given with --resume."""


@dataclass(frozen=True, kw_only=True)
class Range:
    """Annotation: the range of a number, or of each number in a list."""

    least: float = -math.inf
    above: float = -math.inf
    most: float = math.inf
    below: float = math.inf

    def __contains__(self, value: float) -> bool:
        return self.least <= value <= self.most and self.above < value < self.below

    def __str__(self) -> str:
        low = f"[{self.least:g}" if self.least > -math.inf else f"({self.above:g}" if self.above > -math.inf else ""
        high = f"{self.most:g}]" if self.most < math.inf else f"{self.below:g})" if self.below < math.inf else ""
        if low and high:
            return f"in {low}, {high}"
        if self.above > -math.inf:
            return "a positive number" if self.above == 0 else f"more than {self.above:g}"
        return f"at least {self.least:g}" if low else f"at most {high[:-1]}"


@dataclass(frozen=True, kw_only=True)
class Section:
    """A section of a config. Fields are int, float, str, bool, Path, dict, Literal or tuple, each also `| None`."""

    def __post_init__(self) -> None:
        for name, hint in _hints(type(self)).items():
            object.__setattr__(self, name, fitted(hint, getattr(self, name), name))


@functools.cache
def _hints(kind: type) -> Values:
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def fitted(hint: Any, value: Any, name: str) -> Any:
    """The value converted to the annotation: int to float, one value to a tuple of one, "none" to None."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        value = fitted(args[0], value, name)
        numbers = value if isinstance(value, tuple) else () if value is None else (value,)
        or_none = ", or none;" if type(None) in get_args(args[0]) else ","
        for allowed in (note for note in args[1:] if isinstance(note, Range)):
            for number in numbers:
                if number not in allowed:
                    raise UserError(f"{name} must be {allowed}{or_none} got {number}")
        return value
    if origin in (Union, types.UnionType):
        other = next(arg for arg in args if arg is not type(None))
        # TOML has no null.
        return None if value is None or value == "none" else fitted(other, value, name)
    if origin is Literal:
        if value not in args:
            raise UserError(f"{name}={value!r} is not valid; give one of {', '.join(map(str, args))}")
        return value
    if origin is tuple:
        items = value if isinstance(value, tuple | list) else (value,)
        return tuple(fitted(args[0], item, name) for item in items)
    if hint is Any:
        return value
    wanted: type = origin or hint
    number = isinstance(value, int) and not isinstance(value, bool)
    if wanted is float and number and abs(value) < 2**1023:
        return float(value)
    if wanted is Path and isinstance(value, str | Path):
        return user_path(value)
    if not isinstance(value, wanted) or (wanted is int and not number):
        raise UserError(f"{name}={value!r} must be {WORDS.get(wanted, wanted.__name__)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{name} must be a finite number, got {value}")
    if origin is list:
        return [fitted(args[0], item, name) for item in value]
    if origin is dict:
        return {key: fitted(args[1], item, f"{name}.{key}") for key, item in value.items()}
    return value


@dataclass(frozen=True, kw_only=True)
class BaseConfig:
    """A config of several sections."""

    def __post_init__(self) -> None:
        for name, hint in _hints(type(self)).items():
            value = getattr(self, name)
            kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
            part = Section if kind is Any else kind if isinstance(kind, type) and issubclass(kind, Section) else None
            if part is None:
                object.__setattr__(self, name, fitted(hint, value, name))
            elif not isinstance(value, part):
                raise UserError(
                    f"{name}={value!r} is not a {part.__name__}, the part of {type(self).__name__} by this name; "
                    f"give {type(self).__name__}().replace({name}={value!r}) for options by their names"
                )

    def flat(self) -> Values:
        leaves: Values = {}
        for name, value in vars(self).items():
            leaves |= vars(value) if isinstance(value, Section) else {name: value}
        return leaves

    def marked(self, mark: str) -> set[str]:
        """Names of leaves with this mark in their metadata."""
        parts = (part for part in vars(self).values() if isinstance(part, Section))
        return {field.name for part in parts for field in dataclasses.fields(part) if mark in field.metadata}

    def replace(self, **values: object) -> Self:
        """A copy with other values, given by leaf, or as a table by part."""
        # Collect leaves from leaves and tables of leaves.
        given: Values = {}
        for name, value in values.items():
            part = getattr(self, name, None)
            table = isinstance(part, Section) and isinstance(value, Mapping)
            known = vars(part) if table else self.flat()
            leaves = dict(value) if table else {name: value}
            for key in leaves:
                if key not in known:
                    raise self.unknown_option(key, known)
            given |= leaves
        parts = {}
        for name, part in vars(self).items():
            if isinstance(part, Section):
                own = {key: given.pop(key) for key in vars(part) if key in given}
                parts[name] = dataclasses.replace(part, **own) if own else part
        return dataclasses.replace(self, **parts, **given)

    def unknown_option(self, name: str, known: Iterable[str]) -> UserError:
        """The error for an unknown option, with the nearest options."""
        return unknown_name("option", name, known)


def check_digits(value: object, name: str) -> None:
    """`UserError` if a value has a whole number of more digits than Python writes, as in hexadecimal."""
    if isinstance(value, int) and value.bit_length() > 4096:
        raise UserError(f"{name} has a whole number of more than 1,000 digits; give a smaller one")
    inner = (*value, *value.values()) if isinstance(value, Mapping) else value
    for one in inner if isinstance(inner, list | tuple | set) else ():
        check_digits(one, name)


def _pairs(args: list[str]) -> Values:
    bare = [arg for arg in args if "=" not in arg]
    if bare:
        raise ValueError(f"{bare[0]!r} is not of the form name=value; give NAME=VALUE")
    pairs: Values = {}
    for key, _, text in (arg.partition("=") for arg in args):
        try:
            pairs[key] = ast.literal_eval(text)
        except (ValueError, SyntaxError, TypeError, ArithmeticError, MemoryError, RecursionError):
            pairs[key] = text
        check_digits(pairs[key], key)
    return pairs


def option(
    metavar: str,
    kinds: type | tuple[type, ...],
    parse: Callable[[list[str]], T],
    shown: Callable[[T], str | list[str]] = str,
    nargs: Literal[1, "*"] = 1,
) -> PrimitiveConstructorSpec[T]:
    """How tyro parses an option of `kinds`, and shows its default."""
    return PrimitiveConstructorSpec(
        nargs=nargs,
        metavar=metavar,
        instance_from_str=parse,
        is_instance=lambda value: isinstance(value, kinds),
        str_from_instance=lambda value: [text] if isinstance(text := shown(value), str) else text,
    )


def named(metavar: str) -> PrimitiveConstructorSpec[str]:
    """Text, with this name in the help."""
    return option(metavar, str, lambda args: args[0])


def joined(values: Iterable[object]) -> str:
    """Values as typed for a list option."""
    return ",".join(map(str, values))


def _list(metavar: str, convert: Callable[[str], T], wanted: str) -> PrimitiveConstructorSpec[tuple[T, ...]]:
    def parse(args: list[str]) -> tuple[T, ...]:
        values = []
        for word in filter(None, map(str.strip, args[0].split(","))):
            try:
                values.append(convert(word))
            except ValueError:
                raise ValueError(f"{word!r} is not {wanted}; separate values by commas") from None
        return tuple(values)

    return option(metavar, tuple, parse, joined)


Pairs = Annotated[
    Values,
    option("NAME=VALUE ...", dict, _pairs, lambda pairs: [f"{key}={value}" for key, value in pairs.items()], "*"),
    tyro.conf.arg(help_behavior_hint=lambda default: f"(default: {default or 'none'})"),
]
Folders = Annotated[
    tuple[Path, ...] | None,
    option(
        "FOLDER ...",
        (tuple, types.NoneType),
        lambda args: None if args == ["none"] else tuple(map(user_path, args)),
        lambda folders: ["none"] if folders is None else list(map(str, folders)),
        "*",
    ),
]
Needed = Annotated[
    str, tyro.conf.arg(help_behavior_hint=lambda default: "(required)" if default == "''" else f"(default: {default})")
]
"""Text that is required unless it has a default."""
_NONE = tyro.conf.arg(help_behavior_hint=lambda shown: "(default: none)" if shown == "''" else f"(default: {shown})")
Names = Annotated[tuple[str, ...], _list("A,B,C", str, "a name"), _NONE]
Jobs = Annotated[
    int | None,
    option(
        "N|auto",
        (int, types.NoneType),
        lambda args: None if args[0] == "auto" else int(args[0]),
        lambda jobs: "auto" if jobs is None else str(jobs),
    ),
]
Numbers = Annotated[tuple[int, ...], _list("1,2,3", int, "a whole number")]
Axis = Annotated[tuple[int, ...], _list("A,B,C", int, "a whole number"), _NONE]
"""Whole numbers, none by default; each has its own comparison."""
Factors = Annotated[tuple[float, ...], _list("0.5,1,2", float, "a number")]
