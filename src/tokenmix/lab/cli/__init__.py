"""The `tokenmix` command: verbs only; each is a few lines over the library.

Heavy modules are imported inside the verbs, so that `tokenmix --help` is immediate; what reads the command line is
imported by `main`, so that an installation without it says so in one line.
"""

import errno
import importlib
import os
import sys
from collections.abc import Sequence

from tokenmix.errors import MissingExtra, needs


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    try:
        with needs("the tokenmix command"):
            from tokenmix.lab.cli.command import run_command
        return run_command(argv)
    except MissingExtra as error:
        print(f"tokenmix: {error}", file=sys.stderr)
    except Exception as error:
        # An import, a library or a loader process can meet this limit, each in words of its own.
        if not any(words in str(error) for words in (os.strerror(errno.EMFILE), "ancdata")):
            raise
        print("tokenmix: too many open files for the limit of this shell; raise it: ulimit -n 1024", file=sys.stderr)
    return 2


def __getattr__(name: str) -> object:
    if name in ("VERBS", "parse"):
        return getattr(importlib.import_module("tokenmix.lab.cli.command"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
