"""Untrusted files: only regular ones are opened, and invalid JSON is an error in one line."""

import json
import math
import re
from pathlib import Path
from typing import Any, NoReturn

from tokenmix.errors import UserError
from tokenmix.files import read_bytes
from tokenmix.lab.data.fetch import log

NAMED = 10


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
