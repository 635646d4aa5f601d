"""Trust: only text that a user typed may name code, a model of timm's hub or folders, or a URL.

A command's words are typed. So is the text that a Python caller passes to a public function. Text from a file never
is: a run folder, a recipe, a comparison or a hub's config may be a stranger's. `check_typed` refuses by default, and
an entry point records the typed text with `typed`.
"""

import dataclasses
import functools
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

from tokenmix.errors import UserError

P = ParamSpec("P")
R = TypeVar("R")

_typed: ContextVar[frozenset[str] | None] = ContextVar("typed", default=None)


class FromFile(str):
    """Text of a file. A config that is copied, changed or pickled keeps the class of its values."""

    __slots__ = ()


def from_file(value: Any) -> Any:
    """The value of a JSON or TOML file with every text in it as `FromFile`."""
    if isinstance(value, str):
        return FromFile(value)
    if isinstance(value, dict):
        return {key: from_file(item) for key, item in value.items()}
    return [from_file(item) for item in value] if isinstance(value, list) else value


def typed_words() -> frozenset[str] | None:
    """The text that is trusted here; None outside of an entry point, where nothing is."""
    return _typed.get()


@contextmanager
def only_typed(words: frozenset[str] | None) -> Iterator[None]:
    """Trust exactly these words in the block: a command's, or those that another process passed on."""
    before = _typed.set(words)
    try:
        yield
    finally:
        _typed.reset(before)


@contextmanager
def typed(*values: object) -> Iterator[None]:
    """Trust the text in these values in the block. An outer entry point wins: what it was given decides."""
    words = _typed.get()
    if words is None:
        words = frozenset(text for text in texts_in(values) if not isinstance(text, FromFile))
    with only_typed(words):
        yield


def from_caller(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator of a public function: the text in its arguments is typed, unless an entry point called it."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with typed(args, kwargs):
            return function(*args, **kwargs)

    return call


def texts_in(value: object) -> Iterator[str]:
    """All text in a value, a list, a table, a config, and what is in those."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from texts_in(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for item in value:
            yield from texts_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from texts_in(vars(value))


def is_typed(text: str) -> bool:
    """Whether the text is typed: a word, or what separators enclose in one, as in mixer=my:Class or a,b."""
    words = _typed.get() or frozenset()
    whole = re.compile(rf"(?:^|(?<=[=,:\s'\"(\[{{])){re.escape(text)}(?=$|[,#\s'\")\]}}])")
    return text in words or any(whole.search(word) for word in words)


def check_typed(text: str, what: str, done: str, remedy: str = "give it as a word of your command") -> None:
    """`UserError` unless the text is typed. Every use of text as code or as a place on the network asks here first.

    `text` names `what`, which is not `done`; `remedy` is how a user who trusts the file continues.
    """
    if not is_typed(text):
        raise UserError(f"a file names {what}, {text}, which is not {done} for its sake; if you trust it, {remedy}")


_starting = threading.RLock()


@contextmanager
def safe_children() -> Iterator[None]:
    """Interpreters that start in the block do not search the current folder, as with `python -P`.

    Without it, a file pickle.py in a folder of data would be imported by each of them.
    """
    name = "PYTHONSAFEPATH"
    with _starting:
        before = os.environ.get(name)
        os.environ[name] = "1"
        try:
            yield
        finally:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before
