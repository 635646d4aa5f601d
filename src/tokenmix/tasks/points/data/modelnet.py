"""ModelNet40 and ModelNet10 as they are published: OFF meshes in folders, or the text files of resampled points."""

from dataclasses import replace
from pathlib import Path

from tokenmix.data.lookup import DataRequest
from tokenmix.errors import UserError
from tokenmix.tasks.points.data.cloud import Cloud, PointData
from tokenmix.tasks.points.data.files import NUM_POINTS
from tokenmix.tasks.points.data.packing import CloudItem, kept, read_item

__all__ = ["load_modelnet"]

LAYOUT = (
    "CLASS/train/*.off and CLASS/test/*.off, or modelnet40_normal_resampled with modelnet40_shape_names.txt, "
    "modelnet40_train.txt and CLASS/*.txt"
)


def load_modelnet(request: DataRequest) -> PointData:
    """ModelNet in the published split, each cloud of 2,048 points with normals, read once and kept in the cache.

    Of a mesh they lie on its surface, evenly by area. Of the 10,000 points of a resampled file they are the first, as
    in the published programs.
    """
    folder = request.path
    if not folder.is_dir():
        raise UserError(f"modelnet needs a folder, got {request.variant!r}; give --data modelnet:PATH with {LAYOUT}")
    listed = sorted(folder.glob("modelnet*_shape_names.txt"))
    classes, train, test = _resampled(folder, listed) if listed else _meshes(folder)
    (train_set, test_set), skipped = kept("modelnet", (train, test), request.root, _first)
    normals = train_set.normals is not None and test_set.normals is not None
    source = f"modelnet: {folder.resolve()}, {NUM_POINTS} points each"
    return PointData(request.spec, train_set, test_set, classes, {}, [], normals, source, skipped)


def _first(item: CloudItem) -> Cloud:
    cloud = read_item(item)
    normals = None if cloud.normals is None else cloud.normals[:NUM_POINTS]
    return replace(cloud, points=cloud.points[:NUM_POINTS], normals=normals)


def _meshes(folder: Path) -> tuple[list[str], list[CloudItem], list[CloudItem]]:
    classes = sorted(path.name for path in folder.iterdir() if (path / "train").is_dir())
    if len(classes) < 2:
        raise UserError(f"{folder} has {len(classes)} classes of ModelNet; it needs {LAYOUT}")
    sides = []
    for side in ("train", "test"):
        items = [
            CloudItem(p, i) for i, name in enumerate(classes) for p in sorted((folder / name / side).glob("*.off"))
        ]
        if not items:
            raise UserError(f"{folder} has no .off file for {side}; it needs {LAYOUT}")
        sides.append(items)
    return classes, sides[0], sides[1]


def _resampled(folder: Path, listed: list[Path]) -> tuple[list[str], list[CloudItem], list[CloudItem]]:
    # A folder has the lists of both; the larger set is meant.
    names = next((path for path in listed if path.name.startswith("modelnet40")), listed[0])
    kind = names.name.partition("_")[0]
    classes = _words(names)
    sides = []
    for side in ("train", "test"):
        items = []
        for shape in _words(folder / f"{kind}_{side}.txt"):
            name = shape.rpartition("_")[0]
            if name not in classes:
                raise UserError(f"{kind}_{side}.txt names {shape!r}, whose class is not in {names.name}; mend it")
            items.append(CloudItem(folder / name / f"{shape}.txt", classes.index(name)))
        missing = [item.path for item in items if not item.path.is_file()]
        if missing or not items:
            first = f", the first: {missing[0]}" if missing else ""
            raise UserError(
                f"{len(missing)} of {len(items)} files of {kind}_{side}.txt are missing{first}; unpack again"
            )
        sides.append(items)
    return classes, sides[0], sides[1]


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror}); unpack ModelNet again") from None
