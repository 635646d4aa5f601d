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

Item = tuple[str, int]
"""A file with the number of its class, as torchvision lists them."""
TEST_SHARE = 0.2


def class_names(folder: Path, hidden: str | tuple[str, ...] = (".", "__")) -> list[str]:
    """The sub-folders, without those whose names begin so."""
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith(hidden))


def labelled_files(
    folder: Path,
    wanted: Callable[[str], bool],
    *,
    of: str,
    layout: str,
    least: int = 2,
    test_names: Sequence[str] = ("test", "val", "valid", "validation"),
    hidden: str | tuple[str, ...] = (".", "__"),
    whole: bool = True,
) -> tuple[list[Item], list[Item], list[str]]:
    """The files of a folder for training, those for testing, and the classes.

    Args:
        folder: has train/ and test/ with a sub-folder per class in each; or the sub-folders themselves, without test.
        wanted: of a file's path.
        of: what the files are, in the plural.
        layout: for messages.
        least: number of classes.
        test_names: names that test/ may have.
        hidden: beginnings of names that are no class.
        whole: the folder may have no test part, whose list is then empty.

    Raises:
        UserError: another layout, too few classes or files, or a class that is in the test part alone.
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
        raise UserError(f"{train} has only one class ({classes[0]!r}); give two sub-folders or more")
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
    return items, tested, classes


def class_files(
    folder: Path, classes: Sequence[str], wanted: Callable[[str], bool], apart: Path | None = None
) -> list[Item]:
    """The files of each class, at any depth, that are `wanted`; none that is hidden, or in a hidden folder.

    A link to a folder above, or to what is taken already, is left out and named on stderr.

    Args:
        folder: the folder of the classes.
        classes: names of its sub-folders.
        wanted: of a file's path.
        apart: the other part of the data, from which no link takes anything.
    """
    left_out, taken = LeftOut(), set[str]()
    items, linked = list[Item](), list[Item]()
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
            try:
                entries = list(os.scandir(path))
            except OSError as error:
                left_out.add(path, f"{path} cannot be read ({error.strerror})")
                continue
            for entry in entries:
                try:
                    is_folder = entry.is_dir()
                except OSError as error:
                    left_out.add(entry.path, f"{entry.path} cannot be read ({error.strerror})")
                    continue
                if not is_folder:
                    if not entry.name.startswith(".") and wanted(entry.path):
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


def held_out(items: list[Item], classes: Sequence[str], digest: Callable[[str], bytes], what: str) -> Tensor:
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
