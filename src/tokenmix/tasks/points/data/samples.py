"""Clouds as batches: centred, scaled, thinned to one number of points, padded, and augmented as the papers do."""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from tokenmix.data.indexed import IndexedDataset
from tokenmix.errors import UserError
from tokenmix.tasks.points.data.cloud import NO_PART, Cloud, Clouds, check_cloud
from tokenmix.tasks.points.data.packing import unit_ball

__all__ = ["CloudSamples", "farthest"]


@dataclass
class _Row:
    """One cloud of a batch: float32 (N, 3), and (N, 3) or (N,) beside."""

    points: Tensor
    normals: Tensor | None
    parts: Tensor | None

    def take(self, places: Tensor) -> "_Row":
        return _Row(
            self.points[places],
            None if self.normals is None else self.normals[places],
            None if self.parts is None else self.parts[places],
        )


class CloudSamples(IndexedDataset):
    """Clouds whose batches are a function of (seed, epoch, index).

    Each is put about the mean of its points and scaled so that the farthest has distance 1. One with more than
    `num_points` is thinned; one with fewer is padded with zeros, which the mask tells. Then, per cloud: coordinates are
    multiplied by a factor for each axis, uniform in 1 / `scale`..`scale`; an offset for each axis, uniform in
    -`shift`..`shift`, is added; and each point becomes a copy of the first with a chance that is itself uniform in
    0..`point_dropout`. PointNet++ and PCT train with scale 3/2 and shift 0.2, and classification with dropout 0.875.

    Normals stay at right angles to a surface that was scaled: they are divided by the factors, and made length 1 again.
    The papers leave them as they were.

    Args:
        clouds: what is read.
        want: `parts` adds the part of each point to a batch.
        features: `xyz`, or `xyz+normals` for six numbers a point.
        num_points: N, of each cloud in a batch.
        choice: which points of a larger cloud: `first`, `random`, or `farthest`, each as far as can be from those
            before it.
        scale, shift, point_dropout: as above; the defaults change nothing.
        seed: of choice and augmentation.

    Raises:
        UserError: a setting out of its range; in reading, a cloud without the normals or parts that are asked for.
    """

    unit = "clouds"

    def __init__(
        self,
        clouds: Clouds,
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
        if num_points < 1:
            raise UserError(f"{num_points} points are not possible; give 1 or more")
        if scale < 1 or shift < 0 or not 0 <= point_dropout < 1:
            raise UserError(
                f"scale={scale:g}, shift={shift:g}, point_dropout={point_dropout:g} is not possible; "
                "scale is 1 or more, shift 0 or more, point_dropout in [0, 1)"
            )
        self.clouds, self.want, self.features, self.num_points = clouds, want, features, num_points
        self.choice, self.scale, self.shift, self.point_dropout = choice, scale, shift, point_dropout
        self.seed = seed

    def __len__(self) -> int:
        return len(self.clouds)

    def read(self, indices: Tensor, epoch: int) -> dict[str, Tensor]:
        """The batch of these clouds.

        Returns: `points` float32 (B, N, 3 or 6), `mask` bool (B, N), `label` int64 (B,), `index` int64 (B,), and for
            `parts` also `part` int64 (B, N), -100 where a row is padded.
        """
        clouds = [unit_ball(check_cloud(self.clouds.cloud(index))) for index in indices.tolist()]
        rows = self._thinned([self._row(cloud) for cloud in clouds], indices, epoch)
        rows = [self._augmented(row, self._rng(index, epoch, 1)) for row, index in zip(rows, indices.tolist())]
        width = 3 if self.features == "xyz" else 6
        points = torch.zeros(len(rows), self.num_points, width)
        mask = torch.zeros(len(rows), self.num_points, dtype=torch.bool)
        part = torch.full((len(rows), self.num_points), NO_PART)
        for i, row in enumerate(rows):
            count = len(row.points)
            points[i, :count, :3] = row.points
            if row.normals is not None:
                points[i, :count, 3:] = row.normals
            if row.parts is not None:
                part[i, :count] = row.parts
            mask[i, :count] = True
        label = torch.tensor([cloud.label for cloud in clouds], dtype=torch.int64)
        batch = {"points": points, "mask": mask, "label": label, "index": indices}
        return {**batch, "part": part} if self.want == "parts" else batch

    def _rng(self, index: int, epoch: int, purpose: int) -> np.random.Generator:
        return np.random.default_rng([abs(self.seed), epoch, index, purpose])

    def _row(self, cloud: Cloud) -> _Row:
        if self.features == "xyz+normals" and cloud.normals is None:
            raise UserError(f"{cloud.name} has no normals; give features xyz")
        if self.want == "parts" and cloud.parts is None:
            raise UserError(f"{cloud.name} does not say the parts of its points; it can be classified only")
        return _Row(
            cloud.points,
            cloud.normals if self.features == "xyz+normals" else None,
            cloud.parts if self.want == "parts" else None,
        )

    def _thinned(self, rows: list[_Row], indices: Tensor, epoch: int) -> list[_Row]:
        large = [i for i, row in enumerate(rows) if len(row.points) > self.num_points]
        if self.choice == "farthest" and large:
            chosen = farthest([rows[i].points for i in large], self.num_points)
        elif self.choice == "random":
            sizes = [(len(rows[i].points), int(indices[i])) for i in large]
            drawn = [self._rng(index, epoch, 0).permutation(size)[: self.num_points] for size, index in sizes]
            chosen = [torch.from_numpy(places) for places in drawn]
        else:
            chosen = [torch.arange(self.num_points)] * len(large)
        places = dict(zip(large, chosen))
        return [row.take(places[i]) if i in places else row for i, row in enumerate(rows)]

    def _augmented(self, row: _Row, rng: np.random.Generator) -> _Row:
        points, normals = row.points, row.normals
        if self.scale > 1:
            factors = torch.from_numpy(rng.uniform(1 / self.scale, self.scale, 3)).float()
            points = points * factors
            normals = None if normals is None else torch.nn.functional.normalize(normals / factors, dim=1)
        if self.shift:
            points = points + torch.from_numpy(rng.uniform(-self.shift, self.shift, 3)).float()
        row = _Row(points, normals, row.parts)
        if self.point_dropout:
            gone = rng.random(len(points)) < rng.uniform(0, self.point_dropout)
            row = row.take(torch.from_numpy(np.where(gone, 0, np.arange(len(points)))))
        return row


def farthest(clouds: list[Tensor], num_points: int) -> list[Tensor]:
    """Places of `num_points` points of each cloud (N, 3): the first, then each time the one farthest from those taken.

    All clouds at once; each must have at least `num_points`.
    """
    most = max(len(points) for points in clouds)
    stacked = torch.stack([torch.nn.functional.pad(points, (0, 0, 0, most - len(points))) for points in clouds])
    distance = torch.full((len(clouds), most), math.inf)
    for row, points in enumerate(clouds):
        # Padding is never the farthest.
        distance[row, len(points) :] = -1
    every = torch.arange(len(clouds))
    taken = torch.zeros(len(clouds), num_points, dtype=torch.int64)
    for step in range(1, num_points):
        last = stacked[every, taken[:, step - 1]]
        distance = torch.minimum(distance, (stacked - last[:, None]).square().sum(-1))
        taken[:, step] = distance.argmax(1)
    return list(taken)
