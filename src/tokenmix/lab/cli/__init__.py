"""The `tokenmix` command: each verb is a few lines over the library.

Verbs import heavy modules themselves, and `main` the parser, so that `tokenmix --help` is immediate.
"""

import errno
import gc
import io
import os
import sys
from collections.abc import Sequence

from tokenmix.errors import MissingExtra, needs


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code."""
    # Names from data may hold characters that the terminal's encoding lacks.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not stream.closed and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
    # Imports make half a million objects that stay. By the default threshold, looking for garbage among them takes a
    # fifth of the start.
    before = gc.get_threshold()
    gc.set_threshold(10_000)
    try:
        with needs("the tokenmix command"):
            from tokenmix.lab.cli.command import run_command
        return run_command(argv)
    except MissingExtra as error:
        print(f"tokenmix: {error}", file=sys.stderr)
    except Exception as error:
        # Imports, libraries and loader processes meet this limit, each with its own message.
        if not any(words in str(error) for words in (os.strerror(errno.EMFILE), "ancdata")):
            raise
        print("tokenmix: too many open files for the limit of this shell; raise it: ulimit -n 1024", file=sys.stderr)
    finally:
        gc.set_threshold(*before)
    return 2
