"""Untrusted files: regular files, JSON, lists of names, and folders with a sub-folder per class.

Links are followed, but each folder and file is taken once, in sorted order.
"""

import hashlib
import heapq
import json
import math
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from tokenmix.errors import MissingExtra, UserError
from tokenmix.files import open_regular, read_bytes
from tokenmix.lab.data.fetch import log

NAMED = 10
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Skipped:
    """A skipped file, and the reason."""

    path: str
    reason: str


def log_skipped(skipped: Sequence[Skipped], where: str = "", unit: str = "file") -> None:
    """Report the number of skipped files on stderr, with the first three."""
    if skipped:
        first = "; ".join(f"{s.path} {s.reason}" for s in skipped[:3])
        more = "; …" * (len(skipped) > 3)
        log(f"{len(skipped)} {unit}{'s' * (len(skipped) > 1)}{where} left out: {first}{more}")


def read_each(
    items: Sequence[T], read: Callable[[T], R], path: Callable[[T], str], label: str, threads: int | None = 1
) -> tuple[list[tuple[T, R]], list[Skipped]]:
    """Items with the results of `read`, and items skipped for its `UserError` or `UnreadableImage`, by `path`."""
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
    """Short reason why a file is not a usable image."""


class LeftOut:
    """Unreadable items of a set: each counts once; stderr names the first ten."""

    def __init__(self) -> None:
        self._keys: set[object] = set()

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, key: object, told: str) -> None:
        """Leave out the item with this key; `told` is its name and the reason."""
        if key not in self._keys:
            self._keys.add(key)
            if len(self) <= NAMED:
                log(f"left out: {told} ({len(self)} so far)")


def check_file(path: Path) -> Path:
    """The path of a non-empty regular file; a pipe would block, and a device never ends."""
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
    """Content of a file; `UserError` if it is not a regular file, is unreadable or empty."""
    try:
        return read_bytes(check_file(path))
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror}); give a readable file") from None


def names_in(path: Path, of: str = "classes") -> list[str]:
    """Non-empty lines of a list of names; `UserError` if there are none, or a class is repeated."""
    try:
        names = [line.strip() for line in read_file(path).decode("utf-8-sig").splitlines() if line.strip()]
    except ValueError as error:
        reason = error if isinstance(error, UserError) else f"{path} is not UTF-8"
        raise UserError(f"{reason}; it lists the {of}, one per line") from None
    if not names:
        raise UserError(f"{path} is empty; it lists the {of}, one per line")
    if of == "classes" and (twice := next((name for name in names if names.count(name) > 1), None)):
        raise UserError(f"{path} names {twice!r} more than once; give each class a name of its own")
    return names


def parse_json(text: str | bytes, where: Path | str) -> Any:
    """Value of a JSON text; `UserError` for no JSON, deep nesting, NaN, infinite or huge numbers, lone surrogates."""
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


Item = tuple[str, int]
"""A file and its class number, as torchvision lists them."""
TEST_SHARE = 0.2
HEAD = 1 << 16
HIDDEN = (".", "__MACOSX", "__pycache__")
"""Beginnings of names that are no classes."""


def class_names(folder: Path, hidden: str | tuple[str, ...] = HIDDEN) -> list[str]:
    """Sub-folders, without names that start with `hidden`."""
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith(hidden))


def labelled_files(
    folder: Path,
    wanted: Callable[[str], bool],
    *,
    of: str,
    layout: str,
    least: int = 2,
    test_names: Sequence[str] = ("test", "val", "valid", "validation"),
    hidden: str | tuple[str, ...] = HIDDEN,
    whole: bool = True,
) -> tuple[list[Item], list[Item], list[str]]:
    """Training files, test files and classes of a folder; `UserError` for another layout.

    The folder has train/ and test/ with a sub-folder per class in each. If it may be `whole`, it can also have the
    class sub-folders themselves, and the list of test files is empty. `wanted` chooses files by path, folders with a
    `hidden` prefix are no classes, and there are at least `least`. `of` (plural) and `layout` name them in messages.
    """
    if not folder.is_dir():
        problem = "is a file" if folder.is_file() else "does not exist"
        raise UserError(f"the folder {str(folder)!r} {problem}; give one with {layout}")
    train, test = folder / "train", next((folder / n for n in test_names if (folder / n).is_dir()), None)
    if not whole and (test is None or not train.is_dir()):
        missing = test_names[0] if train.is_dir() else "train"
        raise UserError(f"{str(folder)!r} has no folder {missing}/; it needs {layout}")
    if not train.is_dir() or (test is None and not class_names(train, hidden)):
        train, test = folder, None
    classes = class_names(train, hidden)
    if not classes and (loose := [p for p in train.rglob("*") if p.is_file() and not p.name.startswith(".")]):
        raise UserError(f"{train} holds {len(loose)} files without labels; it needs {layout}")
    if classes and len(classes) < least:
        inside = train / classes[0]
        deeper = f", or {inside} if its sub-folders are the classes" if class_names(inside, hidden) else ""
        raise UserError(f"{train} has only one class ({classes[0]!r}); give two sub-folders or more{deeper}")
    items = class_files(train, classes, wanted, test) if classes else []
    if not items:
        raise UserError(f"there are no {of} in {folder}; it needs {layout}")
    if test is None:
        return items, [], classes
    if unknown := [name for name in class_names(test, hidden) if name not in classes]:
        raise UserError(f"{test} has the class {unknown[0]!r}, which is missing in {train}; rename or remove it")
    tested = class_files(test, classes, wanted, train)
    if not tested:
        remedy = f"remove it to keep a fifth of the training {of}" if whole else f"{layout} is needed"
        raise UserError(f"there are no {of} in {test}; {remedy}")
    if whole:
        _warn_of_copies(items, tested, of)
    return items, tested, classes


def class_files(
    folder: Path, classes: Sequence[str], wanted: Callable[[str], bool], apart: Path | None = None
) -> list[Item]:
    """The `wanted` files of each class, at any depth, without hidden files and folders.

    Links to a parent folder, to files already taken or into `apart` are left out, with a message on stderr.
    """
    left_out, taken = LeftOut(), set[str]()
    items, linked = list[Item](), list[Item]()
    other = [] if apart is None else [os.path.realpath(apart)]
    roots = [os.path.realpath(folder), *other]

    def is_new(path: str) -> bool:
        real = os.path.realpath(path)
        if any(Path(root).is_relative_to(real) for root in roots):
            left_out.add(path, f"{path}, a link to {real}, which has this folder in it")
        elif real in taken or any(Path(real).is_relative_to(place) for place in other):
            left_out.add(path, f"{path}, another way to {real}")
        else:
            taken.add(real)
            return True
        return False

    # Non-links come first, so that a link to one of them is recognised as a duplicate.
    homes = [(folder / name, label) for label, name in enumerate(classes) if (folder / name).is_dir()]
    waiting = [(home.is_symlink(), str(home), label) for home, label in homes]
    heapq.heapify(waiting)
    while waiting:
        _, path, label = heapq.heappop(waiting)
        if not is_new(path):
            continue
        try:
            entries = list(os.scandir(path))
        except OSError as error:
            left_out.add(path, f"{path} cannot be read ({error.strerror})")
            continue
        for entry in entries:
            linked_folder = entry.is_symlink() and os.path.isdir(entry.path)
            if linked_folder or entry.is_dir(follow_symlinks=False):
                if not entry.name.startswith(HIDDEN):
                    heapq.heappush(waiting, (linked_folder, entry.path, label))
            elif not entry.name.startswith(".") and wanted(entry.path):
                (linked if entry.is_symlink() else items).append((entry.path, label))
    taken |= {os.path.realpath(path) for path, _ in items} if linked else set()
    # Keep a broken link, so that the reader reports it.
    items += [item for item in sorted(linked) if not os.path.exists(item[0]) or is_new(item[0])]
    return sorted(items, key=lambda item: (item[1], os.path.dirname(item[0]).split(os.sep), item[0]))


def held_out(items: list[Item], classes: Sequence[str], what: str) -> Tensor:
    """Which files are for testing, bool (N,): a fifth of each class by content, so that copies stay on one side."""
    contents = _contents([path for path, _ in items])
    of_class: list[set[bytes]] = [set() for _ in classes]
    for path, label in items:
        of_class[label].add(contents[path])
    chosen = set[bytes]()
    for name, distinct in zip(classes, of_class):
        if len(distinct) < 2:
            count = "only one" if distinct else "no"
            raise UserError(f"class {name!r} has {count} {what}; it needs two or more, one of them for testing")
        chosen.update(sorted(distinct)[: max(1, round(TEST_SHARE * len(distinct)))])
    # Copies of other classes may be all that a class has.
    chosen -= {max(distinct) for distinct in of_class if distinct <= chosen}
    test = [contents[path] in chosen for path, _ in items]
    _warn_of_copies([], [item for item, tested in zip(items, test) if tested], f"{what}s")
    return torch.tensor(test)


def _warn_of_copies(train: Sequence[Item], test: Sequence[Item], of: str) -> None:
    """Report on stderr how many test files have the content of a training file, or of an earlier test file."""
    contents, known = _contents([path for path, _ in (*train, *test)]), dict[bytes, str]()
    trained = {known.setdefault(contents[path], path) for path, _ in train}
    same = [(path, other) for path, _ in test if (other := known.setdefault(contents[path], path)) != path]
    copies = [f"{path} is {other}" for path, other in same if other in trained]
    again = [f"{path} is {other}" for path, other in same if other not in trained]
    if copies:
        log(f"{len(copies)} of {len(test)} test {of} are training {of} too ({copies[0]}), so accuracy says less")
    if again:
        log(f"{len(again)} of {len(test)} test {of} are copies of others ({again[0]}), so intervals are too narrow")


def _contents(paths: Sequence[str]) -> dict[str, bytes]:
    """A hash of each file, of the whole file where others have its length and beginning but not its content."""
    found = {path: digest_of(path) for path in paths}
    alike: dict[bytes, list[str]] = {}
    for path in paths:
        alike.setdefault(found[path], []).append(path)
    for group in (group for group in alike.values() if len(group) > 1 and os.path.getsize(group[0]) > HEAD):
        whole = dict[str, bytes]()
        for path in group:
            with open_regular(Path(path)) as file:
                whole[path] = hashlib.file_digest(file, hashlib.blake2b).digest()[:16]
        if len({*whole.values()}) > 1:
            found |= whole
    return found


def digest_of(path: str) -> bytes:
    """Hash of length and first 64 KiB, to distinguish files without reading a huge set twice."""
    try:
        with open_regular(Path(path)) as file:
            head = file.read(HEAD)
        salt = os.path.getsize(path).to_bytes(8, "little")
    except (OSError, UserError):
        # The reader skips and reports the file.
        head, salt = os.fsencode(path), b""
    return hashlib.blake2b(head, digest_size=16, salt=salt).digest()
