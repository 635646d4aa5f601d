"""PLY files: reads text and binary of either byte order; writes binary little-endian.

trimesh is not used: it drops a cloud's normals and accepts a truncated text file (dev/decisions.md).
"""

import codecs
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch import Tensor

from tokenmix.errors import UserError
from tokenmix.files import replace_file

_WORDS = "char uchar short ushort int uint float double int8 uint8 int16 uint16 int32 uint32 float32 float64"
_TYPES: dict[str, str] = dict(zip(_WORDS.split(), 2 * ("i1", "u1", "i2", "u2", "i4", "u4", "f4", "f8")))
_ORDERS = {"binary_little_endian": "<", "binary_big_endian": ">", "ascii": ""}
_COLORS = (("red", "green", "blue"), ("r", "g", "b"), ("diffuse_red", "diffuse_green", "diffuse_blue"))


class _Property(NamedTuple):
    """A column: type in the header, stored type, and for a list the type of its length."""

    name: str
    type: str
    stored: str
    length: str | None


class _Element(NamedTuple):
    name: str
    rows: int
    properties: list[_Property]


_Columns = Mapping[str, np.ndarray | list[np.ndarray]]


def parse_ply(content: bytes, name: str) -> dict[str, np.ndarray]:
    """`points` and triangles `faces`, also `normals` and `colors`; text as float64, which keeps all its digits."""
    text, elements, body = _header(content, name)
    tables: dict[str, _Columns] = {}
    place, row = 0, ""
    try:
        if text:
            body = np.array(body.split(), dtype=np.float64).tobytes()
        for element in elements:
            row = f" before its {element.rows} rows of {element.name!r} do"
            tables[element.name], place = _table(body, place, element)
    except (ValueError, OverflowError):
        raise UserError(f"{name} ends{row}, or its numbers are damaged; copy it again") from None
    left = len(body) - place
    # Some programs end a binary file with a line break.
    if left and (text or body[place:].strip()):
        amount = f"{left // 8} numbers" if text else f"{left} bytes"
        raise UserError(f"{name} has {amount} more than its header declares; fix the counts there")
    if "vertex" not in tables:
        raise UserError(f"{name} has no element 'vertex', so no points; export it again with its vertices")
    return _vertices(tables["vertex"], name) | _faces(tables.get("face", {}), name)


def _header(content: bytes, name: str) -> tuple[bool, list[_Element], bytes]:
    """Whether the file is text, its tables, and the body after the header."""
    content = content.removeprefix(codecs.BOM_UTF8)
    first = re.match(rb"ply[ \t]*(\r\n|\r|\n)", content)
    # After lines that end in CR alone, a byte 10 belongs to the first number.
    end = rb"\r" if first and first[1] == b"\r" else rb"\r?\n"
    last = first and re.search(rb"[\r\n]end_header[ \t]*(" + end + rb"|\Z)", content)
    if not last:
        raise UserError(f"{name} has no PLY header; export it again as PLY")
    order: str | None = None
    elements: list[_Element] = []
    for line in re.split("[\r\n]+", content[: last.start()].decode("latin-1")):
        words = line.split()
        try:
            if words[:1] == ["format"]:
                order = _ORDERS[words[1]]
            elif words[:1] == ["element"]:
                elements.append(_Element(words[1], int(words[2]), []))
                if elements[-1].rows < 0:
                    raise ValueError
            elif words[:1] == ["property"]:
                length = _TYPES[words[2]] if words[1] == "list" else None
                kind, key = words[3:5] if length else words[1:3]
                stored = ("=f8", "=f8") if order == "" else (f"{order}{_TYPES[kind]}", f"{order}{length}")
                elements[-1].properties.append(_Property(key, _TYPES[kind], stored[0], stored[1] if length else None))
        except (KeyError, IndexError, ValueError):
            raise UserError(
                f"{name} has the header line {line.strip()[:60]!r}, which is not part of PLY; fix it"
            ) from None
    if order is None:
        raise UserError(f"{name} has no line 'format' in its header; export it again as PLY")
    return order == "", elements, content[last.end() :]


def _table(body: bytes, place: int, element: _Element) -> tuple[_Columns, int]:
    """Columns of a table, and its end; in one step if all lists are as long as those of the first row."""
    if not element.rows:
        return {}, place
    _, sizes, _ = _row(body, place, element)
    fields: list[tuple[str, str] | tuple[str, str, tuple[int]]] = []
    for i, prop in enumerate(element.properties):
        if prop.length:
            fields += [(f"length {i}", prop.length), (f"{i}", prop.stored, (sizes[i],))]
        else:
            fields.append((f"{i}", prop.stored))
    kind = np.dtype(fields)
    if place + element.rows * kind.itemsize <= len(body):
        rows = np.frombuffer(body, kind, element.rows, place)
        if all((rows[f"length {i}"] == size).all() for i, size in sizes.items()):
            found = {p.name: _typed(rows[f"{i}"], p) for i, p in enumerate(element.properties)}
            return found, place + rows.nbytes
    if not sizes:
        raise ValueError
    lists: list[list[np.ndarray]] = [[] for _ in element.properties]
    for _ in range(element.rows):
        values, _, place = _row(body, place, element)
        for column, value in zip(lists, values):
            column.append(value)
    each = zip(element.properties, lists)
    return {p.name: values if p.length else _typed(np.concatenate(values), p) for p, values in each}, place


def _row(body: bytes, place: int, element: _Element) -> tuple[list[np.ndarray], dict[int, int], int]:
    """Values of a row, lengths of its lists by property number, and its end."""
    values: list[np.ndarray] = []
    sizes: dict[int, int] = {}
    for i, prop in enumerate(element.properties):
        if prop.length:
            (size,) = np.frombuffer(body, prop.length, 1, place)
            place += np.dtype(prop.length).itemsize
            sizes[i] = int(size)
            if sizes[i] < 0:
                raise ValueError
        values.append(np.frombuffer(body, prop.stored, sizes.get(i, 1), place))
        place += values[-1].nbytes
    return values, sizes, place


def _typed(values: np.ndarray, prop: _Property) -> np.ndarray:
    """Integers in the header's type; text with more digits than the type holds stays float64."""
    if prop.type[0] == "f":
        return values
    with np.errstate(invalid="ignore"):
        whole = values.astype(prop.type, copy=False)
    return whole if np.array_equal(whole, values) else values


def _vertices(table: _Columns, name: str) -> dict[str, np.ndarray]:
    def stack(names: tuple[str, ...]) -> np.ndarray | None:
        columns = [table[key] for key in names if key in table]
        # A list per vertex is no column of numbers.
        numbers = all(isinstance(column, np.ndarray) and column.ndim == 1 for column in columns)
        return np.stack(columns, axis=1) if numbers and len(columns) == 3 else None

    points = stack(("x", "y", "z"))
    if points is None:
        raise UserError(f"{name} has vertices without x, y and z, one number each; export it again with them")
    colors = next((found for found in map(stack, _COLORS) if found is not None), None)
    found = {"points": points, "normals": stack(("nx", "ny", "nz")), "colors": colors}
    return {key: values for key, values in found.items() if values is not None}


def _faces(table: _Columns, name: str) -> dict[str, np.ndarray]:
    """Polygons as triangles around their first corner; edges and lone corners have no surface."""
    polygons = next((table[key] for key in ("vertex_indices", "vertex_index") if key in table), [])
    if isinstance(polygons, np.ndarray):
        if polygons.ndim != 2:
            raise UserError(f"{name} has faces whose corners are not a list; export it again")
        second = np.arange(1, polygons.shape[1] - 1)
        triangles = polygons[:, np.stack([0 * second, second, second + 1], axis=1)].reshape(-1, 3)
    else:
        triangles = np.array([(p[0], p[i], p[i + 1]) for p in polygons for i in range(1, len(p) - 1)]).reshape(-1, 3)
    if not np.array_equal(triangles, np.floor(triangles)):
        raise UserError(f"{name} has a face whose corners are not whole numbers; export it again")
    return {"faces": triangles} if len(triangles) else {}


def write_ply(path: str | Path, points: Tensor, colors: Tensor | None = None) -> Path:
    """Write points (N, 3) and optional colours uint8 (N, 3), for any viewer of clouds."""
    if points.ndim != 2 or points.shape[1] != 3 or (colors is not None and colors.shape != points.shape):
        shapes = f"{tuple(points.shape)}{'' if colors is None else f' and colours {tuple(colors.shape)}'}"
        raise UserError(f"points and colours must be (N, 3), got {shapes}")
    fields = [("point", "<f4", 3)] if colors is None else [("point", "<f4", 3), ("color", "u1", 3)]
    rows = np.empty(len(points), dtype=fields)
    rows["point"] = points.numpy(force=True)
    lines = ["ply", "format binary_little_endian 1.0", f"element vertex {len(points)}"]
    lines += [f"property float {axis}" for axis in "xyz"]
    if colors is not None:
        rows["color"] = colors.numpy(force=True)
        lines += [f"property uchar {tint}" for tint in _COLORS[0]]
    path = Path(path)
    try:
        replace_file(path, "\n".join([*lines, "end_header", ""]).encode() + rows.tobytes())
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror}); give a folder that exists and is writable") from None
    return path
