"""A mistake on the command line as one line: what is wrong, the value, the nearest right name.

tyro reports a failure as an event that carries the data, but in a private module, which may change in any release:
tested with tyro 1.0.17. Where it is missing, tyro prints its own message; the exit code is 2 either way.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tokenmix.errors import UserError

try:
    from tyro import _errors as events
except ImportError:
    events = None


@contextmanager
def one_line_errors(known: Sequence[str], unknown: Callable[[str, Sequence[str]], UserError]) -> Iterator[None]:
    """Raise `UserError` for what tyro refuses in the block.

    Args:
        known: options that can be given, as typed, for example `--lr`; or verbs.
        unknown: makes the error for a word that is none of them.
    """
    if events is None or not hasattr(events, "on_parse_error"):
        yield
        return

    def refuse(event: Any) -> None:
        error = _error(event, known, unknown)
        if error is not None:
            raise error from None

    with events.on_parse_error(refuse):
        yield


def _error(event: Any, known: Sequence[str], unknown: Callable[[str, Sequence[str]], UserError]) -> UserError | None:
    """The error for an event; None leaves one of an unknown kind to tyro."""
    assert events is not None
    if isinstance(event, events.UnrecognizedArgs):
        word = next((token for token in event.tokens if token.startswith("-")), event.tokens[0])
        return unknown(word.partition("=")[0].replace("_", "-"), known)
    if isinstance(event, events.InstantiationFailure):
        if event.argument is None:
            return UserError(event.message)
        # Of an option with several types each has its reason, in a line of its own; the last is that of the value.
        reason = re.split(r"'>: |\)\]: ", event.message.splitlines()[-1])[-1]
        reason = re.sub(r".*: \['(.*)'\] does not match choices .*", r"got '\1'", reason)
        return UserError(f"{_name(event.argument)} takes {event.argument.lowered.metavar}: {reason}")
    if isinstance(event, events.InvalidChoice):
        return UserError(f"{_name(event.argument)} cannot be {event.value!r}; give one of {', '.join(event.choices)}")
    if isinstance(event, events.BadValue):
        return UserError(f"{_name(event.argument)} takes {event.argument.lowered.metavar}; give a value")
    if isinstance(event, events.MissingArgs):
        missing = ", ".join(_name(one.arg) for one in event.missing_arguments)
        return UserError(f"{event.prog} needs {missing}; see {event.prog} --help")
    if isinstance(event, events.MissingSubcommand):
        word = event.found_token
        return UserError(f"give a verb: {', '.join(known)}") if word is None else unknown(word, known)
    return None


def _name(argument: Any) -> str:
    shown = argument.is_positional() and argument.lowered.choices is None
    return str(argument.lowered.metavar if shown else argument.display_name())
