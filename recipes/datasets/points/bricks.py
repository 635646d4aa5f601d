"""What LDraw's parts library holds: its distinct moulds, their kinds of surface, and a split that has no near-copies.

A mould is what one form makes: prints on a part, versions of it (a, b) and assemblies carry its number, and one of them
stands for all. The split goes further and keeps moulds on one side that are drawn with a common sub-part, as versions
under other numbers, mirrored twins and members of a family are.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from recipes.datasets.points.ldraw_files import Library

__all__ = ["PART_NAMES", "Mould", "families", "label_of", "moulds", "sample", "split"]

PART_NAMES = ("body", "stud", "underside tube", "Technic hole, pin or axle")
BODY, STUD, TUBE, TECHNIC = range(4)
NUM_POINTS = 2048
TEST_SHARE = 0.2

UNDERSIDE = re.compile(r"Tube|Underside|Anti-Stud")
TECHNIC_FILE = re.compile(r"(axle(?!sphe)|axl[23]ho|confric|connect|connhol|n?peghol|beamhol)")
STUD_FILE = re.compile(r"(\d+-\d+)?(stud|stug|primotop|primobot|zstud)")
# What stands before the letters of versions, prints, stickers and assemblies.
NUMBER = re.compile(r"[a-z]*\d+")
PLAIN = re.compile(r"[a-z]*\d+[a-z]?")


@dataclass(frozen=True)
class Mould:
    """One form that parts come from.

    Attributes:
        name: its number.
        path: the file that stands for it.
        category: what LDraw calls it.
    """

    name: str
    path: str
    category: str


def label_of(path: str, title: str) -> int | None:
    """The kind of surface that a file of primitives draws; None for that of the file around it."""
    folder, _, file = path.rpartition("/")
    if folder not in ("p", "p/48", "p/8") or "Moved" in title:
        return None
    if TECHNIC_FILE.match(file):
        return TECHNIC
    if STUD_FILE.match(file):
        return TUBE if UNDERSIDE.search(title) else STUD
    return None


def moulds(library: Library) -> list[Mould]:
    """The distinct moulds of a library, by number.

    A plain part stands for its mould, and only where there is none a print or an assembly. Left out are stickers,
    helper files (`~`, `_`, `=`), those moved elsewhere, aliases and plain recolourings.
    """
    found: dict[str, Mould] = {}
    names = [path.removeprefix("parts/").removesuffix(".dat") for path in library.files if path.startswith("parts/")]
    for name in sorted((n for n in names if "/" not in n), key=lambda n: (PLAIN.fullmatch(n) is None, n)):
        number = match.group() if (match := NUMBER.match(name)) else name
        if number in found:
            continue
        path = f"parts/{name}.dat"
        category = _category(library.text(path))
        if category is not None:
            found[number] = Mould(number, path, category)
    return sorted(found.values(), key=lambda mould: mould.name)


def _category(lines: Sequence[str]) -> str | None:
    """What the head of a file calls it; None if it is no part of its own."""
    title = lines[0][2:].strip() if lines else ""
    head = [line.split() for line in lines[:40] if line.startswith("0 !")]
    kind = {word for words in head if words[1] == "!LDRAW_ORG" for word in words[2:]}
    if not title or title[0] in "~_=|" or kind & {"Subpart", "Alias", "Physical_Colour"}:
        return None
    stated = [" ".join(words[2:]) for words in head if words[1] == "!CATEGORY"]
    category = stated[0] if stated else title.split()[0]
    return None if category == "Sticker" else category


def families(library: Library, chosen: Sequence[Mould]) -> list[str]:
    """For each mould a name that it shares with those that are drawn, through others perhaps, with a common file."""
    parent: dict[str, str] = {}

    def root(name: str) -> str:
        while parent.setdefault(name, name) != name:
            name = parent[name]
        return name

    for mould in chosen:
        for path in _drawn_with(library, mould.path):
            # The lesser name is the root, so that it does not depend on the order.
            low, high = sorted((root(mould.path), root(path)))
            parent[high] = low
    return [root(mould.path) for mould in chosen]


def _drawn_with(library: Library, path: str) -> set[str]:
    """The parts and sub-parts that a file refers to, itself not included."""
    found: set[str] = set()
    waiting = [path]
    while waiting:
        for line in library.text(waiting.pop()):
            words = line.split(maxsplit=14)
            other = library.find(words[14]) if len(words) == 15 and words[0] == "1" else None
            if other is not None and other.startswith("parts/") and other not in found:
                found.add(other)
                waiting.append(other)
    return found


def split(chosen: Sequence[Mould], family: Sequence[str], share: float = TEST_SHARE) -> list[bool]:
    """Which moulds are for testing: whole families, by the hash of their names, about `share` of each category.

    A family belongs to the category of most of its moulds.
    """
    size = Counter(family)
    kinds: dict[str, Counter[str]] = {}
    for mould, name in zip(chosen, family):
        kinds.setdefault(name, Counter())[mould.category] += 1
    home = {name: min(count, key=lambda c: (-count[c], c)) for name, count in kinds.items()}
    test: set[str] = set()
    for category in sorted(set(home.values())):
        mine = sorted((n for n in size if home[n] == category), key=lambda n: hashlib.sha256(n.encode()).hexdigest())
        room = share * sum(size[n] for n in mine)
        for name in mine:
            if size[name] <= room:
                test.add(name)
                room -= size[name]
    return [name in test for name in family]


def sample(library: Library, mould: Mould, num_points: int = NUM_POINTS) -> tuple[np.ndarray, ...] | None:
    """Points, normals (float32) and kinds of surface (uint8) of a mould, the same each time; None without a surface.

    Points are about the middle of the bounding box, and the farthest has distance 1 from it.
    """
    drawn = library.triangles(mould.path)
    rng = np.random.default_rng(int.from_bytes(hashlib.sha256(mould.name.encode()).digest()[:8], "big"))
    found = _on_surface(drawn.corners, num_points, rng)
    if found is None:
        return None
    points, normals, triangle = found
    low, high = drawn.corners.reshape(-1, 3).min(0), drawn.corners.reshape(-1, 3).max(0)
    points -= (low.astype(np.float64) + high) / 2
    points /= np.linalg.norm(points, axis=1).max()
    return points.astype(np.float32), normals.astype(np.float32), drawn.labels[triangle]


def _on_surface(
    corners: np.ndarray, num_points: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Points and normals (N, 3) on triangles (T, 3, 3), evenly by area, and the triangle of each; None without area.

    The published results were trained on these draws, so they are not those of `tokenmix.lab.tasks.points`, which are
    trimesh's: a triangle is drawn by its area, and in it (1 - sqrt(u)) a + sqrt(u) (1 - v) b + sqrt(u) v c with u, v
    uniform is uniform. The normal is (b - a) x (c - a), so it points to where the corners run anticlockwise.
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
    return np.einsum("nk,nkd->nd", weights, corners[triangle]), cross[triangle] / length[triangle, None], triangle
