"""Clouds and meshes from files, by extension: PLY, OFF, OBJ, NPZ, NPY, XYZ, TXT, CSV; surfaces by trimesh."""

import codecs
import io
import math
import re
import warnings
import zipfile
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Literal

import numpy as np
import torch
from torch import Tensor

from tokenmix.errors import UserError, needs
from tokenmix.lab.data.reading import read_file
from tokenmix.lab.tasks.points.clouds import Cloud, check_cloud
from tokenmix.lab.tasks.points.ply import parse_ply

NUM_POINTS = 2048
# Compression limit: zeros pack a thousand to one, coordinates about ten to one; small arrays may be zeros.
LARGE, DENSEST = 1 << 26, 100
_ORDERS = ("x y z nx ny nz part", "x y z r g b label", "x y z red green blue part")
COLUMNS = {name: i for names in _ORDERS for i, name in enumerate(names.split())}
"""Where a table has the columns of these names."""
_POINT_KEYS = ("points", "xyz", "pos", "vertices")


def read_points(
    path: str | Path,
    *,
    surface: Literal["sample", "keep"] = "sample",
    num_points: int = NUM_POINTS,
    seed: int = 0,
    centred: bool = False,
) -> Cloud:
    """The cloud in a file; for a mesh, points on its surface.

    Args:
        path: .ply, .off, .obj, .npz (`points`, and optionally `normals`, `colors`, `faces`, `parts`), .npy, or text of
            numbers in .xyz, .txt, .csv or .pts.
        surface: `sample` draws points from the surface of a mesh, uniformly by area, with normals; `keep` returns
            vertices and faces. A cloud without faces is returned unchanged.
        num_points: number of points drawn from a surface.
        seed: seed of the draw.
        centred: centre points, or corners of a mesh, before the conversion to float32, whose resolution is half a metre
            at the coordinates of a map's zone.

    Raises:
        UserError: no such file, an unknown ending, a damaged file, no points, a coordinate that is NaN or infinite, or
            a mesh without trimesh installed.
    """
    path = Path(path)
    kind = path.suffix.lower()
    if kind not in _PARSERS and not path.is_dir():
        raise UserError(f"{path} has an unknown suffix for a point cloud; give one of {', '.join(ENDINGS)}")
    content = read_file(path)
    try:
        columns = _PARSERS[kind](content, str(path))
    except MemoryError:
        raise UserError(f"{path} declares more data than fits into memory; copy it again, or cut it") from None
    if centred:
        # Centred on the finite points; `check_cloud` reports the others one by one.
        points = columns["points"]
        numbers = points[np.isfinite(points).all(1)].astype(np.float64)
        columns = {**columns, "points": points - numbers.mean(0) if len(numbers) else points}
    normals, colors, faces, parts = (columns.get(key) for key in ("normals", "colors", "faces", "parts"))
    faces = None if faces is None or not len(faces) else faces
    cloud = Cloud(
        _floats(columns["points"]),
        None if normals is None else torch.nn.functional.normalize(_floats(normals), dim=1),
        None if colors is None else _bytes(colors),
        None if faces is None else torch.from_numpy(np.ascontiguousarray(faces, dtype=np.int64)),
        parts=None if parts is None else torch.from_numpy(parts.astype(np.int64)),
        name=str(path),
    )
    check_cloud(cloud)
    return sampled(cloud, num_points, seed) if surface == "sample" else cloud


def _floats(values: np.ndarray) -> Tensor:
    # Values too large for float32 become infinite, which `check_cloud` reports.
    with np.errstate(over="ignore"):
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))


def _bytes(colors: np.ndarray) -> Tensor:
    """Colours as 0 to 255, from the smallest range that contains them, since programs write 0 to 255 in any type.

    Integer ranges are 255, 65,535 and that of the type. The floating range is 1 unless a value reaches 2, since
    interpolated colours may overshoot.
    """
    colors = np.nan_to_num(colors, posinf=0, neginf=0)
    highest = colors.max(initial=0)
    floating = colors.dtype.kind == "f"
    ranges = sorted((255, 65535, max(highest, 65535) if floating else np.iinfo(colors.dtype).max))
    scale = 1 if floating and highest < 2 else next(limit for limit in ranges if highest <= limit)
    return torch.from_numpy(((colors / scale).clip(0, 1) * 255).round().astype(np.uint8))


def _arrays(content: bytes, name: str) -> dict[str, np.ndarray]:
    """Arrays of an archive, or one array with the columns of a table."""
    stored: dict[str, np.ndarray] = {}
    try:
        if content.startswith(b"PK"):
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                whole = 0
                for info in archive.infolist():
                    whole += info.file_size
                    if whole > max(LARGE, DENSEST * len(content)):
                        raise ValueError(f"{info.filename} declares {info.file_size} bytes in {len(content)}")
                    with archive.open(info) as member:
                        stored[info.filename.removesuffix(".npy")] = _array(member, info.file_size)
        else:
            stored["points"] = _array(io.BytesIO(content), len(content))
    except MemoryError:
        raise
    except Exception as error:
        # Also errors of the tokenizer with which numpy reads a header, and of the archive's compression.
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"{name} is not a readable array ({reason}); save it again") from None
    key = next((key for key in _POINT_KEYS if key in stored), None)
    if key is None:
        raise UserError(f"{name} holds {', '.join(sorted(stored)) or 'nothing'}; save the points as 'points'")
    points = stored[key]
    if points.ndim != 2 or points.shape[1] not in (3, 6, 7) or points.dtype.kind not in "fiu":
        raise UserError(
            f"{name} has points of shape {points.shape} and type {points.dtype}; save numbers of shape (N, 3)"
        )
    found = _named(points.astype(np.float64), name) if len(points) else {"points": points[:, :3]}
    for key, shape in (("normals", (len(points), 3)), ("colors", (len(points), 3)), ("parts", (len(points),))):
        if key in stored:
            found[key] = _of_shape(stored[key], key, shape, name)
    if "faces" in stored:
        found["faces"] = _of_shape(stored["faces"], "faces", (*stored["faces"].shape[:1], 3), name)
    return found


def _array(stream: IO[bytes], size: int) -> np.ndarray:
    """An array in numpy's format. numpy itself would allocate whatever the header announces."""
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, kind = read(stream)
    if math.prod(shape) * kind.itemsize > size:
        raise ValueError(f"it declares {shape} numbers in {size} bytes")
    stream.seek(0)
    return np.lib.format.read_array(stream, allow_pickle=False)


def _of_shape(values: np.ndarray, key: str, shape: tuple[int, ...], name: str) -> np.ndarray:
    if values.shape != shape or values.dtype.kind not in ("iu" if key in ("parts", "faces") else "fiu"):
        wanted = "(F, 3) integers" if key == "faces" else f"{shape} numbers"
        raise UserError(f"{name} has {key} of shape {values.shape} and type {values.dtype}; save {wanted}")
    return values


def _table(content: bytes, name: str) -> dict[str, np.ndarray]:
    """Columns of numbers between blanks, commas or semicolons; comments follow # or //.

    With semicolons, or with blanks not preceded by a comma, a comma is a decimal comma. A first line of names, such as
    x,y,z, is skipped, unless known names stand elsewhere.
    """
    whole = re.sub(r"(#|//)[^\r\n]*", "", _text(content, name))
    text = whole.lstrip()
    head = re.match(r'[A-Za-z_ \t,;"]+(?=[\r\n])', text)
    names = re.findall(r"\w+", head[0].lower()) if head else []
    if head and not {*names} & {"nan", "inf", "infinity"}:
        text = text[head.end() :]
        if moved := [word for i, word in enumerate(names) if COLUMNS.get(word, i) != i]:
            order = "x y z, then normals or colours, then the part"
            raise UserError(f"{name} has {moved[0]} in column {names.index(moved[0]) + 1}; give the columns {order}")
    if empty := re.search(r"[,;][ \t]*[,;]", text):
        line = len(re.findall("\r\n|\r|\n", whole[: len(whole) - len(text) + empty.start()])) + 1
        raise UserError(f"{name} has an empty cell in line {line}; correct it")
    decimal = "," in text and (";" in text or re.search(r"[^\s,][ \t]+[^\s,]", text))
    text = text.replace(",", "." if decimal else " ").replace(";", " ")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "loadtxt: input contained no data")
            values = np.loadtxt(io.StringIO(text, newline=None), ndmin=2)
    except ValueError:
        commas = "; its commas were read as decimal commas" * bool(decimal)
        before = len(re.findall("\r\n|\r|\n", whole[: len(whole) - len(text)]))
        raise UserError(f"{name} is not a table of numbers ({_fault(text, before)}{commas}); correct it") from None
    if not len(values):
        raise UserError(f"{name} has no points; give a file with at least one")
    if values.shape[1] not in (3, 6, 7):
        raise UserError(
            f"{name} has {values.shape[1]} columns; give 3 (x y z), 6 (with normals or colours) or 7 (with a part too)"
        )
    return _named(values, name, names)


def _fault(table: str, before: int) -> str:
    """The first line that is no row of the table; `before` ends of lines precede the table."""
    columns = None
    for number, line in enumerate(table.splitlines(), before + 1):
        words = line.split()
        for word in words:
            try:
                float(word)
            except ValueError:
                return f"line {number} has {word!r}"
        if words and len(words) != (columns := columns or len(words)):
            return f"line {number} has {len(words)} numbers instead of {columns}"
    return "a number is out of range"


def _named(values: np.ndarray, name: str, names: Sequence[str] = ()) -> dict[str, np.ndarray]:
    """Columns of a table (N, 3, 6 or 7): x y z, optionally with three more, and with a part.

    The three are what `names` say. Else they are normals if each has length 1, within a tenth, or 0; else colours if
    they are in 0 to 255.
    """
    found = {"points": values[:, :3]}
    if values.shape[1] > 3:
        more = values[:, 3:6]
        with np.errstate(over="ignore"):
            length = np.linalg.norm(more, axis=1)
        # `check_cloud` reports NaN.
        unit = ((np.abs(length - 1) < 0.1) | (length == 0) | np.isnan(length)).all()
        if "nx" in names or (unit and not {"r", "red"} & {*names}):
            found["normals"] = more
        elif ((more >= 0) & (more <= 255)).all():
            found["colors"] = more
        else:
            raise UserError(f"{name} has columns 4 to 6 that are neither normals nor colours; give only x y z")
    if values.shape[1] == 7:
        # NaN is not a whole number either.
        broken = values[(values[:, 6] != np.floor(values[:, 6])) | (np.abs(values[:, 6]) > 2**31), 6]
        if len(broken):
            raise UserError(f"{name} has {broken[0]:g} in column 7, where parts are whole numbers; correct it")
        found["parts"] = values[:, 6]
    return found


def _off(content: bytes, name: str) -> dict[str, np.ndarray]:
    """`points` and triangles `faces` of an OFF file, including ModelNet's with counts on the line of `OFF`.

    trimesh is not used: it accepts a truncated file, drops a face without a corner and fails at one of five corners.
    """
    lines = [line for raw in _lines(content, name) if (line := raw.partition("#")[0].strip())]
    if not lines or not lines[0].startswith("OFF"):
        raise UserError(f"{name} does not begin with OFF; export it again as OFF")
    lines = [line for line in (lines[0].removeprefix("OFF").strip(), *lines[1:]) if line]
    try:
        vertices, faces = (int(word) for word in lines[0].split()[:2])
    except (IndexError, ValueError):
        raise UserError(f"{name} has no counts of vertices and faces after OFF; export it again as OFF") from None
    if min(vertices, faces) < 0 or len(lines) < 1 + vertices + faces:
        raise UserError(
            f"{name} declares {vertices} vertices and {faces} faces, but has {len(lines) - 1} lines of them; "
            "copy it again"
        )
    points, triangles = np.zeros((vertices, 3)), array("q")
    for place, line in enumerate(lines[1 : 1 + vertices + faces]):
        try:
            if place < vertices:
                points[place] = _corner(line.split())
            else:
                size, *corners = map(int, line.split()[: 1 + int(line.split()[0])])
                if len(corners) != size:
                    raise ValueError
                triangles.extend(fan(corners))
        except (ValueError, OverflowError):
            raise UserError(f"{name} has the line {line[:60]!r}, which is not a vertex or face; fix it") from None
    return {"points": points, "faces": np.array(triangles).reshape(-1, 3)}


def _obj(content: bytes, name: str) -> dict[str, np.ndarray]:
    """`points`, `colors` if vertices have them, and triangles `faces` of an OBJ file, without textures and groups.

    trimesh is not used: it counts negative indices from the end of the file, not from the face, and reads 0 as 1.
    """
    vertices: list[list[float]] = []
    triangles = array("q")
    # A backslash at the end of a line continues the line.
    for line in _lines(re.sub(rb"\\(\r\n|\r|\n)", b" ", content), name):
        kind, *words = line.partition("#")[0].split() or [""]
        try:
            if kind == "v":
                vertices.append([*_corner(words), *map(float, words[3:6])])
            elif kind == "f":
                corners = [int(word.partition("/")[0]) for word in words]
                triangles.extend(fan([place - 1 if place > 0 else len(vertices) + place for place in corners]))
        except (ValueError, OverflowError):
            raise UserError(
                f"{name} has the line {line.strip()[:60]!r}, which is not a vertex or face; fix it"
            ) from None
    faces = np.array(triangles).reshape(-1, 3)
    outside = next((place for place in triangles if not 0 <= place < len(vertices)), None)
    if outside is not None:
        raise UserError(
            f"{name}: a face refers to vertex {outside + 1}, but there are {len(vertices)}, counted from 1; export it "
            "again"
        )
    found = {"points": np.array([vertex[:3] for vertex in vertices]).reshape(-1, 3), "faces": faces}
    if vertices and all(len(vertex) == 6 for vertex in vertices):
        found["colors"] = np.array([vertex[3:] for vertex in vertices])
    return found


def _corner(words: list[str]) -> tuple[float, float, float]:
    x, y, z = words[:3]
    return float(x), float(y), float(z)


def fan(polygon: Sequence[int]) -> list[int]:
    """Corners of a polygon's triangles around its first corner; edges and lone corners have no surface."""
    return [polygon[i] for second in range(1, len(polygon) - 1) for i in (0, second, second + 1)]


def _lines(content: bytes, name: str) -> list[str]:
    # Not splitlines(), which also splits at other control characters, such as those in a comment.
    return re.split("\r\n|\r|\n", _text(content, name))


def _text(content: bytes, name: str) -> str:
    """Text without a byte order mark; bytes that are not UTF-8, as in a comment, are replaced."""
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise UserError(f"{name} is UTF-16; convert it: iconv -f UTF-16 -t UTF-8")
    return content.decode("utf-8-sig", "replace")


def sampled(cloud: Cloud, num_points: int, seed: int = 0) -> Cloud:
    """The surface of a cloud with faces as `num_points` points with normals; a cloud without faces is unchanged.

    Points are uniform by area, with the normals of their faces, on the side where corners run anticlockwise. Colours of
    vertices are interpolated; the part is that of the corner with the largest share.
    """
    if num_points < 1:
        raise UserError(f"{num_points} points are not possible; give 1 or more")
    if cloud.faces is None or not len(cloud.faces):
        return cloud
    with needs(f"the mesh {cloud.name}"):
        import trimesh
    mesh = trimesh.Trimesh(cloud.points.numpy(), cloud.faces.numpy(), process=False)
    if not mesh.area > 0:
        raise UserError(f"{cloud.name}: none of the {len(cloud.faces)} faces has an area; give a mesh with a surface")
    points, place = trimesh.sample.sample_surface(mesh, num_points, seed=abs(seed))
    points = np.asarray(points)
    # Not mesh.face_normals, which are 0 for triangles smaller than 1e-12.
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


_PARSERS = {
    ".ply": parse_ply,
    ".off": _off,
    ".obj": _obj,
    **dict.fromkeys((".npz", ".npy"), _arrays),
    **dict.fromkeys((".xyz", ".txt", ".csv", ".pts"), _table),
}
ENDINGS = tuple(_PARSERS)
