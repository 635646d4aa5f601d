"""ModelNet and ShapeNet-part as they are published."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from tokenmix.errors import UserError
from tokenmix.files import inside
from tokenmix.lab.data.lookup import DataRequest
from tokenmix.lab.data.reading import parse_json, read_file
from tokenmix.lab.tasks.points.data.cloud import Cloud, PointData
from tokenmix.lab.tasks.points.data.files import NUM_POINTS
from tokenmix.lab.tasks.points.data.folder import CloudItem, check_folder, kept, read_item

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
Sides = tuple[list[str], list[list[CloudItem]]]
"""Names of the classes, and the files for training and for testing."""


def load_modelnet(request: DataRequest) -> PointData:
    """ModelNet in the published split, each cloud of 2,048 points with normals, read once and kept in the cache.

    OFF meshes in folders: points are sampled on their surface, evenly by area. Or the text files of resampled points:
    the first of 10,000, as in the published programs.
    """
    folder = check_folder(request, MODELNET)
    listed = sorted(folder.glob("modelnet*_shape_names.txt"))
    classes, sides = _resampled(folder, listed) if listed else _meshes(folder)
    (train, test), skipped = kept("modelnet", sides, request.root, _first)
    normals = train.normals is not None and test.normals is not None
    source = f"modelnet: {folder.resolve()}, {NUM_POINTS} points each"
    return PointData(request.spec, train, test, classes, {}, [], normals, source, skipped)


def _first(item: CloudItem) -> Cloud:
    cloud = read_item(item)
    normals = None if cloud.normals is None else cloud.normals[:NUM_POINTS]
    return replace(cloud, points=cloud.points[:NUM_POINTS], normals=normals)


def _meshes(folder: Path) -> Sides:
    classes = sorted(path.name for path in folder.iterdir() if (path / "train").is_dir())
    if len(classes) < 2:
        raise UserError(f"{folder} has {len(classes)} classes of ModelNet; it needs {MODELNET}")
    sides = []
    for side in ("train", "test"):
        files = [(i, sorted((folder / name / side).glob("*.off"))) for i, name in enumerate(classes)]
        sides.append([CloudItem(path, i) for i, paths in files for path in paths])
        if not sides[-1]:
            raise UserError(f"{folder} has no .off file for {side}; it needs {MODELNET}")
    return classes, sides


def _resampled(folder: Path, listed: list[Path]) -> Sides:
    # A folder has the lists of both; the larger set is meant.
    names = next((path for path in listed if path.name.startswith("modelnet40")), listed[0])
    kind = names.name.partition("_")[0]
    classes = _text(names, MODELNET).split()
    sides = []
    for side in ("train", "test"):
        path, items = folder / f"{kind}_{side}.txt", []
        for shape in _text(path, MODELNET).split():
            name = shape.rpartition("_")[0]
            if name not in classes:
                raise UserError(f"{path.name} names {shape!r}, whose class is not in {names.name}; correct it")
            items.append(CloudItem(inside(folder, f"{name}/{shape}.txt"), classes.index(name)))
        sides.append(_there(items, path))
    return classes, sides


def load_shapenet_part(request: DataRequest) -> PointData:
    """ShapeNet-part in the published split, training and validation together for training.

    Every point of a file is kept, with its normal and its part; read once and kept in the cache.
    """
    folder = check_folder(request, SHAPENET_PART)
    classes, synsets = _categories(folder / "synsetoffset2category.txt")
    sides = [_listed(folder, "train", synsets) + _listed(folder, "val", synsets), _listed(folder, "test", synsets)]
    (train, test), skipped = kept("shapenet-part", sides, request.root, partial(_checked, classes=classes))
    parts, names = {}, []
    if request.kind == "parts":
        parts = {name: list(PARTS[name]) for name in classes}
        # The published parts have numbers alone.
        names = [f"{name} {place}" for name, numbers in PARTS.items() for place in range(len(numbers))]
    else:
        train, test = replace(train, parts=None), replace(test, parts=None)
    source = f"shapenet-part: {folder.resolve()}"
    return PointData(request.spec, train, test, classes, parts, names, True, source, skipped)


def _checked(item: CloudItem, *, classes: list[str]) -> Cloud:
    cloud = read_item(item)
    if cloud.parts is None or cloud.normals is None:
        raise UserError(f"{item.path} has no seven columns, x y z, normal and part; unpack it again")
    known = PARTS[classes[item.label]]
    outside = torch.nonzero((cloud.parts < known.start) | (cloud.parts >= known.stop)).flatten()
    if len(outside):
        part = int(cloud.parts[outside[0]])
        raise UserError(
            f"{item.path} has part {part}, but {classes[item.label]} has {known.start} to {known.stop - 1}; correct it"
        )
    return cloud


def _categories(path: Path) -> tuple[list[str], dict[str, int]]:
    """Names of the classes, and the class of each synset's folder."""
    rows = [line.split() for line in _text(path, SHAPENET_PART).splitlines() if line.strip()]
    unknown = [" ".join(row) for row in rows if len(row) != 2 or row[0] not in PARTS]
    if unknown or not rows:
        raise UserError(
            f"{path} has {(unknown or ['nothing'])[0]!r} where a category of ShapeNet-part and its synset belong; "
            "unpack it again"
        )
    rows.sort()
    return [row[0] for row in rows], {row[1]: label for label, row in enumerate(rows)}


def _listed(folder: Path, side: str, synsets: dict[str, int]) -> list[CloudItem]:
    path = folder / "train_test_split" / f"shuffled_{side}_file_list.json"
    listed = parse_json(_text(path, SHAPENET_PART), path)
    try:
        entries = [entry.split("/")[-2:] for entry in listed]
        items = [CloudItem(inside(folder, f"{synset}/{name}.txt"), synsets[synset]) for synset, name in entries]
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        raise UserError(f"{path} is not a list of shape_data/SYNSET/NAME ({error}); unpack it again") from None
    return _there(items, path)


def _there(items: list[CloudItem], listed: Path) -> list[CloudItem]:
    """These files; `UserError` if one that the list names is missing, or there is none."""
    missing = [item.path for item in items if not item.path.is_file()]
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
