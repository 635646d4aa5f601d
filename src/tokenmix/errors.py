"""The one error type for a user's mistake.

A `UserError` carries one line: what was given, and what to do about it. The command line prints that line and exits
with code 2; in Python it is an ordinary `ValueError`. Anything else that escapes is a bug of ours and keeps its
traceback.
"""

import difflib
from collections.abc import Iterable

__all__ = ["UserError", "printable", "unknown_name"]


class UserError(ValueError):
    """A mistake of the user's: the offending value and the remedy, in one line."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UserError:
    """The error for a name that is in no table, with the nearest names that are."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(names)}"
    return UserError(f"unknown {kind} {name!r}; {hint}")


def printable(text: str) -> str:
    """The text with control characters, such as a terminal's escape sequences, written as Python's escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
