"""Clouds and meshes from files, told by their ending: PLY, OFF, OBJ, NPZ, NPY, XYZ, TXT, CSV."""

import io
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from tokenmix.errors import UserError
from tokenmix.tasks.points.data.cloud import Cloud, check_cloud
from tokenmix.tasks.points.data.ply import parse_ply
from tokenmix.tasks.points.data.surface import sampled
from tokenmix.tasks.points.data.text_formats import named_columns, parse_obj, parse_off, parse_table

__all__ = ["ENDINGS", "NUM_POINTS", "read_points"]

NUM_POINTS = 2048
POINT_KEYS = ("points", "xyz", "pos", "vertices")


def read_points(
    path: str | Path,
    *,
    surface: Literal["sample", "keep"] = "sample",
    num_points: int = NUM_POINTS,
    seed: int = 0,
    centred: bool = False,
) -> Cloud:
    """The cloud in a file; of a mesh, points on its surface.

    Args:
        path: .ply, .off, .obj, .npz (`points`, and perhaps `normals`, `colors`, `faces`, `parts`), .npy, or text of
            numbers in .xyz, .txt, .csv or .pts.
        surface: `sample` draws points from the surface of a mesh, evenly by area, with normals; `keep` gives its
            vertices and faces. A cloud without faces is given as it is.
        num_points: how many points are drawn from a surface.
        seed: of that draw.
        centred: put the points, or the corners of a mesh, about their middle before they become float32, which has
            steps of half a metre at the coordinates of a map's zone.

    Raises:
        UserError: no such file, an unknown ending, a damaged file, no points, or a coordinate that is no number.
    """
    path = Path(path)
    if path.is_dir():
        raise UserError(f"{path} is a folder; name the files in it, for example {path / '*.ply'}")
    parse = PARSERS.get(path.suffix.lower())
    if parse is None:
        raise UserError(f"{path} has an ending that is no cloud's; give one of {', '.join(ENDINGS)}")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror}); give a file that exists") from None
    if not content:
        raise UserError(f"{path} is empty; copy it again")
    columns = parse(content, str(path))
    if centred:
        columns = {**columns, "points": _centred(columns["points"])}
    cloud = check_cloud(_cloud(columns, str(path)))
    return sampled(cloud, num_points, seed) if surface == "sample" else cloud


def _cloud(columns: Mapping[str, np.ndarray], name: str) -> Cloud:
    """Columns under the names of `Cloud`, in its types."""
    points = columns["points"]
    faces, parts, colors = columns.get("faces"), columns.get("parts"), columns.get("colors")
    return Cloud(
        _floats(points),
        _unit(columns.get("normals")),
        None if colors is None else torch.from_numpy((np.nan_to_num(colors).clip(0, 1) * 255).round().astype(np.uint8)),
        None if faces is None else torch.from_numpy(np.ascontiguousarray(faces, dtype=np.int64)),
        parts=None if parts is None else torch.from_numpy(parts.astype(np.int64)),
        name=name,
    )


def _centred(points: np.ndarray) -> np.ndarray:
    # Without those that are no numbers, which are still to be told one by one.
    numbers = points[np.isfinite(points).all(1)].astype(np.float64)
    return points - numbers.mean(0) if len(numbers) else points


def _floats(values: np.ndarray) -> Tensor:
    # What is too large for float32 becomes infinite, which is then told as no number.
    with np.errstate(over="ignore"):
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))


def _unit(normals: np.ndarray | None) -> Tensor | None:
    return None if normals is None else torch.nn.functional.normalize(_floats(normals), dim=1)


def _ply(content: bytes, name: str) -> dict[str, np.ndarray]:
    columns = parse_ply(content, name)
    found = {}
    for key, group in (("points", ("x", "y", "z")), ("normals", ("nx", "ny", "nz"))):
        if all(c in columns for c in group):
            found[key] = np.stack([columns[c] for c in group], axis=1)
    if "points" not in found:
        raise UserError(f"{name} has vertices without x, y and z; write it again with them")
    for group in (("red", "green", "blue"), ("r", "g", "b"), ("diffuse_red", "diffuse_green", "diffuse_blue")):
        if all(c in columns for c in group):
            found["colors"] = _shares(np.stack([columns[c] for c in group], axis=1))
            break
    return found | {key: columns[key] for key in ("faces",) if key in columns}


def _obj(content: bytes, name: str) -> dict[str, np.ndarray]:
    found = parse_obj(content, name)
    return found | ({"colors": _shares(found["colors"])} if "colors" in found else {})


def _shares(colors: np.ndarray) -> np.ndarray:
    """Colours as shares in 0..1: integers are of their type's range, floating numbers above 1 of 255."""
    if colors.dtype.kind in "ui":
        return colors / np.iinfo(colors.dtype).max
    return colors / 255 if len(colors) and (colors > 1).any() else colors


def _arrays(content: bytes, name: str) -> dict[str, np.ndarray]:
    try:
        loaded = np.load(io.BytesIO(content), allow_pickle=False)
        stored = {"points": loaded} if isinstance(loaded, np.ndarray) else {key: loaded[key] for key in loaded.files}
    except (ValueError, EOFError, OSError, zipfile.BadZipFile, KeyError) as error:
        raise UserError(f"{name} is no readable array ({str(error).splitlines()[0]}); save it again") from None
    key = next((key for key in POINT_KEYS if key in stored), None)
    if key is None:
        raise UserError(f"{name} holds {', '.join(sorted(stored)) or 'nothing'}; save the points as 'points'")
    points = stored[key]
    if points.ndim != 2 or points.shape[1] not in (3, 6, 7) or points.dtype.kind not in "fiu":
        raise UserError(
            f"{name} has points of shape {points.shape} and type {points.dtype}; save numbers of shape (N, 3)"
        )
    found = named_columns(points.astype(np.float64), name) if len(points) else {"points": points[:, :3]}
    return found | _beside(stored, len(points), name)


def _beside(stored: Mapping[str, np.ndarray], count: int, name: str) -> dict[str, np.ndarray]:
    """What an archive says about its points."""
    found = {}
    for key, shape in (("normals", (count, 3)), ("colors", (count, 3)), ("parts", (count,)), ("faces", None)):
        if key not in stored:
            continue
        values = stored[key]
        fits = values.ndim == 2 and values.shape[1] == 3 if shape is None else values.shape == shape
        if not fits or values.dtype.kind not in ("iu" if key in ("parts", "faces") else "fiu"):
            wanted = "(F, 3) integers" if shape is None else f"{shape} numbers"
            raise UserError(f"{name} has {key} of shape {values.shape} and type {values.dtype}; save {wanted}")
        found[key] = _shares(values) if key == "colors" else values
    return found


PARSERS = {
    ".ply": _ply,
    ".off": parse_off,
    ".obj": _obj,
    ".npz": _arrays,
    ".npy": _arrays,
    ".xyz": parse_table,
    ".txt": parse_table,
    ".csv": parse_table,
    ".pts": parse_table,
}
ENDINGS = tuple(PARSERS)
