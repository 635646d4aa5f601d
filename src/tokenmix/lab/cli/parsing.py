"""Command-line parsing with tyro: dataclass to options, options of one task, options of a saved run."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from tokenmix.errors import unknown_name
from tokenmix.files import user_path
from tokenmix.lab.cli.errors import one_line_errors
from tokenmix.lab.cli.examples import EXAMPLES
from tokenmix.lab.train.schema import Document

T = TypeVar("T")
STYLE = (tyro.conf.OmitArgPrefixes,)
WORDS = ConstructorRegistry()
UNKNOWN_OPTION = functools.partial(unknown_name, "option")


@WORDS.primitive_rule
def _none(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[None] | None:
    """none, as in recipes, and None, as in Python."""
    if info.type is not type(None):
        return None

    def parse(args: list[str]) -> None:
        if args[0].lower() != "none":
            raise ValueError(f"{args[0]!r} is not none")

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="none",
        instance_from_str=parse,
        is_instance=lambda x: x is None,
        str_from_instance=lambda x: ["none"],
    )


@WORDS.primitive_rule
def _path(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Path] | None:
    """A path with `~` expanded."""
    if info.type is not Path:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="PATH",
        instance_from_str=lambda args: user_path(args[0]),
        is_instance=lambda x: isinstance(x, Path),
        str_from_instance=lambda x: [str(x)],
    )


def parse_into(kind: type[T], prog: str, args: Sequence[str], default: T | None = None, about: str = "") -> T:
    """An instance of the dataclass from the words after its verb; options that are not given are those of `default`.

    Raises:
        UserError: with one line, for a mistake.
    """
    given: dict[str, Any] = {} if default is None else {"default": default}
    unknown = default.unknown_option if isinstance(default, Document) else UNKNOWN_OPTION
    with one_line_errors(_options(kind if default is None else default), unknown, args):
        return tyro.cli(
            kind,
            prog=prog,
            description=_described(prog, about or kind.__doc__ or ""),
            args=list(args),
            config=STYLE,
            registry=WORDS,
            **given,
        )


def _described(prog: str, about: str) -> str:
    """What a verb does, and its examples."""
    examples = "\n".join(f"  {line}" for line in EXAMPLES.get(prog.removeprefix("tokenmix "), ()))
    return f"{about}\n\nExamples:\n{examples}" if examples else about


def parse_known(kind: type[T], prog: str, args: Sequence[str]) -> T:
    """The same from only those words that the dataclass has options for."""
    with one_line_errors(_options(kind), UNKNOWN_OPTION, args):
        return tyro.cli(
            kind, prog=prog, args=list(args), config=STYLE, registry=WORDS, return_unknown_args=True, add_help=False
        )[0]


def parse_verb(verbs: Mapping[str, Any], argv: Sequence[str], about: str) -> Any:
    """Help for all verbs, or the error for an unknown one."""
    with one_line_errors(list(verbs), functools.partial(unknown_name, "verb")):
        return tyro.extras.subcommand_cli_from_dict(
            dict(verbs), prog="tokenmix", description=about, args=list(argv), config=STYLE, registry=WORDS
        )


def _options(kind: Any) -> list[str]:
    """The options of a dataclass, or of an instance and its parts, as they are typed."""
    found = []
    for field in dataclasses.fields(kind):
        value = None if isinstance(kind, type) else getattr(kind, field.name)
        if dataclasses.is_dataclass(value):
            found += _options(value)
        else:
            found.append(f"--{field.name.replace('_', '-')}")
    return found
