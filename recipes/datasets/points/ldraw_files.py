"""LDraw's parts library: what its files draw, as triangles that know which primitive drew them.

A line of a file is a reference to another file with a matrix (1), a triangle (3) or a quadrilateral (4); the others are
edges and comments. Here every file becomes triangles whose corners run anticlockwise seen from outside, where it is
certified for back-face culling (`0 BFC CERTIFY`): clockwise files are turned once, and a referenced file is turned if
its matrix mirrors or `0 BFC INVERTNEXT` stands before it, not if both. Files that are not certified are taken as drawn.

Y points down, a unit is 0.4 mm. Format: https://www.ldraw.org/article/218.html and 415.html.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from tokenmix.errors import UserError

__all__ = ["Library", "Triangles"]

DEPTH = 64


@dataclass(frozen=True)
class Triangles:
    """What a file draws, everything that it refers to included.

    Attributes:
        corners: float32 (T, 3, 3), triangle, corner, coordinate.
        labels: uint8 (T,).
    """

    corners: np.ndarray
    labels: np.ndarray


@dataclass
class _Drawn:
    """Triangles of a file, collected line by line."""

    triangles: list[list[str]] = field(default_factory=list)
    turned: list[bool] = field(default_factory=list)
    pieces: list[Triangles] = field(default_factory=list)


class Library:
    """The files of a library and what they draw; each file of primitives and sub-parts is read once.

    Args:
        files: contents by path below the library's root, `parts/3001.dat`, `parts/s/3001s01.dat`, `p/stud.dat`.
        label: the label of what a file draws, of its path and its first line; None for that of the file around it.

    Attributes:
        missing: references that no file answers.
    """

    def __init__(self, files: Mapping[str, bytes], label: Callable[[str, str], int | None]) -> None:
        self.files = {name.lower().replace("\\", "/"): content for name, content in files.items()}
        self.label = label
        self.missing: set[str] = set()
        self._kept: dict[str, Triangles] = {}

    def text(self, path: str) -> list[str]:
        """The lines of a file; what is no UTF-8 is old and Latin-1 or Windows'."""
        return self.files[path].decode("utf-8", "replace").splitlines()

    def find(self, reference: str) -> str | None:
        """The path that a reference means: a part, else a primitive."""
        name = reference.strip().lower().replace("\\", "/")
        return next((path for path in (f"parts/{name}", f"p/{name}") if path in self.files), None)

    def triangles(self, path: str) -> Triangles:
        """What a file draws. Labels not given by any file are 0.

        Raises:
            UserError: a line that is none, or a file that refers to itself.
        """
        return self._draw(path, 0)

    def _draw(self, path: str, depth: int) -> Triangles:
        if path in self._kept:
            return self._kept[path]
        if depth > DEPTH:
            raise UserError(f"{path} refers to itself; remove that line")
        lines = self.text(path)
        drawn = _Drawn()
        clockwise = inverted = False
        for number, line in enumerate(lines, 1):
            words = line.split()
            kind = words[0] if words else ""
            try:
                if kind == "0" and words[1:2] == ["BFC"]:
                    clockwise = _winding(words, clockwise)
                    inverted = "INVERTNEXT" in words
                elif kind == "1":
                    self._refer(drawn, words, inverted, depth)
                    inverted = False
                elif kind in ("3", "4"):
                    _polygon(drawn, words, int(kind), clockwise)
            except (ValueError, IndexError) as error:
                if isinstance(error, UserError):
                    raise
                raise UserError(f"{path}, line {number}: {line.strip()!r} is no line of LDraw's; mend it") from None
        made = _joined(drawn, path)
        label = self.label(path, lines[0][2:].strip() if lines else "")
        if label is not None:
            made = Triangles(made.corners, np.full(len(made.labels), label, dtype=np.uint8))
        if path.startswith(("p/", "parts/s/")):
            self._kept[path] = made
        return made

    def _refer(self, drawn: _Drawn, words: list[str], inverted: bool, depth: int) -> None:
        place = np.array(words[2:5], dtype=np.float64)
        matrix = np.array(words[5:14], dtype=np.float64).reshape(3, 3)
        reference = " ".join(words[14:])
        path = self.find(reference)
        if path is None:
            self.missing.add(reference)
            return
        inner = self._draw(path, depth + 1)
        corners = (inner.corners @ matrix.T + place).astype(np.float32)
        # A mirror turns anticlockwise into clockwise.
        if (np.linalg.det(matrix) < 0) != inverted:
            corners = corners[:, ::-1]
        drawn.pieces.append(Triangles(corners, inner.labels))


def _winding(words: list[str], clockwise: bool) -> bool:
    if "CW" in words:
        return True
    return False if "CCW" in words else clockwise


def _polygon(drawn: _Drawn, words: list[str], corners: int, clockwise: bool) -> None:
    numbers = words[2 : 2 + 3 * corners]
    if len(numbers) < 3 * corners:
        raise IndexError
    drawn.triangles.append(numbers[:9])
    drawn.turned.append(clockwise)
    if corners == 4:
        drawn.triangles.append(numbers[6:] + numbers[:3])
        drawn.turned.append(clockwise)


def _joined(drawn: _Drawn, path: str) -> Triangles:
    try:
        own = np.array(drawn.triangles, dtype=np.float32).reshape(-1, 3, 3)
    except ValueError as error:
        raise UserError(f"{path} has a coordinate that is not a number ({error}); fix it") from None
    turned = np.array(drawn.turned, dtype=bool)
    own[turned] = own[turned][:, ::-1]
    pieces = [Triangles(own, np.zeros(len(own), dtype=np.uint8)), *drawn.pieces]
    return Triangles(np.concatenate([p.corners for p in pieces]), np.concatenate([p.labels for p in pieces]))
