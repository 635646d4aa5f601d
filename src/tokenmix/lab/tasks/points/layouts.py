"""Folders of clouds: users' own, ModelNet and ShapeNet-part. Unreadable files are skipped and reported."""

import json
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from tokenmix.errors import UserError
from tokenmix.files import inside
from tokenmix.lab.data.fetch import log
from tokenmix.lab.data.lookup import DataRequest
from tokenmix.lab.data.reading import Item, Skipped, held_out, labelled_files, parse_json, read_each, read_file
from tokenmix.lab.data.store import Names, Stored, fetched_of_files
from tokenmix.lab.tasks.points.clouds import Cloud, PackedClouds, PointData, unit_ball
from tokenmix.lab.tasks.points.files import ENDINGS, NUM_POINTS, read_points

MAX_PARTS = 1000
LAYOUT = "train/CLASS/ and test/CLASS/, or one sub-folder per class, with " + ", ".join(ENDINGS)
MODELNET = (
    "CLASS/train/*.off and CLASS/test/*.off, or modelnet40_normal_resampled with modelnet40_shape_names.txt, "
    "modelnet40_train.txt and CLASS/*.txt"
)
SHAPENET_PART = "synsetoffset2category.txt, train_test_split/shuffled_{train,val,test}_file_list.json and SYNSET/*.txt"
PARTS = {
    "Airplane": range(4),
    "Bag": range(4, 6),
    "Cap": range(6, 8),
    "Car": range(8, 12),
    "Chair": range(12, 16),
    "Earphone": range(16, 19),
    "Guitar": range(19, 22),
    "Knife": range(22, 24),
    "Lamp": range(24, 28),
    "Laptop": range(28, 30),
    "Motorbike": range(30, 36),
    "Mug": range(36, 38),
    "Pistol": range(38, 41),
    "Rocket": range(41, 44),
    "Skateboard": range(44, 47),
    "Table": range(47, 50),
}


def load_clouds(request: DataRequest) -> PointData:
    """Clouds of a folder in memory; for a mesh 2,048 points of its surface.

    train/ and test/ (or val/) are used if present. Otherwise a fifth of each class is for testing, chosen by file
    content. Files contain the parts of their points (`parts` of .npz, the seventh column of text); parts.json next to
    the folders may list the parts' names. Unreadable files are skipped and reported.
    """
    folder, with_parts = request.path, request.kind == "parts"
    train, test, classes = labelled_files(
        folder,
        lambda path: Path(path).suffix.lower() in ENDINGS,
        of="clouds",
        layout=LAYOUT,
        least=1 if with_parts else 2,
    )
    if not test:
        apart = held_out(train, classes, "cloud")
        train, test = ([item for item, mine in zip(train, part) if mine] for part in (~apart, apart))

    def read(item: Item) -> Cloud:
        cloud = read_item(item)
        if not with_parts:
            return cloud
        if cloud.parts is None:
            raise UserError(f"{item[0]} has no parts for its points; save them as 'parts' in .npz")
        low, high = int(cloud.parts.min()), int(cloud.parts.max())
        if not 0 <= low <= high < MAX_PARTS:
            raise UserError(f"{item[0]} has the part {low if low < 0 else high}; count parts from 0, below {MAX_PARTS}")
        return cloud

    (packed, skipped), (held, bad) = pack(train, read, "training"), pack(test, read, "test")
    for label, name in enumerate(classes):
        if not bool((packed.labels == label).any()):
            raise UserError(f"class {name!r} of {folder} has no readable cloud for training; it needs {LAYOUT}")
    parts, names = _parts(packed, held, classes, folder) if with_parts else ({}, [])
    source = f"clouds: {folder.resolve()}"
    return PointData(packed, held, classes, source, [*skipped, *bad], parts=parts, part_names=names)


def load_modelnet(request: DataRequest) -> PointData:
    """ModelNet in the published split, each cloud of 2,048 points with normals, read once and cached.

    For OFF meshes, points are sampled uniformly on the surface. For text files of resampled points, the first 2,048 of
    10,000 are taken, as in the published programs.
    """
    folder = _folder(request, MODELNET)
    # A folder may list both sets; the larger one is used.
    listed = sorted(folder.glob("modelnet*_shape_names.txt"), key=lambda path: not path.name.startswith("modelnet40"))
    sides: list[list[Item]] = []
    if listed:
        classes, kind = _text(listed[0], MODELNET).split(), listed[0].name.partition("_")[0]
        for path in (folder / f"{kind}_{side}.txt" for side in ("train", "test")):
            shapes = [(shape.rpartition("_")[0], shape) for shape in _text(path, MODELNET).split()]
            if unknown := [shape for name, shape in shapes if name not in classes]:
                raise UserError(f"{path.name} names {unknown[0]!r}, whose class is not in {listed[0].name}; correct it")
            items = [(str(inside(folder, f"{name}/{shape}.txt")), classes.index(name)) for name, shape in shapes]
            sides.append(_there(items, path))
    else:
        classes = sorted(path.name for path in folder.iterdir() if (path / "train").is_dir())
        if len(classes) < 2:
            raise UserError(f"{folder} has {len(classes)} classes of ModelNet; it needs {MODELNET}")
        for side in ("train", "test"):
            found = [(i, sorted((folder / name / side).glob("*.off"))) for i, name in enumerate(classes)]
            sides.append([(str(path), i) for i, paths in found for path in paths])
            if not sides[-1]:
                raise UserError(f"{folder} has no .off file for {side}; it needs {MODELNET}")

    def first(item: Item) -> Cloud:
        cloud = read_item(item)
        normals = None if cloud.normals is None else cloud.normals[:NUM_POINTS]
        return replace(cloud, points=cloud.points[:NUM_POINTS], normals=normals)

    (train, test), skipped = kept("modelnet", sides, request.root, first)
    source = f"modelnet: {folder.resolve()}, {NUM_POINTS} points each"
    return PointData(train, test, classes, source, skipped)


def load_shapenet_part(request: DataRequest) -> PointData:
    """ShapeNet-part with every point, normal and part, cached; trains on the published training and validation sets."""
    folder = _folder(request, SHAPENET_PART)
    path = folder / "synsetoffset2category.txt"
    rows = sorted(line.split() for line in _text(path, SHAPENET_PART).splitlines() if line.strip())
    unknown = [" ".join(row) for row in rows if len(row) != 2 or row[0] not in PARTS]
    if unknown or not rows:
        raise UserError(
            f"{path} has {(unknown or ['nothing'])[0]!r} where a category of ShapeNet-part and its synset belong; "
            "unpack it again"
        )
    classes, synsets = [row[0] for row in rows], {row[1]: label for label, row in enumerate(rows)}
    sides: list[list[Item]] = []
    for side in ("train", "val", "test"):
        path = folder / "train_test_split" / f"shuffled_{side}_file_list.json"
        listed = parse_json(_text(path, SHAPENET_PART), path)
        try:
            entries = [entry.split("/")[-2:] for entry in listed]
            items = [(str(inside(folder, f"{synset}/{name}.txt")), synsets[synset]) for synset, name in entries]
        except (ValueError, AttributeError, TypeError, KeyError) as error:
            raise UserError(f"{path} is not a list of shape_data/SYNSET/NAME ({error}); unpack it again") from None
        sides.append(_there(items, path))
    learnt, held, tested = sides

    def checked(item: Item) -> Cloud:
        cloud, (path, label) = read_item(item), item
        if cloud.parts is None or cloud.normals is None:
            raise UserError(f"{path} has no seven columns, x y z, normal and part; unpack it again")
        known = PARTS[classes[label]]
        outside = torch.nonzero((cloud.parts < known.start) | (cloud.parts >= known.stop)).flatten()
        if len(outside):
            raise UserError(
                f"{path} has part {int(cloud.parts[outside[0]])}, but {classes[label]} has {known.start} to "
                f"{known.stop - 1}; correct it"
            )
        return cloud

    (train, test), skipped = kept("shapenet-part", [learnt + held, tested], request.root, checked)
    parts, names = {}, []
    if request.kind == "parts":
        parts = {name: list(PARTS[name]) for name in classes}
        # The published parts only have numbers.
        names = [f"{name} {place}" for name, numbers in PARTS.items() for place in range(len(numbers))]
    else:
        train, test = replace(train, parts=None), replace(test, parts=None)
    source = f"shapenet-part: {folder.resolve()}"
    return PointData(train, test, classes, source, skipped, parts=parts, part_names=names)


def _folder(request: DataRequest, layout: str) -> Path:
    if not request.path.is_dir():
        raise UserError(
            f"{request.name} needs a folder, got {request.variant!r}; give --data {request.name}:PATH with {layout}"
        )
    return request.path


def _there(items: list[Item], listed: Path) -> list[Item]:
    """These files; `UserError` if a listed file is missing, or there is none."""
    missing = [path for path, _ in items if not os.path.isfile(path)]
    if missing or not items:
        first = f", the first: {missing[0]}" if missing else ""
        raise UserError(f"{len(missing)} of {len(items)} files of {listed.name} are missing{first}; unpack it again")
    return items


def _text(path: Path, layout: str) -> str:
    try:
        return read_file(path).decode("utf-8-sig")
    except ValueError as error:
        reason = error if isinstance(error, UserError) else f"{path} is not UTF-8; save it in this encoding"
        raise UserError(f"{reason}; the data set needs {layout}") from None


def read_item(item: Item) -> Cloud:
    """The centred cloud of a file; points on a surface do not depend on the file's folder."""
    seed = zlib.crc32(os.fsencode(os.path.basename(item[0])))
    return replace(read_points(item[0], seed=seed, centred=True), label=item[1])


def pack(items: Sequence[Item], read: Callable[[Item], Cloud], label: str) -> tuple[PackedClouds, list[Skipped]]:
    """The clouds of these files, with normals and parts if all have them, and skipped files; `UserError` if empty."""
    if not items:
        raise UserError(f"there are no {label} clouds; the list of them, or the folder, is empty: add some")
    found, skipped = read_each(items, read, lambda item: item[0], f"reading {label} clouds")
    clouds = [cloud for _, cloud in found]
    if not clouds:
        raise UserError(
            f"none of {len(items)} files could be read; correct them, the first of which is {items[0][0]}: "
            f"{skipped[0].reason}"
        )

    def of_all(values: list[Tensor | None]) -> Tensor | None:
        known = [value for value in values if value is not None]
        return torch.cat(known) if len(known) == len(values) else None

    without = [cloud.name for cloud in clouds if cloud.normals is None]
    if 0 < len(without) < len(clouds):
        log(f"{len(without)} of {len(clouds)} {label} clouds have no normals ({without[0]}), so none are used")
    packed = PackedClouds(
        points=torch.cat([cloud.points for cloud in clouds]),
        ends=torch.tensor([len(cloud.points) for cloud in clouds]).cumsum(0),
        labels=torch.tensor([cloud.label for cloud in clouds], dtype=torch.int64),
        names=Names.of(cloud.name for cloud in clouds),
        normals=of_all([cloud.normals for cloud in clouds]),
        parts=of_all([cloud.parts for cloud in clouds]),
    )
    return packed, skipped


def kept(
    name: str, sides: Sequence[Sequence[Item]], root: Path | None, read: Callable[[Item], Cloud]
) -> tuple[list[PackedClouds], list[Skipped]]:
    """Packed clouds of many text files, scaled to the unit ball and cached; half precision is 0.05 % of the radius."""

    def make(_: Path) -> Stored:
        log(f"reading {sum(map(len, sides))} files of {name}, once")
        tensors: dict[str, Tensor] = {}
        notes: list[tuple[str, str]] = []
        for number, side in enumerate(sides):
            packed, bad = pack(side, lambda item: unit_ball(read(item)), name)
            found = {"points": packed.points.half(), "ends": packed.ends, "labels": packed.labels}
            found |= {"name text": packed.names.text, "name ends": packed.names.ends}
            if packed.normals is not None:
                found["normals"] = packed.normals.half()
            if packed.parts is not None:
                found["parts"] = packed.parts.byte()
            tensors |= {f"{number}.{key}": value for key, value in found.items()}
            notes += [(s.path, s.reason) for s in bad]
        return tensors, {"skipped": json.dumps(notes)}

    mark = zlib.crc32(repr([[label for _, label in side] for side in sides]).encode())
    files = [Path(path) for side in sides for path, _ in side]
    tensors, notes = fetched_of_files(f"{name}-{mark:08x}", files, root, make)
    packed = []
    for number in range(len(sides)):
        found = {key.partition(".")[2]: value for key, value in tensors.items() if key.startswith(f"{number}.")}
        names = Names(found.pop("name text"), found.pop("name ends"))
        packed.append(PackedClouds(names=names, **found))
    return packed, [Skipped(*pair) for pair in json.loads(notes["skipped"])]


def _parts(
    train: PackedClouds, test: PackedClouds, classes: Sequence[str], folder: Path
) -> tuple[dict[str, list[int]], list[str]]:
    """Parts of each class, taken from its training clouds, and names of the parts."""

    def seen(clouds: PackedClouds, label: int) -> list[int]:
        assert clouds.parts is not None
        sizes = clouds.ends.diff(prepend=torch.zeros(1, dtype=torch.int64))
        return clouds.parts[(clouds.labels == label).repeat_interleave(sizes)].unique().tolist()

    found = {name: seen(train, label) for label, name in enumerate(classes)}
    for label, name in enumerate(classes):
        if new := [part for part in seen(test, label) if part not in found[name]]:
            raise UserError(
                f"test clouds of {name!r} have the part {new[0]}, which no training cloud of it has; fix it"
            )
    count, path = max(map(max, found.values())) + 1, folder / "parts.json"
    if not path.is_file():
        return found, [f"part {number}" for number in range(count)]
    names = parse_json(read_file(path), path)
    if not isinstance(names, list) or len(names) < count:
        raise UserError(f"{path} is not a list of at least {count} names, one for each part; write one")
    return found, [str(name) for name in names]
