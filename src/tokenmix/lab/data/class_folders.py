"""Folders of the user's own with one sub-folder per class: which files there are, and which are held out for testing.

Links are followed, but each folder and each file is taken once. Files are sorted, so that the same files have the same
numbers everywhere.
"""

import heapq
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from tokenmix.errors import UserError
from tokenmix.lab.data.reading import LeftOut

Items = list[tuple[str, int]]
"""Files with the number of their class, as torchvision lists them."""
TEST_SHARE = 0.2


def first_folder(folder: Path, names: Sequence[str]) -> Path | None:
    """The first of these sub-folders that is there."""
    return next((folder / name for name in names if (folder / name).is_dir()), None)


def class_names(folder: Path, hidden: str | tuple[str, ...] = (".", "__")) -> list[str]:
    """The sub-folders, without those whose names begin so."""
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith(hidden))


def check_test_classes(test: Path, train: Path, tested: Sequence[str], classes: Sequence[str]) -> None:
    """Raise `UserError` for a class of the test folder that the training folder has not."""
    if unknown := [name for name in tested if name not in classes]:
        raise UserError(f"{test} has the class {unknown[0]!r}, which is missing in {train}; rename or remove it")


def class_files(
    folder: Path, classes: Sequence[str], wanted: Callable[[str], bool], apart: Path | None = None
) -> Items:
    """The files of each class, at any depth, whose names are `wanted`; none that is hidden, or in a hidden folder.

    A link to a folder above, or to what is taken already, is left out and named on stderr.

    Args:
        folder: the folder of the classes.
        classes: names of its sub-folders.
        wanted: of a file's name.
        apart: the other part of the data, from which no link takes anything.
    """
    left_out, taken = LeftOut(), set[str]()
    items, linked = Items(), Items()
    other = [] if apart is None else [os.path.realpath(apart)]
    roots = [os.path.realpath(folder), *other]

    def is_taken(path: str, real: str) -> bool:
        if fresh := real not in taken and not any(_holds(place, real) for place in other):
            taken.add(real)
        else:
            left_out.add(path, f"{path}, another way to {real}")
        return not fresh

    # What is no link comes first, so that a link to it is known to be a second way.
    homes = [(folder / name, label) for label, name in enumerate(classes) if (folder / name).is_dir()]
    waiting = [(home.is_symlink(), str(home), label) for home, label in homes]
    heapq.heapify(waiting)
    while waiting:
        _, path, label = heapq.heappop(waiting)
        real = os.path.realpath(path)
        if any(_holds(real, root) for root in roots):
            left_out.add(path, f"{path}, a link to {real}, which has this folder in it")
        elif not is_taken(path, real):
            for entry in _entries(path, left_out):
                if not entry.is_dir():
                    if not entry.name.startswith(".") and wanted(entry.name):
                        (linked if entry.is_symlink() else items).append((entry.path, label))
                elif not entry.name.startswith((".", "__")):
                    heapq.heappush(waiting, (entry.is_symlink(), entry.path, label))
    taken |= {os.path.realpath(path) for path, _ in items} if linked else set()
    # A link to nothing is kept, for the reader to name.
    items += [
        item
        for item in sorted(linked)
        if not os.path.exists(item[0]) or not is_taken(item[0], os.path.realpath(item[0]))
    ]
    return sorted(items, key=lambda item: (item[1], os.path.dirname(item[0]).split(os.sep), item[0]))


def _holds(outer: str, inner: str) -> bool:
    return f"{inner}/".startswith(f"{outer.rstrip('/')}/")


def _entries(folder: str, left_out: LeftOut) -> list[os.DirEntry[str]]:
    try:
        return list(os.scandir(folder))
    except OSError as error:
        left_out.add(folder, f"{folder} cannot be read ({error.strerror})")
        return []


def held_out(items: Items, classes: Sequence[str], digest: Callable[[str], bytes], what: str) -> Tensor:
    """Which files are for testing, bool (N,): a fifth of each class, by content, so that copies stay on one side."""
    digests = [digest(path) for path, _ in items]
    test = torch.zeros(len(items), dtype=torch.bool)
    for label, name in enumerate(classes):
        places = [place for place, item in enumerate(items) if item[1] == label]
        distinct = sorted({digests[place] for place in places})
        if len(distinct) < 2:
            count = "only one" if distinct else "no"
            raise UserError(f"class {name!r} has {count} {what}; it needs two or more, one of them for testing")
        chosen = set(distinct[: max(1, round(TEST_SHARE * len(distinct)))])
        test[[place for place in places if digests[place] in chosen]] = True
    return test
