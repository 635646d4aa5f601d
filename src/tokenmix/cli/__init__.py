"""The `tokenmix` command: verbs only; each is a few lines over the library.

Heavy modules are imported inside the verbs, so that `tokenmix --help` is immediate; what reads the command line is
imported by `main`, so that an installation without it says so in one line.
"""

import importlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tokenmix.errors import MissingExtra, needs

if TYPE_CHECKING:
    from tokenmix.cli.command import VERBS, parse

__all__ = ["VERBS", "main", "parse"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    try:
        with needs("the tokenmix command"):
            from tokenmix.cli.command import run_command
    except MissingExtra as error:
        print(f"tokenmix: {error}", file=sys.stderr)
        return 2
    return run_command(argv)


def __getattr__(name: str) -> Any:
    if name in ("VERBS", "parse"):
        return getattr(importlib.import_module("tokenmix.cli.command"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
