"""Clouds and meshes as text: OFF, OBJ, and tables of numbers (XYZ, TXT, CSV)."""

from collections.abc import Sequence

import numpy as np

from tokenmix.errors import UserError
from tokenmix.tasks.points.data.surface import fan

__all__ = ["named_columns", "parse_obj", "parse_off", "parse_table"]

Columns = dict[str, np.ndarray]


def _lines(content: bytes, comments: tuple[str, ...] = ("#",)) -> list[str]:
    """The lines that say something."""
    stripped = (line.strip() for line in content.decode("utf-8", "replace").splitlines())
    return [line for line in stripped if line and not line.startswith(comments)]


def parse_off(content: bytes, name: str) -> Columns:
    """`points` and triangles `faces` of an OFF file; ModelNet's, whose counts follow `OFF` on the same line, as well.

    Raises:
        UserError: no OFF, fewer lines than its header announces, or a line that is no vertex or face.
    """
    lines = _lines(content)
    if not lines or not lines[0].startswith("OFF"):
        raise UserError(f"{name} does not begin with OFF; write it again as OFF")
    rest = lines[0].removeprefix("OFF").strip()
    lines = [rest, *lines[1:]] if rest else lines[1:]
    try:
        vertices, faces = (int(word) for word in lines[0].split()[:2])
    except (IndexError, ValueError):
        raise UserError(f"{name} has no counts of vertices and faces after OFF; write it again as OFF") from None
    if min(vertices, faces) < 0 or len(lines) < 1 + vertices + faces:
        raise UserError(
            f"{name} announces {vertices} vertices and {faces} faces, but has {len(lines) - 1} lines of them; "
            "copy it again"
        )
    points = _numbers(lines[1 : 1 + vertices], 3, name)
    polygons = _polygons([line.split() for line in lines[1 + vertices : 1 + vertices + faces]], name)
    return {"points": points, **({} if polygons is None else {"faces": polygons})}


def _numbers(lines: Sequence[str], width: int, name: str) -> np.ndarray:
    """The first numbers of each line, float64 (N, width)."""
    rows = [line.split(maxsplit=width)[:width] for line in lines]
    try:
        return np.array(rows, dtype=np.float64).reshape(-1, width)
    except ValueError:
        bad = next(line for line, row in zip(lines, rows) if len(row) < width or not all(map(_is_number, row)))
        raise UserError(f"{name} has the line {bad[:60]!r} where {width} numbers belong; mend it") from None


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _polygons(rows: Sequence[Sequence[str]], name: str) -> np.ndarray | None:
    """Faces, each with its number of corners before them and perhaps a colour behind, as triangles."""
    by_size: dict[int, list[Sequence[str]]] = {}
    try:
        for row in rows:
            size = int(row[0])
            if size < 1 or len(row) < 1 + size:
                raise ValueError(" ".join(row))
            by_size.setdefault(size, []).append(row[1 : 1 + size])
        triangles = [fan(np.array(same, dtype=np.int64)) for size, same in by_size.items() if size > 2]
    except ValueError as error:
        raise UserError(f"{name} has a line that is no face ({error}); mend it") from None
    return np.concatenate(triangles) if triangles else None


def parse_obj(content: bytes, name: str) -> Columns:
    """`points`, `colors` if vertices have them, and triangles `faces` of an OBJ file; textures and groups are left out.

    Raises:
        UserError: a vertex or a face that is none.
    """
    # A line that ends in a backslash goes on in the next.
    rows = [line.split() for line in _lines(content.replace(b"\\\r\n", b" ").replace(b"\\\n", b" "))]
    vertices = [row[1:] for row in rows if row[0] == "v"]
    points = _numbers([" ".join(row) for row in vertices], 3, name)
    found: Columns = {"points": points}
    # Some programs write a colour behind each vertex.
    if vertices and all(len(row) == 6 for row in vertices):
        found["colors"] = _numbers([" ".join(row[3:]) for row in vertices], 3, name)
    corners: list[list[str]] = []
    count = 0
    for row in rows:
        if row[0] == "v":
            count += 1
        elif row[0] == "f":
            try:
                places = [int(word.split("/")[0]) for word in row[1:]]
            except ValueError:
                raise UserError(f"{name} has the line {' '.join(row)!r}, which is no face; mend it") from None
            # Counted from 1, or back from the vertices that were there so far.
            corners.append([str(len(places)), *(str(p - 1 if p > 0 else count + p) for p in places)])
    faces = _polygons(corners, name) if corners else None
    return found if faces is None else {**found, "faces": faces}


def parse_table(content: bytes, name: str) -> Columns:
    """Columns of numbers between spaces or commas: x y z, or with three more, or with three more and a part.

    Three more are normals if each has length 1, within a tenth, or is 0; else colours if they are 0 to 255.

    Raises:
        UserError: another number of columns, or something that is no number.
    """
    lines = [line.replace(",", " ").replace(";", " ") for line in _lines(content, ("#", "//"))]
    widths = {len(line.split()) for line in lines}
    if not lines:
        raise UserError(f"{name} has no points; give a file with at least one")
    if len(widths) > 1 or not widths <= {3, 6, 7}:
        raise UserError(
            f"{name} has lines of {' and '.join(map(str, sorted(widths)))} columns; give 3 (x y z), 6 (with normals or "
            "colours) or 7 (with a part as well) in each"
        )
    return named_columns(_numbers(lines, widths.pop(), name), name)


def named_columns(values: np.ndarray, name: str) -> Columns:
    """What the columns of a table (N, 3, 6 or 7) are."""
    found = {"points": values[:, :3]}
    if values.shape[1] > 3:
        more = values[:, 3:6]
        length = np.linalg.norm(more, axis=1)
        # NaN is told by whoever checks the cloud.
        if ((np.abs(length - 1) < 0.1) | (length == 0) | np.isnan(length)).all():
            found["normals"] = more
        elif ((more >= 0) & (more <= 255)).all():
            found["colors"] = more / 255 if more.max() > 1 else more
        else:
            raise UserError(f"{name} has columns 4 to 6 that are neither normals nor colours; give x y z alone")
    if values.shape[1] == 7:
        # NaN is no whole number either.
        broken = values[values[:, 6] != np.floor(values[:, 6]), 6]
        if len(broken):
            raise UserError(f"{name} has {broken[0]:g} in column 7, where parts are whole numbers; mend it")
        found["parts"] = values[:, 6]
    return found
