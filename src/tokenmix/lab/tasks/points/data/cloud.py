"""A point cloud with what is known about it, and sets of clouds."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from tokenmix.errors import UserError
from tokenmix.lab.data.fetch import log
from tokenmix.lab.data.indexed import DataSet
from tokenmix.lab.data.lookup import load_data
from tokenmix.lab.data.reading import log_skipped
from tokenmix.lab.data.store import Names
from tokenmix.lab.registry import DATA_SETS

NO_PART = -100
"""Part of a point that is only padding: cross-entropy's own number for what is neither learned nor counted."""


@dataclass(frozen=True)
class Cloud:
    """Points, and their attributes from a file or a data set.

    Attributes:
        points: float32 (N, 3).
        normals: float32 (N, 3) of length 1, or None if not known.
        colors: uint8 (N, 3), or None.
        faces: int64 (F, 3), corners of triangles; None for a cloud without a surface.
        label: index of its class in `PointData.classes`; -1 if not known.
        parts: int64 (N,), the part that each point belongs to, or None.
        name: its file, or another identifier.
    """

    points: Tensor
    normals: Tensor | None = None
    colors: Tensor | None = None
    faces: Tensor | None = None
    label: int = -1
    parts: Tensor | None = None
    name: str = ""


def check_cloud(cloud: Cloud) -> Cloud:
    """The cloud itself; `UserError` if it has no points, a coordinate that is not finite, or faces of absent points."""
    count = len(cloud.points)
    if not count:
        raise UserError(f"{cloud.name} has no points; give a file with at least one")
    for what, values in (("point", cloud.points), ("normal", cloud.normals)):
        bad = None if values is None else torch.nonzero(~values.isfinite().all(1)).flatten()
        if bad is not None and len(bad):
            raise UserError(
                f"{cloud.name}: {what} {int(bad[0]) + 1} of {count} is not finite ({len(bad)} in all); "
                "remove such points"
            )
    faces = cloud.faces
    if faces is not None and len(faces) and not 0 <= int(faces.min()) <= int(faces.max()) < count:
        bad_corner = int(faces.max() if int(faces.max()) >= count else faces.min())
        raise UserError(
            f"{cloud.name}: a face refers to vertex {bad_corner}, but there are {count}, counted from 0; the file is "
            "damaged: export it again"
        )
    return cloud


def unit_ball(cloud: Cloud) -> Cloud:
    """The cloud centred on the mean of its points, with the farthest at distance 1; a single point is at 0."""
    points = cloud.points - cloud.points.mean(0)
    radius = points.norm(dim=1).max()
    if not 0 < radius < torch.inf:
        # Squares of very large or small numbers leave the range of float32.
        points = cloud.points.double() - cloud.points.double().mean(0)
        radius = points.norm(dim=1).max()
        points = points / radius if radius > 0 else points
        return replace(cloud, points=points.float())
    return replace(cloud, points=points / radius)


@dataclass(frozen=True, kw_only=True)
class PackedClouds:
    """Clouds of any size, one after the other in memory.

    Attributes:
        points: floating (T, 3), of all clouds; half precision is made float32 when a cloud is taken out.
        ends: int64 (M,), where each cloud ends.
        labels: int64 (M,), the class of each cloud.
        names: of each cloud, for messages.
        normals: floating (T, 3), or None.
        parts: integers (T,), or None.
    """

    points: Tensor
    ends: Tensor
    labels: Tensor
    names: Names
    normals: Tensor | None = None
    parts: Tensor | None = None

    def __len__(self) -> int:
        return len(self.ends)

    def cloud(self, index: int) -> Cloud:
        """The cloud with this index, neither scaled nor thinned."""
        where = slice(int(self.ends[index - 1]) if index else 0, int(self.ends[index]))
        return Cloud(
            self.points[where].float(),
            None if self.normals is None else self.normals[where].float(),
            label=int(self.labels[index]),
            parts=None if self.parts is None else self.parts[where].long(),
            name=self.names[index],
        )


@dataclass(frozen=True)
class PointData(DataSet[PackedClouds]):
    """Clouds for training and testing.

    Attributes:
        parts: for each class the parts that its clouds may have; empty if only classes are wanted.
        part_names: name of each part.
        has_normals: every cloud has normals.
    """

    parts: dict[str, list[int]] = field(default_factory=dict)
    part_names: list[str] = field(default_factory=list)
    has_normals: bool = False


def load_points(spec: str, *, want: Literal["class", "parts"] = "class", root: Path | None = None) -> PointData:
    """Training and test clouds of a data set.

    Which are for testing never depends on a seed.

    Args:
        spec: `clouds:PATH`, `modelnet:PATH`, `shapenet-part:PATH`, or a data set that a plug-in registered.
        want: what is to be learned, the class of a cloud or the part of each point.
        root: the cache; $TOKENMIX_DATA or ~/.cache/tokenmix/data if not given.

    Raises:
        UserError: unknown set, unusable folder, no parts where they are wanted, a class that is in the test set alone,
            or a data set that cannot be obtained.
    """
    data: PointData = load_data(spec, "parts" if want == "parts" else "clouds", root=root)
    log_skipped(data.skipped, f" of {spec}")
    if DATA_SETS[spec.partition(":")[0]].variant != "path":
        return data
    learnt, tested = (set(side.labels.tolist()) for side in (data.train, data.test))
    for label, name in enumerate(data.classes):
        if label in tested - learnt:
            raise UserError(
                f"{spec} has clouds of {name!r} for testing, and none that can be read for training; fix its files, or "
                "remove the class"
            )
        if label not in tested:
            found = "no cloud of {!r} for testing: it is not measured" if label in learnt else "no cloud of {!r} at all"
            log(f"{spec} has {found.format(name)}")
    return data
