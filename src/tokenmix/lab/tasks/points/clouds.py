"""Point clouds, sets of clouds, and batches: centred, scaled, subsampled, padded, and augmented as in the papers."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tokenmix.errors import UserError
from tokenmix.lab.data.fetch import log
from tokenmix.lab.data.indexed import DataSet, IndexedDataset
from tokenmix.lab.data.lookup import load_data
from tokenmix.lab.data.reading import log_skipped
from tokenmix.lab.data.store import Names
from tokenmix.lab.registry import DATA_SETS

NO_PART = -100
"""Part of a padding point; cross-entropy's `ignore_index`."""


@dataclass(frozen=True)
class Cloud:
    """Points with their attributes."""

    points: Tensor  # float32 (N, 3)
    normals: Tensor | None = None  # float32 (N, 3) of length 1, or None
    colors: Tensor | None = None  # uint8 (N, 3), or None
    faces: Tensor | None = None  # int64 (F, 3), corners of triangles; None without a surface
    label: int = -1  # index of its class in `PointData.classes`; -1 if unknown
    parts: Tensor | None = None  # int64 (N,), the part of each point, or None
    name: str = ""  # its file, or another identifier


def check_cloud(cloud: Cloud) -> Cloud:
    """The cloud; `UserError` if it has no points, non-finite coordinates, or faces of absent points."""
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
        # Squares of very large or small numbers exceed the range of float32.
        points = cloud.points.double() - cloud.points.double().mean(0)
        radius = points.norm(dim=1).max()
        points = points / radius if radius > 0 else points
        return replace(cloud, points=points.float())
    return replace(cloud, points=points / radius)


@dataclass(frozen=True, kw_only=True)
class PackedClouds:
    """Clouds of any size, concatenated in memory."""

    points: Tensor  # floating (T, 3), of all clouds; `cloud` converts half precision to float32
    ends: Tensor  # int64 (M,), end of each cloud
    labels: Tensor  # int64 (M,), class of each cloud
    names: Names  # name of each cloud, for messages
    normals: Tensor | None = None  # floating (T, 3)
    parts: Tensor | None = None  # integers (T,)

    def __len__(self) -> int:
        return len(self.ends)

    def cloud(self, index: int) -> Cloud:
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
    """Clouds for training and testing; `parts` are the parts of each class, {} for classification."""

    parts: dict[str, list[int]] = field(default_factory=dict)
    part_names: list[str] = field(default_factory=list)

    @property
    def has_normals(self) -> bool:
        return self.train.normals is not None and self.test.normals is not None


def load_points(spec: str, *, want: Literal["class", "parts"] = "class", root: Path | None = None) -> PointData:
    """Training and test clouds of a data set.

    The choice of test clouds never depends on a seed.

    Args:
        spec: `clouds:PATH`, `modelnet:PATH`, `shapenet-part:PATH`, or a data set of a plug-in.
        want: label to learn, the class of a cloud or the part of each point.
        root: the cache; $TOKENMIX_DATA or ~/.cache/tokenmix/data if not given.

    Raises:
        UserError: unknown set, unusable folder, missing parts, a class only in the test set, or a data set that cannot
            be obtained.
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


class CloudSamples(IndexedDataset):
    """Clouds whose batches are a function of (seed, epoch, index).

    Each cloud is centred on the mean of its points and scaled to a farthest distance of 1. Clouds with more than
    `num_points` are subsampled (`choice`: the first, random, or farthest-point sampling). Smaller clouds are padded
    with zeros, which the mask excludes. Augmentation per cloud, which the defaults switch off:

    - A factor per axis, uniform in 1 / `scale`..`scale`, multiplies the coordinates.
    - An offset per axis, uniform in -`shift`..`shift`, is added.
    - Each point becomes a copy of the first with a probability, itself uniform in 0..`point_dropout`.

    PointNet++ and PCT train with scale 3/2 and shift 0.2, and classification with dropout 0.875.

    Normals stay perpendicular to a scaled surface: they are divided by the factors and normalised. The papers leave
    them unchanged. A cloud without the requested normals or parts is a `UserError`.
    """

    unit = "clouds"

    def __init__(
        self,
        clouds: PackedClouds,
        *,
        want: Literal["class", "parts"] = "class",
        features: Literal["xyz", "xyz+normals"] = "xyz",
        num_points: int = 1024,
        choice: Literal["first", "random", "farthest"] = "first",
        scale: float = 1.0,
        shift: float = 0.0,
        point_dropout: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.clouds, self.want, self.features, self.num_points = clouds, want, features, num_points
        self.choice, self.scale, self.shift, self.point_dropout = choice, scale, shift, point_dropout
        self.seed = seed
        self.farthest: dict[int, Tensor] = {}  # chosen points, the same in every epoch, sought once in each process

    def __len__(self) -> int:
        return len(self.clouds)

    def read(self, indices: Tensor, epoch: int) -> dict[str, Tensor]:
        """`points` float32 (B, N, 3 or 6), `mask` bool (B, N), `label` and `index` int64 (B,) of these clouds.

        For `parts` also `part` int64 (B, N), -100 at padding.
        """
        clouds = [unit_ball(check_cloud(self.clouds.cloud(index))) for index in indices.tolist()]
        new = {index: cloud.points for index, cloud in zip(indices.tolist(), clouds) if index not in self.farthest}
        asked = [*new]
        taken = choose_points([*new.values()], self.num_points, self.choice, lambda i: self._rng(asked[i], epoch, 0))
        known = self.farthest if self.choice == "farthest" else {}
        known.update(zip(asked, (places.int() for places in taken)))
        chosen = [known[index] for index in indices.tolist()]
        rows = []
        for cloud, kept, index in zip(clouds, chosen, indices.tolist()):
            row, rng = point_features(cloud, self.features)[kept], self._rng(index, epoch, 1)
            if self.scale > 1:
                row = scale_axes(row, torch.from_numpy(rng.uniform(1 / self.scale, self.scale, 3)).float())
            if self.shift:
                moved = row[:, :3] + torch.from_numpy(rng.uniform(-self.shift, self.shift, 3)).float()
                row = torch.cat([moved, row[:, 3:]], 1)
            if self.point_dropout:
                gone = rng.random(len(row)) < rng.uniform(0, self.point_dropout)
                chosen_points = torch.from_numpy(np.where(gone, 0, np.arange(len(row))))
                row, kept = row[chosen_points], kept[chosen_points]
            rows.append((row, kept))
        points = torch.zeros(len(rows), self.num_points, 3 if self.features == "xyz" else 6)
        mask = torch.zeros(len(rows), self.num_points, dtype=torch.bool)
        for i, (row, _) in enumerate(rows):
            points[i, : len(row)] = row
            mask[i, : len(row)] = True
        label = torch.tensor([cloud.label for cloud in clouds], dtype=torch.int64)
        batch = {"points": points, "mask": mask, "label": label, "index": indices}
        if self.want == "parts":
            batch["part"] = torch.full((len(rows), self.num_points), NO_PART)
            for cloud, part, (_, kept) in zip(clouds, batch["part"], rows):
                if cloud.parts is None:
                    raise UserError(f"{cloud.name} has no parts for its points; it can only be classified")
                part[: len(kept)] = cloud.parts[kept]
        return batch

    def _rng(self, index: int, epoch: int, purpose: int) -> np.random.Generator:
        return np.random.default_rng([abs(self.seed), epoch, index, purpose])


def point_features(cloud: Cloud, features: str) -> Tensor:
    """Input features of each point: (N, 3), or with normals (N, 6); `UserError` if there are no normals."""
    if features == "xyz":
        return cloud.points
    if cloud.normals is None:
        raise UserError(f"{cloud.name} has no normals, which {features} needs; give a mesh, add them, or train on xyz")
    return torch.cat([cloud.points, cloud.normals], 1)


def scale_axes(points: Tensor, factors: Tensor) -> Tensor:
    """Points (..., 3 or 6) with each axis multiplied; normals stay perpendicular to the surface."""
    coordinates, normals = points[..., :3] * factors, points[..., 3:]
    if not normals.shape[-1]:
        return coordinates
    return torch.cat([coordinates, F.normalize(normals / factors, dim=-1)], -1)


def choose_points(
    clouds: Sequence[Tensor], number: int, choice: str, rng_of: Callable[[int], np.random.Generator]
) -> list[Tensor]:
    """Indices of the points of each cloud (N, 3) that a network gets, at most `number`; all of a smaller cloud."""
    chosen = [torch.arange(min(len(points), number)) for points in clouds]
    large = [i for i, points in enumerate(clouds) if len(points) > number]
    if choice == "farthest" and large:
        for i, taken in zip(large, farthest([clouds[i] for i in large], number)):
            chosen[i] = taken
    elif choice == "random":
        for i in large:
            chosen[i] = torch.from_numpy(rng_of(i).permutation(len(clouds[i]))[:number])
    return chosen


def farthest(clouds: list[Tensor], num_points: int) -> list[Tensor]:
    """Farthest-point sampling from the first point: `num_points` indices of each cloud (N, 3), all clouds at once."""
    stacked = torch.nn.utils.rnn.pad_sequence(clouds, batch_first=True)
    distance = torch.full(stacked.shape[:2], math.inf)
    for row, points in zip(distance, clouds):
        # Padding is never the farthest.
        row[len(points) :] = -1
    every = torch.arange(len(clouds))
    taken = torch.zeros(len(clouds), num_points, dtype=torch.int64)
    for step in range(1, num_points):
        last = stacked[every, taken[:, step - 1]]
        distance = torch.minimum(distance, (stacked - last[:, None]).square().sum(-1))
        taken[:, step] = distance.argmax(1)
    return list(taken)
