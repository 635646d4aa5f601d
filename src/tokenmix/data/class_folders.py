"""Folders of the user's own with one sub-folder per class: which files there are, and which are held out for testing.

Files are found by torchvision's `make_dataset`, and sorted so that the same files have the same numbers everywhere.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torchvision.datasets.folder import make_dataset

from tokenmix.errors import UserError

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


def class_files(folder: Path, classes: Sequence[str], wanted: Callable[[str], bool]) -> Items:
    """The files of each class, at any depth, whose names are `wanted`; none that is hidden, or in a hidden folder."""
    start = len(str(folder)) + 1

    def visible(path: str) -> bool:
        *folders, name = path[start:].split(os.sep)[1:]
        return not (name.startswith(".") or any(part.startswith((".", "__")) for part in folders)) and wanted(name)

    numbers = {name: label for label, name in enumerate(classes)}
    items = make_dataset(folder, numbers, is_valid_file=visible, allow_empty=True)
    return sorted(items, key=lambda item: (item[1], os.path.dirname(item[0]).split(os.sep), item[0]))


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
