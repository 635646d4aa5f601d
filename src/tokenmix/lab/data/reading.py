"""Untrusted files: regular ones, JSON, lists of names, many files of which some are broken, and what is left out."""

import json
import math
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from tokenmix.errors import MissingExtra, UserError
from tokenmix.files import read_bytes
from tokenmix.lab.data.fetch import log

NAMED = 10
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Skipped:
    """A file that was left out, and why."""

    path: str
    reason: str


def log_skipped(skipped: Sequence[Skipped], where: str = "", unit: str = "file") -> None:
    """Count on stderr what was left out, and name the first three."""
    if skipped:
        first = "; ".join(f"{s.path} {s.reason}" for s in skipped[:3])
        more = "; …" * (len(skipped) > 3)
        log(f"{len(skipped)} {unit}{'s' * (len(skipped) > 1)}{where} left out: {first}{more}")


def read_each(
    items: Sequence[T], read: Callable[[T], R], path: Callable[[T], str], label: str, threads: int | None = 1
) -> tuple[list[tuple[T, R]], list[Skipped]]:
    """The items that `read` can read, with what it returns, and the others; with a bar on a terminal if there are many.

    Args:
        items: what is read.
        read: raises `UserError` or `UnreadableImage` for an item that is to be left out.
        path: of an item, which `Skipped` names.
        label: of the bar.
        threads: how many read at a time; as many as there are cores for None.
    """
    from rich.console import Console
    from rich.progress import track

    def attempt(item: T) -> tuple[T, R] | Skipped:
        try:
            return item, read(item)
        except MissingExtra:
            raise
        except (UserError, UnreadableImage) as reason:
            return Skipped(path(item), str(reason).removeprefix(path(item)).lstrip(": "))

    console = Console(stderr=True)
    quiet = not console.is_terminal or len(items) < 1000
    with ThreadPoolExecutor(threads) as pool:
        found = pool.map(attempt, items)
        both = list(track(found, label, total=len(items), console=console, transient=True, disable=quiet))
    return [one for one in both if not isinstance(one, Skipped)], [one for one in both if isinstance(one, Skipped)]


class UnreadableImage(Exception):
    """Why a file is not a usable image, in a few words."""


class LeftOut:
    """What of a set cannot be read: each counts once, and the first ten are named on stderr."""

    def __init__(self) -> None:
        self._keys: set[Any] = set()

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, key: Any, told: str) -> None:
        """Leave out the one of this key; `told` names it and says why."""
        if key not in self._keys:
            self._keys.add(key)
            if len(self) <= NAMED:
                log(f"left out: {told} ({len(self)} so far)")


def check_file(path: Path) -> Path:
    """The path, if it is a regular file that holds something: a pipe would be waited for, a device never ends."""
    if path.is_dir():
        raise UserError(f"{str(path)!r} is a folder; name the files in it")
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is a pipe or a device, not a file; copy its content into one")
    if not path.exists():
        raise UserError(f"{str(path)!r} does not exist; give the path of a file")
    if path.stat().st_size == 0:
        raise UserError(f"{path} is empty (0 bytes); write it again or leave it out")
    return path


def read_file(path: Path) -> bytes:
    """The content of a file; `UserError` if it is not a regular file, cannot be read, or is empty."""
    try:
        return read_bytes(check_file(path))
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror}); give a readable file") from None


def names_in(path: Path, of: str = "classes") -> list[str]:
    """The lines of a list of names that are not empty.

    Raises:
        UserError: there is no such file, it is no text or empty, or a class comes twice.
    """
    try:
        names = [line.strip() for line in read_file(path).decode("utf-8-sig").splitlines() if line.strip()]
    except ValueError as error:
        reason = error if isinstance(error, UserError) else f"{path} is not UTF-8 ({error})"
        raise UserError(f"{reason}; it lists the {of}, one per line") from None
    if not names:
        raise UserError(f"{path} is empty; it lists the {of}, one per line")
    if of == "classes" and (twice := next((name for name in names if names.count(name) > 1), None)):
        raise UserError(f"{path} names {twice!r} more than once; give each class a name of its own")
    return names


def parse_json(text: str | bytes, where: Path | str) -> Any:
    """The value of a JSON text.

    Raises:
        UserError: it is none, is nested too deep, has a number that is NaN, infinite or of thousands of digits, or half
            of a character.
    """
    try:
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite)
        raw = text if isinstance(text, bytes) else text.encode()
        if re.search(rb"\\u[dD][89a-fA-F]", raw):
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON ({error}); write or fetch it again") from None
    return value


def _finite(word: str) -> float:
    value = float(word)
    return value if math.isfinite(value) else _refuse(word)


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"the number {word[:20]}")
