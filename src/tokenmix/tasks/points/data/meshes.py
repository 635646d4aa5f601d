"""Meshes by trimesh: OFF and OBJ files, and points on a surface."""

import io
import warnings
from typing import Any

import numpy as np
import torch

from tokenmix.errors import UserError, needs
from tokenmix.tasks.points.data.cloud import Cloud

__all__ = ["parse_obj", "parse_off", "sampled"]


def parse_off(content: bytes, name: str) -> dict[str, np.ndarray]:
    """`points` and triangles `faces` of an OFF file; ModelNet's, whose counts follow `OFF` on the same line, as well.

    trimesh takes a cut file for a whole one, leaves out a face that lacks a corner and fails at one of five corners; so
    it is given counted triangles.

    Raises:
        UserError: no OFF, fewer lines than its header announces, or a line that is no vertex or face.
    """
    lines = [line for raw in _text(content).splitlines() if (line := raw.partition("#")[0].strip())]
    if not lines or not lines[0].startswith("OFF"):
        raise UserError(f"{name} does not begin with OFF; write it again as OFF")
    lines = [line for line in (lines[0].removeprefix("OFF").strip(), *lines[1:]) if line]
    try:
        vertices, faces = (int(word) for word in lines[0].split()[:2])
    except (IndexError, ValueError):
        raise UserError(f"{name} has no counts of vertices and faces after OFF; write it again as OFF") from None
    if min(vertices, faces) < 0 or len(lines) < 1 + vertices + faces:
        raise UserError(
            f"{name} announces {vertices} vertices and {faces} faces, but has {len(lines) - 1} lines of them; "
            "copy it again"
        )
    triangles: list[str] = []
    for line in lines[1 + vertices : 1 + vertices + faces]:
        size, *corners = line.split()
        if not size.isdecimal() or len(size) > 9 or len(corners) < int(size):
            raise UserError(f"{name} has the line {line[:60]!r}, which is not a face; correct it")
        triangles += [f"3 {corners[0]} {corners[i]} {corners[i + 1]}" for i in range(1, int(size) - 1)]
    rows = ["OFF", f"{vertices} {len(triangles)} 0", *lines[1 : 1 + vertices], *triangles]
    return _loaded(rows, "off", name) if vertices else {"points": np.zeros((0, 3))}


def parse_obj(content: bytes, name: str) -> dict[str, np.ndarray]:
    """`points`, `colors` if vertices have them, and triangles `faces` of an OBJ file; textures and groups are left out.

    trimesh counts a number below 0 back from the end of the file, not from the face, and takes 0 for 1: it is given
    the places of corners from the front.

    Raises:
        UserError: a vertex or a face that is none.
    """
    vertices: list[str] = []
    faces: list[list[int]] = []
    # A line that ends in a backslash continues in the next.
    for line in _text(content).replace("\\\r\n", " ").replace("\\\n", " ").splitlines():
        kind, *words = line.partition("#")[0].split() or [""]
        try:
            if kind == "v":
                vertices.append("v {} {} {} ".format(*words[:3]) + " ".join(words[3:]))
            elif kind == "f" and (places := [int(word.partition("/")[0]) for word in words])[2:]:
                faces.append([place if place > 0 else len(vertices) + 1 + place for place in places])
        except (ValueError, IndexError):
            raise UserError(
                f"{name} has the line {line.strip()[:60]!r}, which is neither vertex nor face; correct it"
            ) from None
    outside = next((place for places in faces for place in places if not 1 <= place <= len(vertices)), None)
    if outside is not None:
        raise UserError(
            f"{name}: a face names vertex {outside}, but there are {len(vertices)}, counted from 1; write it again"
        )
    rows = [*vertices, *(" ".join(["f", *map(str, places)]) for places in faces)]
    return _loaded(rows, "obj", name) if vertices else {"points": np.zeros((0, 3))}


def _text(content: bytes) -> str:
    return content.decode("utf-8", "replace")


def _loaded(rows: list[str], kind: str, name: str) -> dict[str, np.ndarray]:
    trimesh = _trimesh(name)
    try:
        with warnings.catch_warnings():
            # Of a word where a number belongs numpy warns alone.
            warnings.filterwarnings("error", "string or file could not be read", DeprecationWarning)
            scene = trimesh.load_scene(io.BytesIO("\n".join(rows).encode()), kind, process=False, maintain_order=True)
        (mesh,) = scene.geometry.values()
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"{name} is not {kind.upper()} that trimesh can read ({reason}); correct it") from None
    faces = np.asarray(getattr(mesh, "faces", ()))
    found = {"points": np.asarray(mesh.vertices), **({"faces": faces} if len(faces) else {})}
    if mesh.visual.kind == "vertex" and len(mesh.visual.vertex_colors) == len(mesh.vertices):
        found["colors"] = np.asarray(mesh.visual.vertex_colors)[:, :3]
    return found


def _trimesh(name: str) -> Any:
    with needs(f"the mesh {name}"):
        import trimesh
    return trimesh


def sampled(cloud: Cloud, num_points: int, seed: int = 0) -> Cloud:
    """The surface of a cloud with faces as `num_points` points with normals; a cloud without faces as it is.

    Points lie evenly by area, with the normals of their faces: they point to where the corners run anticlockwise.
    Colours of vertices are mixed by the place in the triangle; the part is that of the corner with the largest share.

    Raises:
        UserError: fewer than one point is asked for, or no face has an area.
    """
    if num_points < 1:
        raise UserError(f"{num_points} points are not possible; give 1 or more")
    if cloud.faces is None or not len(cloud.faces):
        return cloud
    trimesh = _trimesh(cloud.name)
    mesh = trimesh.Trimesh(cloud.points.numpy(), cloud.faces.numpy(), process=False)
    if not mesh.area > 0:
        raise UserError(f"{cloud.name}: none of the {len(cloud.faces)} faces has an area; give a mesh with a surface")
    points, place = trimesh.sample.sample_surface(mesh, num_points, seed=abs(seed))
    points = np.asarray(points)
    # Not mesh.face_normals, which are 0 for triangles of less than 1e-12.
    normals = mesh.triangles_cross[place]
    normals /= np.linalg.norm(normals, axis=1, keepdims=True)
    colors = parts = None
    if cloud.colors is not None or cloud.parts is not None:
        corners = torch.from_numpy(np.asarray(mesh.faces)[place])
        weights = torch.from_numpy(trimesh.triangles.points_to_barycentric(mesh.triangles[place], points))
        if cloud.colors is not None:
            colors = (weights[:, None] @ cloud.colors[corners].double())[:, 0].round().clamp(0, 255).byte()
        if cloud.parts is not None:
            parts = cloud.parts[corners.gather(1, weights.argmax(1, keepdim=True))[:, 0]]
    return Cloud(
        torch.from_numpy(points).float(),
        torch.from_numpy(normals).float(),
        colors,
        label=cloud.label,
        parts=parts,
        name=cloud.name,
    )
