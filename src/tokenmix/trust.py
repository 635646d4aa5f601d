"""Trust: only text typed by the user may name code, a model of timm's hub or folders, or a URL.

Words of a command are typed, and so are arguments of a public function. Text from a file is never typed, because a run
folder, a recipe, a comparison or a hub's config may be untrusted. `check_typed` refuses by default; an entry point
records typed text with `typed`.

A file may also describe a model of another library, whose fields can name a source. `sealed` builds such a model.
"""

import dataclasses
import functools
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from tokenmix.errors import UserError

P = ParamSpec("P")
R = TypeVar("R")
V = TypeVar("V")

_typed: ContextVar[frozenset[str] | None] = ContextVar("typed", default=None)


class FromFile(str):
    """Text from a file. Copies, changes and pickles of a config keep the class of its values."""

    __slots__ = ()


def from_file(value: Any) -> Any:
    """Turn all text in a value from JSON or TOML into `FromFile`."""
    if isinstance(value, str):
        return FromFile(value)
    if isinstance(value, dict):
        return {key: from_file(item) for key, item in value.items()}
    return [from_file(item) for item in value] if isinstance(value, list) else value


def typed_words() -> frozenset[str] | None:
    """The trusted text; None outside an entry point, where nothing is trusted."""
    return _typed.get()


@contextmanager
def held(variable: ContextVar[V], value: V) -> Iterator[None]:
    """Set a context variable in the block."""
    before = variable.set(value)
    try:
        yield
    finally:
        variable.reset(before)


def only_typed(words: frozenset[str] | None) -> AbstractContextManager[None]:
    """Trust exactly these words in the block, from a command or another process."""
    return held(_typed, words)


def typed(*values: object) -> AbstractContextManager[None]:
    """Trust the text in these values in the block. Within an outer entry point, only that entry point's text counts."""
    words = _typed.get()
    if words is None:
        words = frozenset(text for text in texts_in(values) if not isinstance(text, FromFile))
    return only_typed(words)


def from_caller(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator of a public function: text in its arguments is typed, unless an entry point called the function."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with typed(args, kwargs):
            return function(*args, **kwargs)

    return call


def texts_in(value: object) -> Iterator[str]:
    """All text in a value, including nested lists, tables and configs."""
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
    """Whether the text is typed: a word, or a part of a word between separators, as in mixer=my:Class or a,b."""
    words = _typed.get() or frozenset()
    whole = re.compile(rf"(?:^|(?<=[=,:\s'\"(\[{{])){re.escape(text)}(?=$|[,#\s'\")\]}}])")
    return text in words or any(whole.search(word) for word in words)


def check_typed(text: str, what: str, done: str, remedy: str = "give it as a word of your command") -> None:
    """Raise `UserError` unless the text is typed. Call this before using text as code or as a network address.

    The message says that a file names `what` (`text`), which is not `done`; `remedy` tells users who trust the file how
    to continue.
    """
    if not is_typed(text):
        raise UserError(f"a file names {what}, {text}, which is not {done} for its sake; if you trust it, {remedy}")


MODULES = (".py", ".pyc")
SYSTEM = ("/proc/", "/sys/")
EVENTS = {"open": 0, "socket.getaddrinfo": 0, "socket.connect": 1, "builtins.input": 0}
"""Python's events for a source, with the number of the argument that names it. input() asks whether code may run."""

_sealed: ContextVar[tuple[Sequence[str], Sequence[str]] | None] = ContextVar("sealed", default=None)


def sealed(*folders: Path) -> AbstractContextManager[None]:
    """Build a model in the block as a file describes it: `UserError` if that connects, or reads outside `folders`.

    Fields that name a source differ between libraries and their releases. Python reports each connection and each
    opened file of this thread (PEP 578), so no list of fields is needed. Packages may be imported and read.
    """
    _watch()
    packages = [*map(os.path.abspath, sys.path)]
    # Editable packages and compiled modules may be elsewhere.
    paths = (getattr(module, "__dict__", {}).get("__path__", ()) for module in [*sys.modules.values()])
    modules = [*packages, *filter(None, [sys.pycache_prefix]), *{path for each in paths for path in each}]
    # Data next to an own module is the user's, not a package's.
    here = Path.cwd()
    data = [*map(os.path.abspath, folders), *(path for path in packages if not here.is_relative_to(path))]
    return held(_sealed, (modules, data))


def unsealed(code: Callable[..., Any]) -> AbstractContextManager[None]:
    """Let code of the user open what it likes in the block; code of this library stays sealed."""
    return nullcontext() if code.__module__.startswith("tokenmix.") else held(_sealed, None)


@functools.cache
def _watch() -> None:
    sys.addaudithook(_refuse_sources)


def _refuse_sources(event: str, args: tuple[Any, ...]) -> None:
    if event not in EVENTS or (allowed := _sealed.get()) is None:
        return
    source = args[EVENTS[event]]
    if event == "open":
        if isinstance(source, int) or args[2] & (os.O_WRONLY | os.O_RDWR) or not os.path.exists(source):
            return
        source = os.path.abspath(os.fsdecode(source))
        modules, data = allowed
        if any(Path(source).is_relative_to(folder) for folder in (modules if source.endswith(MODULES) else data)):
            return
        # /proc/self/cwd leads out of /proc.
        if os.path.realpath(source).startswith(SYSTEM):
            return
    raise UserError(
        f"the description of a model names a source: building it reads {source}, which is refused; remove its "
        "name, or build the model in a function of yours: --model module:function"
    )


_starting = threading.RLock()


@contextmanager
def safe_children() -> Iterator[None]:
    """Start Python interpreters in the block without the current folder in their path, as with `python -P`.

    Otherwise each of them would import a file such as pickle.py from a data folder.
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
