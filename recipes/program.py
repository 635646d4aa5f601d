"""A recipe as a program: exit codes that run_all understands, and no traceback for Ctrl-C or a user's mistake."""

import sys
from collections.abc import Callable
from typing import NoReturn, TypeVar

import tyro

from tokenmix.errors import UserError

Args = TypeVar("Args")

STOPPED = 3
"""Exit code of a job that has to go on another time."""


def run_program(main: Callable[[Args], bool | None], args: type[Args]) -> NoReturn:
    """Run `main` with the arguments of the command line; it returns False if it has to go on another time."""
    try:
        complete = main(tyro.cli(args))
    except KeyboardInterrupt as stop:
        print(str(stop) or "interrupted; the same command goes on", file=sys.stderr)
        sys.exit(130)
    except UserError as error:
        sys.exit(f"tokenmix: {error}")
    sys.exit(STOPPED if complete is False else 0)
