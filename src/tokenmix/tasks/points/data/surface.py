"""Points on the surface of a mesh, evenly by area, with the normals of the faces they lie on."""

from dataclasses import dataclass

import numpy as np
import torch

from tokenmix.errors import UserError
from tokenmix.tasks.points.data.cloud import Cloud

__all__ = ["OnSurface", "fan", "on_surface", "sampled"]


@dataclass(frozen=True)
class OnSurface:
    """Points on triangles.

    Attributes:
        points, normals: float64 (N, 3).
        triangle: int64 (N,), which triangle each lies on.
        weights: float64 (N, 3), shares of its corners.
    """

    points: np.ndarray
    normals: np.ndarray
    triangle: np.ndarray
    weights: np.ndarray


def on_surface(corners: np.ndarray, num_points: int, rng: np.random.Generator) -> OnSurface | None:
    """`num_points` points on triangles (T, 3, 3), each part of the surface with the same chance; None without area.

    A triangle is drawn by its area; in it (1 - sqrt(u)) a + sqrt(u) (1 - v) b + sqrt(u) v c with u, v uniform is
    uniform. The normal is (b - a) x (c - a), so it points to where the corners run anticlockwise.
    """
    corners = np.asarray(corners, dtype=np.float64)
    cross = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
    length = np.linalg.norm(cross, axis=1)
    ends = np.cumsum(length)
    if not len(ends) or not ends[-1] > 0:
        return None
    # A draw is below the total, but may round up to it: the last triangle with area takes it.
    triangle = np.searchsorted(ends, rng.random(num_points) * ends[-1], side="right")
    triangle = np.minimum(triangle, np.flatnonzero(length)[-1])
    root, second = np.sqrt(rng.random(num_points)), rng.random(num_points)
    weights = np.stack([1 - root, root * (1 - second), root * second], axis=1)
    points = np.einsum("nk,nkd->nd", weights, corners[triangle])
    return OnSurface(points, cross[triangle] / length[triangle, None], triangle, weights)


def fan(polygons: np.ndarray) -> np.ndarray:
    """Polygons (P, K) as triangles ((K - 2) * P, 3) about their first corner, in the order of the polygons."""
    corners = np.arange(1, polygons.shape[1] - 1)
    triangles = np.stack([np.zeros_like(corners), corners, corners + 1], axis=1)
    return polygons[:, triangles].reshape(-1, 3)


def sampled(cloud: Cloud, num_points: int, seed: int = 0) -> Cloud:
    """The surface of a cloud with faces as `num_points` points with normals; a cloud without faces as it is.

    Colours of vertices are mixed by the place in the triangle; the part is that of the corner with the largest share.

    Raises:
        UserError: fewer than one point is asked for, or no face has an area.
    """
    if num_points < 1:
        raise UserError(f"{num_points} points are not possible; give 1 or more")
    if cloud.faces is None or not len(cloud.faces):
        return cloud
    corners = cloud.points.numpy()[cloud.faces.numpy()]
    found = on_surface(corners, num_points, np.random.default_rng(abs(seed)))
    if found is None:
        raise UserError(f"{cloud.name}: none of the {len(cloud.faces)} faces has an area; give a mesh with a surface")
    colors = None
    if cloud.colors is not None:
        ends = cloud.colors.numpy()[cloud.faces.numpy()[found.triangle]]
        colors = torch.from_numpy(np.einsum("nk,nkd->nd", found.weights, ends).round().astype(np.uint8))
    parts = None
    if cloud.parts is not None:
        corner = cloud.faces.numpy()[found.triangle, found.weights.argmax(1)]
        parts = cloud.parts[torch.from_numpy(corner)]
    return Cloud(
        torch.from_numpy(found.points.astype(np.float32)),
        torch.from_numpy(found.normals.astype(np.float32)),
        colors,
        label=cloud.label,
        parts=parts,
        name=cloud.name,
    )
