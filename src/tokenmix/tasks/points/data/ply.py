"""PLY files: text and binary of either byte order, read; binary little-endian, written."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from torch import Tensor

from tokenmix.errors import UserError
from tokenmix.tasks.points.data.surface import fan

__all__ = ["parse_ply", "write_ply"]

TYPES = {
    **dict.fromkeys(("char", "int8"), "i1"),
    **dict.fromkeys(("uchar", "uint8"), "u1"),
    **dict.fromkeys(("short", "int16"), "i2"),
    **dict.fromkeys(("ushort", "uint16"), "u2"),
    **dict.fromkeys(("int", "int32"), "i4"),
    **dict.fromkeys(("uint", "uint32"), "u4"),
    **dict.fromkeys(("float", "float32"), "f4"),
    **dict.fromkeys(("double", "float64"), "f8"),
}
ORDERS = {"binary_little_endian": "<", "binary_big_endian": ">", "ascii": ""}


@dataclass(frozen=True)
class _Property:
    """A column; a list of numbers in each row if it has a type for their count."""

    name: str
    type: str
    count: str | None = None


@dataclass
class _Element:
    """A table: its rows come one after the other."""

    name: str
    rows: int
    properties: list[_Property] = field(default_factory=list)


Columns = dict[str, np.ndarray | list[np.ndarray]]
Table = tuple[Columns, int]


def parse_ply(content: bytes, name: str) -> dict[str, np.ndarray]:
    """The columns of the vertices by their names, and triangles (F, 3) under `faces` if there are any.

    Raises:
        UserError: no PLY, an unknown type, or fewer bytes or numbers than the header announces, or more.
    """
    order, elements, start = _header(content, name)
    tables: dict[str, Columns] = {}
    tokens = content[start:].split() if order == "" else []
    place = 0 if order == "" else start
    for element in elements:
        try:
            if order == "":
                table, place = _from_text(tokens, place, element)
            else:
                table, place = _from_bytes(content, place, element, order)
        except (IndexError, ValueError):
            raise UserError(
                f"{name} ends before its {element.rows} rows of {element.name!r} do, or they are damaged; copy it again"
            ) from None
        tables[element.name] = table
    left = len(tokens) - place if order == "" else len(content) - place
    # Some programs end a binary file with a line break as well.
    if left and (order == "" or content[place:].strip()):
        unit = "numbers" if order == "" else "bytes"
        raise UserError(f"{name} has {left} {unit} more than its header announces; mend the counts there")
    if "vertex" not in tables:
        raise UserError(f"{name} has no element 'vertex', so no points; write it again with its vertices")
    found = {key: column for key, column in tables["vertex"].items() if isinstance(column, np.ndarray)}
    faces = _faces(tables.get("face", {}), name)
    return found if faces is None else {**found, "faces": faces}


def _header(content: bytes, name: str) -> tuple[str, list[_Element], int]:
    end = content.find(b"end_header")
    if not content.startswith(b"ply") or end < 0:
        raise UserError(f"{name} has no PLY header; write it again as PLY")
    order: str | None = None
    elements: list[_Element] = []
    for line in content[:end].decode("latin-1").splitlines():
        words = line.split()
        try:
            if words[:1] == ["format"]:
                order = ORDERS[words[1]]
            elif words[:1] == ["element"]:
                elements.append(_Element(words[1], int(words[2])))
                if elements[-1].rows < 0:
                    raise ValueError
            elif words[:2] == ["property", "list"]:
                elements[-1].properties.append(_Property(words[4], TYPES[words[3]], TYPES[words[2]]))
            elif words[:1] == ["property"]:
                elements[-1].properties.append(_Property(words[2], TYPES[words[1]]))
        except (KeyError, IndexError, ValueError):
            raise UserError(f"{name} has the header line {line.strip()!r}, which PLY does not know; mend it") from None
    if order is None:
        raise UserError(f"{name} has no line 'format' in its header; write it again as PLY")
    return order, elements, content.index(b"\n", end) + 1 if b"\n" in content[end:] else len(content)


def _from_text(tokens: list[bytes], place: int, element: _Element) -> Table:
    if not any(p.count for p in element.properties):
        width = len(element.properties)
        end = place + element.rows * width
        values = np.array(tokens[place:end], dtype=np.float64).reshape(element.rows, width)
        # Integers in the type that was announced, which says what range colours have. Text may say more digits of a
        # coordinate than its type holds.
        with np.errstate(invalid="ignore"):
            columns = (values[:, i] if p.type[0] == "f" else values[:, i].astype(p.type) for i, p in
                       enumerate(element.properties))  # fmt: skip
            return {p.name: column for p, column in zip(element.properties, columns)}, end

    def take(place: int, _: str, count: int) -> tuple[np.ndarray, int]:
        if place + count > len(tokens):
            raise IndexError
        return np.array(tokens[place : place + count], dtype=np.float64), place + count

    return _row_by_row(place, element, take)


def _from_bytes(content: bytes, place: int, element: _Element, order: str) -> Table:
    lists = [p for p in element.properties if p.count]
    if not lists:
        kind = np.dtype([(p.name, order + p.type) for p in element.properties])
        return _columns(np.frombuffer(content, kind, element.rows, place)), place + element.rows * kind.itemsize
    uniform = _uniform(content, place, element, order)
    if uniform is not None:
        return uniform

    def take(place: int, kind: str, count: int) -> tuple[np.ndarray, int]:
        return np.frombuffer(content, order + kind, count, place), place + count * np.dtype(kind).itemsize

    return _row_by_row(place, element, take)


def _columns(rows: np.ndarray) -> Columns:
    return {key: rows[key] for key in rows.dtype.names or ()}


def _uniform(content: bytes, place: int, element: _Element, order: str) -> Table | None:
    """Rows whose lists are all as long as the first row's, read at once; None if they are not."""
    if not element.rows:
        return {}, place
    first = _list_lengths(content, place, element, order)
    fields = []
    for prop in element.properties:
        if prop.count:
            fields.append((f"{prop.name} count", order + prop.count))
            fields.append((prop.name, order + prop.type, (first[prop.name],)))
        else:
            fields.append((prop.name, order + prop.type))
    kind = np.dtype(fields)
    if place + element.rows * kind.itemsize > len(content):
        return None
    rows = np.frombuffer(content, kind, element.rows, place)
    if any((rows[f"{p.name} count"] != first[p.name]).any() for p in element.properties if p.count):
        return None
    return _columns(rows), place + element.rows * kind.itemsize


def _list_lengths(content: bytes, place: int, element: _Element, order: str) -> dict[str, int]:
    """How long the lists of the row at this place are; 0 or more."""
    lengths: dict[str, int] = {}
    for prop in element.properties:
        size = 1
        if prop.count:
            counter = np.dtype(order + prop.count)
            size = lengths[prop.name] = int(np.frombuffer(content, counter, 1, place)[0])
            if size < 0:
                raise ValueError
            place += counter.itemsize
        place += size * np.dtype(prop.type).itemsize
    return lengths


def _row_by_row(place: int, element: _Element, take: Callable[[int, str, int], tuple[np.ndarray, int]]) -> Table:
    columns: dict[str, list[np.ndarray]] = {p.name: [] for p in element.properties}
    for _, prop in itertools.product(range(element.rows), element.properties):
        size = 1
        if prop.count:
            found, place = take(place, prop.count, 1)
            size = int(found[0])
            if size < 0:
                raise ValueError
        values, place = take(place, prop.type, size)
        columns[prop.name].append(values)
    return {**columns}, place


def _faces(table: Columns, name: str) -> np.ndarray | None:
    polygons = next((table[key] for key in ("vertex_indices", "vertex_index") if key in table), None)
    if polygons is None or not len(polygons):
        return None
    if isinstance(polygons, np.ndarray):
        polygons = [polygons] if polygons.ndim == 2 else [p[None] for p in polygons]
    else:
        polygons = [p[None] for p in polygons]
    # Edges and lone corners have no surface.
    triangles = [fan(p) for p in polygons if p.shape[1] > 2]
    if not triangles:
        return None
    found = np.concatenate(triangles).astype(np.float64)
    if not np.array_equal(found, np.floor(found)):
        raise UserError(f"{name} has a face whose corners are no whole numbers; write it again")
    return found.astype(np.int64)


def write_ply(path: str | Path, points: Tensor, colors: Tensor | None = None) -> Path:
    """Write points (N, 3) and, if given, their colours uint8 (N, 3), so that every viewer of clouds shows them.

    Raises:
        UserError: other shapes, or a folder that does not take the file.
    """
    if points.ndim != 2 or points.shape[1] != 3 or (colors is not None and colors.shape != points.shape):
        shapes = f"{tuple(points.shape)}{'' if colors is None else f' and colours {tuple(colors.shape)}'}"
        raise UserError(f"points are (N, 3) and colours as well, got {shapes}")
    fields = [("x", "<f4"), ("y", "<f4"), ("z", "<f4")]
    tints = [] if colors is None else [("red", "u1"), ("green", "u1"), ("blue", "u1")]
    rows = np.empty(len(points), dtype=fields + tints)
    for i, (key, _) in enumerate(fields):
        rows[key] = points[:, i].numpy(force=True)
    if colors is not None:
        for i, (key, _) in enumerate(tints):
            rows[key] = colors[:, i].numpy(force=True)
    lines = ["ply", "format binary_little_endian 1.0", f"element vertex {len(points)}"]
    lines += [f"property float {key}" for key, _ in fields] + [f"property uchar {key}" for key, _ in tints]
    path = Path(path)
    try:
        path.write_bytes("\n".join([*lines, "end_header", ""]).encode() + rows.tobytes())
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror}); give a folder that exists and is yours") from None
    return path
