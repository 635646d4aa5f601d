"""A folder of the user's own clouds: one sub-folder a class."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from tokenmix.data.lookup import DataRequest
from tokenmix.data.reading import parse_json, read_file
from tokenmix.errors import UserError
from tokenmix.tasks.points.data.cloud import Cloud, PackedClouds, PointData
from tokenmix.tasks.points.data.files import ENDINGS
from tokenmix.tasks.points.data.packing import CloudItem, check_folder, pack, read_item

__all__ = ["load_clouds"]

TEST_NAMES = ("test", "val", "valid", "validation")
TEST_SHARE = 0.2
MAX_PARTS = 1000
LAYOUT = "train/CLASS/ and test/CLASS/, or one sub-folder a class, with " + ", ".join(ENDINGS)


def load_clouds(request: DataRequest) -> PointData:
    """The clouds of a folder, held in memory; of a mesh 2,048 points of its surface.

    train/ and test/ (or val/) are taken where they are there; else a fifth of each class is kept for testing, chosen by
    the files' contents. For parts each file says its points' (`parts` of .npz, the seventh column of text); parts.json
    next to the folders may list their names. Files that cannot be read are left out and named.
    """
    folder = check_folder(request, LAYOUT)
    train, test, classes = _find(folder, least=1 if request.kind == "parts" else 2)
    read = _with_parts if request.kind == "parts" else read_item
    packed, skipped = pack(train, read, "training")
    held, bad = pack(test, read, "test")
    skipped = [*skipped, *bad]
    for label, name in enumerate(classes):
        if not bool((packed.labels == label).any()):
            raise UserError(f"class {name!r} of {folder} has no readable cloud for training; it needs {LAYOUT}")
    parts, names = _parts(packed, held, classes, folder) if request.kind == "parts" else ({}, [])
    normals = packed.normals is not None and held.normals is not None
    source = f"clouds: {folder.resolve()}"
    return PointData(request.spec, packed, held, classes, parts, names, normals, source, skipped)


def _with_parts(item: CloudItem) -> Cloud:
    cloud = read_item(item)
    if cloud.parts is None:
        raise UserError(f"{item.path} does not say the parts of its points; save them as 'parts' in .npz")
    low, high = int(cloud.parts.min()), int(cloud.parts.max())
    if not 0 <= low <= high < MAX_PARTS:
        raise UserError(f"{item.path} has the part {low if low < 0 else high}; count parts from 0, below {MAX_PARTS}")
    return cloud


def _find(folder: Path, *, least: int) -> tuple[list[CloudItem], list[CloudItem], list[str]]:
    tests = [folder / name for name in TEST_NAMES if (folder / name).is_dir()]
    apart = (folder / "train").is_dir() and bool(tests)
    train = folder / "train" if apart else folder
    classes = _folders(train)
    if len(classes) < least:
        raise UserError(f"{train} has {len(classes)} classes; a task needs more: {LAYOUT}")
    items = _items(train, classes)
    if not apart:
        return *_split(items, classes), classes
    unknown = [name for name in _folders(tests[0]) if name not in classes]
    if unknown:
        raise UserError(f"{tests[0]} has the class {unknown[0]!r}, which is not in {train}; rename or remove it")
    held = _items(tests[0], classes)
    if not held:
        raise UserError(f"there are no clouds in {tests[0]}; it needs {LAYOUT}")
    return items, held, classes


def _folders(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith((".", "__")))


def _items(folder: Path, classes: Sequence[str]) -> list[CloudItem]:
    """Files with an ending of clouds, in a fixed order; others, such as pictures and notes, are not meant."""
    found = []
    for label, name in enumerate(classes):
        for place, folders, files in os.walk(folder / name):
            folders.sort()
            found += [CloudItem(Path(place, f), label) for f in sorted(files) if Path(f).suffix.lower() in ENDINGS]
    return [item for item in found if not item.path.name.startswith(".")]


def _split(items: Sequence[CloudItem], classes: Sequence[str]) -> tuple[list[CloudItem], list[CloudItem]]:
    """A fifth of each class for testing, by content, so that copies of a file stay on one side."""
    train: list[CloudItem] = []
    test: list[CloudItem] = []
    for label, name in enumerate(classes):
        mine = {item: _digest(item.path) for item in items if item.label == label}
        distinct = sorted(set(mine.values()))
        if len(distinct) < 2:
            raise UserError(f"class {name!r} has {len(distinct)} clouds; it needs two or more, one of them for testing")
        chosen = set(distinct[: max(1, round(TEST_SHARE * len(distinct)))])
        train += [item for item, digest in mine.items() if digest not in chosen]
        test += [item for item, digest in mine.items() if digest in chosen]
    return train, test


def _digest(path: Path) -> bytes:
    try:
        return hashlib.sha256(read_file(path)).digest()
    except UserError:
        # It is left out, and named, where it is read.
        return hashlib.sha256(os.fsencode(path)).digest()


def _parts(
    train: PackedClouds, test: PackedClouds, classes: Sequence[str], folder: Path
) -> tuple[dict[str, list[int]], list[str]]:
    """The parts of each class, which are those of its training clouds, and their names."""
    seen = [_seen(train, label) for label in range(len(classes))]
    for label, name in enumerate(classes):
        new = [part for part in _seen(test, label).tolist() if part not in seen[label].tolist()]
        if new:
            raise UserError(
                f"test clouds of {name!r} have the part {new[0]}, which no training cloud of it has; correct it"
            )
    count = max(int(parts.max()) for parts in seen) + 1
    return {name: parts.tolist() for name, parts in zip(classes, seen)}, _names(folder / "parts.json", count)


def _seen(clouds: PackedClouds, label: int) -> Tensor:
    assert clouds.parts is not None
    sizes = clouds.ends.diff(prepend=torch.zeros(1, dtype=torch.int64))
    return clouds.parts[(clouds.labels == label).repeat_interleave(sizes)].unique()


def _names(path: Path, count: int) -> list[str]:
    if not path.is_file():
        return [f"part {number}" for number in range(count)]
    names = parse_json(read_file(path), path)
    if not isinstance(names, list) or len(names) < count:
        raise UserError(f"{path} is not a list of at least {count} names, one for each part; write one")
    return [str(name) for name in names]
