"""Files of clouds, read once and packed; unreadable files are skipped and reported; and folders of the user's own."""

import hashlib
import json
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from tokenmix.errors import MissingExtra, UserError
from tokenmix.lab.data.class_folders import check_test_classes, class_files, class_names, first_folder, held_out
from tokenmix.lab.data.fetch import log
from tokenmix.lab.data.images.image_set import Skipped
from tokenmix.lab.data.lookup import DataRequest
from tokenmix.lab.data.reading import parse_json, read_file
from tokenmix.lab.data.store import Names, Stored, fetched
from tokenmix.lab.tasks.points.data.cloud import Cloud, PackedClouds, PointData, unit_ball
from tokenmix.lab.tasks.points.data.files import ENDINGS, read_points

MAX_PARTS = 1000
LAYOUT = "train/CLASS/ and test/CLASS/, or one sub-folder per class, with " + ", ".join(ENDINGS)


@dataclass(frozen=True)
class CloudItem:
    """A file and the class of what is in it."""

    path: Path
    label: int


Read = Callable[[CloudItem], Cloud]


def check_folder(request: DataRequest, layout: str) -> Path:
    """The folder that a data set is in; `UserError` with its layout if there is none."""
    if not request.path.is_dir():
        raise UserError(
            f"{request.name} needs a folder, got {request.variant!r}; give --data {request.name}:PATH with {layout}"
        )
    return request.path


def read_item(item: CloudItem) -> Cloud:
    """The centred cloud of a file; points on a surface do not depend on the path of the file."""
    seed = zlib.crc32(item.path.name.encode("utf-8", "surrogateescape"))
    cloud = read_points(item.path, seed=seed, centred=True)
    return replace(cloud, label=item.label)


def pack(items: Sequence[CloudItem], read: Read = read_item, label: str = "") -> tuple[PackedClouds, list[Skipped]]:
    """The clouds of these files, and those that were left out.

    Normals are kept if every cloud has them, parts likewise.

    Raises:
        UserError: none can be read.
    """
    if not items:
        raise UserError(f"there are no {label} clouds; the list of them, or the folder, is empty")
    console = Console(stderr=True)
    hidden = not console.is_terminal or len(items) < 200
    clouds: list[Cloud] = []
    skipped: list[Skipped] = []
    for item in track(items, f"reading {label} clouds", console=console, transient=True, disable=hidden):
        try:
            clouds.append(read(item))
        except MissingExtra:
            raise
        except UserError as reason:
            skipped.append(Skipped(str(item.path), str(reason).removeprefix(str(item.path)).lstrip(": ")))
    if not clouds:
        raise UserError(f"none of {len(items)} files could be read; the first: {items[0].path} {skipped[0].reason}")
    packed = PackedClouds(
        points=torch.cat([cloud.points for cloud in clouds]),
        ends=torch.tensor([len(cloud.points) for cloud in clouds]).cumsum(0),
        labels=torch.tensor([cloud.label for cloud in clouds], dtype=torch.int64),
        names=Names.of(cloud.name for cloud in clouds),
        normals=_of_all([cloud.normals for cloud in clouds]),
        parts=_of_all([cloud.parts for cloud in clouds]),
    )
    return packed, skipped


def _of_all(values: list[Tensor | None]) -> Tensor | None:
    known = [value for value in values if value is not None]
    return torch.cat(known) if len(known) == len(values) else None


def kept(
    name: str, sides: Sequence[Sequence[CloudItem]], root: Path | None, read: Read
) -> tuple[list[PackedClouds], list[Skipped]]:
    """The packed clouds of a large set of text files: read once, scaled to the unit ball, and kept in the cache.

    Half precision there is 0.05 % of the radius. The files' names, sizes and times are in the name of what is kept, so
    a set that has changed is read again.
    """
    items = [item for side in sides for item in side]
    try:
        stats = [(item.path, item.path.stat()) for item in items]
    except OSError as error:
        raise UserError(f"cannot read {error.filename} ({error.strerror}); remove it, or unpack {name} again") from None
    listing = "\n".join(f"{path}|{stat.st_size}|{stat.st_mtime_ns}" for path, stat in stats)
    digest = hashlib.sha256(listing.encode("utf-8", "surrogateescape")).hexdigest()[:12]

    def fetch(_: Path) -> Stored:
        log(f"reading {len(items)} files of {name}, once")
        tensors: dict[str, Tensor] = {}
        notes: list[list[str]] = []
        for number, side in enumerate(sides):
            packed, bad = pack(side, lambda item: unit_ball(read(item)), name)
            found = {"points": packed.points.half(), "ends": packed.ends, "labels": packed.labels}
            found |= {"name text": packed.names.text, "name ends": packed.names.ends}
            if packed.normals is not None:
                found["normals"] = packed.normals.half()
            if packed.parts is not None:
                found["parts"] = packed.parts.byte()
            tensors |= {f"{number}.{key}": value for key, value in found.items()}
            notes += [[s.path, s.reason] for s in bad]
        return tensors, {"skipped": json.dumps(notes)}

    tensors, notes = fetched(f"{name}-{digest}", root, fetch)
    packed = []
    for number in range(len(sides)):
        found = {key.partition(".")[2]: value for key, value in tensors.items() if key.startswith(f"{number}.")}
        names = Names(found.pop("name text"), found.pop("name ends"))
        packed.append(PackedClouds(names=names, **found))
    return packed, [Skipped(path, reason) for path, reason in json.loads(notes["skipped"])]


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
        raise UserError(f"{item.path} has no parts for its points; save them as 'parts' in .npz")
    low, high = int(cloud.parts.min()), int(cloud.parts.max())
    if not 0 <= low <= high < MAX_PARTS:
        raise UserError(f"{item.path} has the part {low if low < 0 else high}; count parts from 0, below {MAX_PARTS}")
    return cloud


def _find(folder: Path, *, least: int) -> tuple[list[CloudItem], list[CloudItem], list[str]]:
    train, test = folder / "train", first_folder(folder, ("test", "val", "valid", "validation"))
    if not train.is_dir() or test is None:
        train, test = folder, None
    classes = class_names(train)
    if len(classes) < least:
        raise UserError(f"{train} has {len(classes)} classes; a task needs more: {LAYOUT}")
    items = class_files(train, classes, _is_cloud)
    if test is None:
        apart = held_out(items, classes, _digest, "cloud")
        items, held = ([item for item, mine in zip(items, part) if mine] for part in (~apart, apart))
    else:
        check_test_classes(test, train, class_names(test), classes)
        held = class_files(test, classes, _is_cloud)
        if not held:
            raise UserError(f"there are no clouds in {test}; it needs {LAYOUT}")
    train_items, test_items = ([CloudItem(Path(path), label) for path, label in part] for part in (items, held))
    return train_items, test_items, classes


def _is_cloud(name: str) -> bool:
    """By its ending; others, such as images and notes, are not meant."""
    return Path(name).suffix.lower() in ENDINGS


def _digest(path: str) -> bytes:
    try:
        return hashlib.sha256(read_file(Path(path))).digest()
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
                f"test clouds of {name!r} have the part {new[0]}, which no training cloud of it has; fix it"
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
