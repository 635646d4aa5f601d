"""ShapeNet-part as it is published: shapenetcore_partanno_segmentation_benchmark_v0_normal."""

import json
from functools import partial
from pathlib import Path

import torch

from tokenmix.data.lookup import DataRequest
from tokenmix.errors import UserError
from tokenmix.tasks.points.data.cloud import Cloud, PackedClouds, PointData
from tokenmix.tasks.points.data.packing import CloudItem, kept, read_item

__all__ = ["PARTS", "load_shapenet_part"]

PARTS: dict[str, range] = {
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
NUM_PARTS = 50
LAYOUT = "synsetoffset2category.txt, train_test_split/shuffled_{train,val,test}_file_list.json and SYNSET/*.txt"


def load_shapenet_part(request: DataRequest) -> PointData:
    """ShapeNet-part in the published split, training and validation together for training.

    Every point of a file is kept, with its normal and its part; read once and kept in the cache.
    """
    folder = request.path
    if not folder.is_dir():
        raise UserError(
            f"shapenet-part needs a folder, got {request.variant!r}; give --data shapenet-part:PATH with {LAYOUT}"
        )
    classes, synsets = _categories(folder)
    train = _listed(folder, "train", synsets) + _listed(folder, "val", synsets)
    test = _listed(folder, "test", synsets)
    (train_set, test_set), skipped = kept(
        "shapenet-part", (train, test), request.root, partial(_checked, classes=classes)
    )
    parts = {name: list(PARTS[name]) for name in classes} if request.kind == "parts" else {}
    if request.kind == "clouds":
        train_set, test_set = _without_parts(train_set), _without_parts(test_set)
    names = _part_names() if request.kind == "parts" else []
    source = f"shapenet-part: {folder.resolve()}"
    return PointData(request.spec, train_set, test_set, classes, parts, names, True, source, skipped)


def _part_names() -> list[str]:
    """The published parts have numbers alone."""
    return [f"{name} {place}" for name, numbers in PARTS.items() for place in range(len(numbers))]


def _without_parts(clouds: PackedClouds) -> PackedClouds:
    return PackedClouds(clouds.points, clouds.ends, clouds.labels, clouds.names, normals=clouds.normals)


def _checked(item: CloudItem, *, classes: list[str]) -> Cloud:
    cloud = read_item(item)
    if cloud.parts is None or cloud.normals is None:
        raise UserError(f"{item.path} has no seven columns, x y z, normal and part; unpack it again")
    known = PARTS[classes[item.label]]
    outside = torch.nonzero((cloud.parts < known.start) | (cloud.parts >= known.stop)).flatten()
    if len(outside):
        part = int(cloud.parts[outside[0]])
        raise UserError(
            f"{item.path} has part {part}, but {classes[item.label]} has {known.start} to {known.stop - 1}; mend it"
        )
    return cloud


def _categories(folder: Path) -> tuple[list[str], dict[str, int]]:
    """Names of the classes, and the class of each synset's folder."""
    rows = [line.split() for line in _text(folder / "synsetoffset2category.txt").splitlines() if line.strip()]
    unknown = [" ".join(row) for row in rows if len(row) != 2 or row[0] not in PARTS]
    if unknown or not rows:
        raise UserError(
            f"{folder / 'synsetoffset2category.txt'} has {(unknown or ['nothing'])[0]!r} where a category of "
            f"ShapeNet-part and its synset belong; unpack it again"
        )
    rows.sort()
    return [row[0] for row in rows], {row[1]: label for label, row in enumerate(rows)}


def _listed(folder: Path, side: str, synsets: dict[str, int]) -> list[CloudItem]:
    path = folder / "train_test_split" / f"shuffled_{side}_file_list.json"
    try:
        entries = [entry.split("/")[-2:] for entry in json.loads(_text(path))]
        items = [CloudItem(folder / synset / f"{name}.txt", synsets[synset]) for synset, name in entries]
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} is no list of shape_data/SYNSET/NAME ({error}); unpack it again") from None
    missing = [item.path for item in items if not item.path.is_file()]
    if missing:
        raise UserError(
            f"{len(missing)} of {len(items)} files of {path.name} are missing, the first: {missing[0]}; unpack it again"
        )
    return items


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror}); ShapeNet-part needs {LAYOUT}") from None
