"""Clouds as batches: centred, scaled, subsampled to one number of points, padded, and augmented as in the papers."""

import math
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tokenmix.errors import UserError
from tokenmix.lab.data.indexed import IndexedDataset
from tokenmix.lab.tasks.points.data.cloud import NO_PART, Cloud, PackedClouds, check_cloud, unit_ball


class CloudSamples(IndexedDataset):
    """Clouds whose batches are a function of (seed, epoch, index).

    Each is put about the mean of its points and scaled so that the farthest has distance 1. One with more than
    `num_points` is thinned; one with fewer is padded with zeros, which the mask leaves out. Then, per cloud:
    coordinates are multiplied by a factor for each axis, uniform in 1 / `scale`..`scale`; an offset for each axis,
    uniform in -`shift`..`shift`, is added; and each point becomes a copy of the first with a chance that is itself
    uniform in 0..`point_dropout`. PointNet++ and PCT train with scale 3/2 and shift 0.2, and classification with
    dropout 0.875.

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
        each = zip(clouds, self._chosen(clouds, indices, epoch), indices.tolist())
        rows = [self._augmented(point_features(c, self.features), kept, self._rng(i, epoch, 1)) for c, kept, i in each]
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

    def _chosen(self, clouds: list[Cloud], indices: Tensor, epoch: int) -> list[Tensor]:
        """Which points of each cloud are kept."""
        large = [i for i, cloud in enumerate(clouds) if len(cloud.points) > self.num_points]
        chosen = [torch.arange(min(len(cloud.points), self.num_points)) for cloud in clouds]
        if self.choice == "farthest" and large:
            for i, places in zip(large, farthest([clouds[i].points for i in large], self.num_points)):
                chosen[i] = places
        elif self.choice == "random":
            for i in large:
                order = self._rng(int(indices[i]), epoch, 0).permutation(len(clouds[i].points))
                chosen[i] = torch.from_numpy(order[: self.num_points])
        return chosen

    def _augmented(self, row: Tensor, kept: Tensor, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        """The kept points of a row (N, 3 or 6), scaled, moved and dropped, and which they are."""
        row = row[kept]
        if self.scale > 1:
            row = scale_axes(row, torch.from_numpy(rng.uniform(1 / self.scale, self.scale, 3)).float())
        if self.shift:
            moved = row[:, :3] + torch.from_numpy(rng.uniform(-self.shift, self.shift, 3)).float()
            row = torch.cat([moved, row[:, 3:]], 1)
        if self.point_dropout:
            gone = rng.random(len(row)) < rng.uniform(0, self.point_dropout)
            places = torch.from_numpy(np.where(gone, 0, np.arange(len(row))))
            row, kept = row[places], kept[places]
        return row, kept


def point_features(cloud: Cloud, features: str) -> Tensor:
    """Input features of each point: (N, 3), or with its normal (N, 6); `UserError` if there are no normals."""
    if features == "xyz":
        return cloud.points
    if cloud.normals is None:
        raise UserError(f"{cloud.name} has no normals, which {features} needs; give a mesh, add them, or train on xyz")
    return torch.cat([cloud.points, cloud.normals], 1)


def scale_axes(points: Tensor, factors: Tensor) -> Tensor:
    """Points (..., 3 or 6) with each axis multiplied; normals stay at right angles to the surface."""
    coordinates, normals = points[..., :3] * factors, points[..., 3:]
    if not normals.shape[-1]:
        return coordinates
    return torch.cat([coordinates, F.normalize(normals / factors, dim=-1)], -1)


def farthest(clouds: list[Tensor], num_points: int) -> list[Tensor]:
    """Places of `num_points` points of each cloud (N, 3): the first, then each time the one farthest from those taken.

    All clouds at once; each must have at least `num_points`.
    """
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
