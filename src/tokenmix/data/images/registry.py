"""The one literal table of data sets, and how one is read by name."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from tokenmix.data.images.decode import size_of
from tokenmix.data.images.image_set import ImageData, ImageSet, channel_statistics, choose
from tokenmix.data.images.loaded import Loaded
from tokenmix.data.images.opened import CHANNELS, CROP_PCT, OpenedImages
from tokenmix.data.store import stored_path
from tokenmix.errors import UserError, unknown_name

__all__ = ["DATA_SETS", "DataInfo", "DataSet", "get", "list_data", "load_images"]


@dataclass(frozen=True)
class DataSet:
    """One row of the table.

    Attributes:
        module: the reader; it has `load(variant, size, root) -> Loaded`.
        task: what it is for.
        size: how many images, of what size, in how many classes, and megabytes to fetch.
        licence: of the content.
        registry: where it comes from, in the order of trying.
        stored: its name in the cache; None if it is not fetched.
    """

    module: str
    task: str
    size: str
    licence: str
    registry: str
    stored: str | None = None


DATA_SETS: dict[str, DataSet] = {
    "fashion-mnist": DataSet(
        "tokenmix.data.images.fashion_mnist",
        "image-classification",
        "60,000 + 10,000 grey 28 x 28, 10 classes, 31 MB",
        "MIT",
        "publisher, else Debian dataset-fashion-mnist",
        "fashion-mnist",
    ),
    "emoji": DataSet(
        "tokenmix.data.images.emoji",
        "image-classification",
        "3,781 colour 64 x 64 drawings, 9 classes, 74 MB",
        "Apache-2.0",
        "npm emoji-datasource-google 16.0.0",
        "emoji-google",
    ),
    "emoji:twitter": DataSet(
        "tokenmix.data.images.emoji",
        "image-classification",
        "the same concepts of another vendor, 62 MB",
        "CC-BY-4.0",
        "npm emoji-datasource-twitter 16.0.0",
        "emoji-twitter",
    ),
    "digits": DataSet(
        "tokenmix.data.images.digits",
        "image-classification",
        "1,437 + 360 grey 8 x 8, 10 classes",
        "BSD-3-Clause",
        "embedded in scikit-learn",
    ),
    "folder": DataSet(
        "tokenmix.data.images.folder",
        "image-classification",
        "folder:PATH, one sub-folder a class",
        "yours",
        "your disk",
    ),
    "imagefolder": DataSet(
        "tokenmix.data.images.imagefolder",
        "image-classification",
        "imagefolder:PATH, photographs in ImageNet's layout",
        "yours",
        "your disk",
    ),
    "wds": DataSet(
        "tokenmix.data.images.webdataset",
        "image-classification",
        "wds:PATH/train-{000..009}.tar, photographs in WebDataset shards",
        "yours",
        "your disk",
    ),
}


@dataclass(frozen=True)
class DataInfo:
    """One line of `tokenmix list data`."""

    name: str
    task: str
    size: str
    licence: str
    registry: str
    cached: bool


def list_data(root: Path | None = None) -> list[DataInfo]:
    """The table of data sets; `cached` says that it can be read without a network."""
    return [
        DataInfo(name, s.task, s.size, s.licence, s.registry, s.stored is None or stored_path(s.stored, root).exists())
        for name, s in DATA_SETS.items()
    ]


def get(name: str, root: Path | None = None) -> str:
    """Fetch a data set unless it is in the cache; returns the line that says where it came from."""
    return _load(name, None, root).source


def load_images(
    spec: str,
    *,
    img_size: int | tuple[int, int] | None = None,
    limit: int | None = None,
    limit_eval: int | None = None,
    seed: int = 0,
    crop_pct: float | None = None,
    root: Path | None = None,
) -> ImageData:
    """Training and test images of a data set.

    Which images are for testing never depends on the seed, so a run never saw the images it is evaluated on.

    Args:
        spec: `fashion-mnist`, `emoji`, `emoji:twitter`, `digits`, `folder:PATH`, `imagefolder:PATH`, or
            `wds:TRAIN_SHARDS,TEST_SHARDS`.
        img_size: side of the square (or height and width) that images are resized to; the set's own if not given, 64
            for a folder, 224 for photographs.
        limit: keep this many training images, in the shares of the classes, chosen by the seed.
        limit_eval: keep this many test images, in the shares of the classes, the same for every seed.
        seed: chooses the images that `limit` keeps, nothing else.
        crop_pct: share of a photograph's centre that testing keeps, 0.875 if not given; for imagefolder and wds alone.
        root: the cache; $TOKENMIX_DATA or ~/.cache/tokenmix/data if not given.

    Raises:
        UserError: unknown set, unusable folder, or a set that can be had from nowhere.
    """
    loaded = _load(spec, None if img_size is None else size_of(img_size), root)
    train, test = _limited(loaded.train, limit, seed), _limited(loaded.test, limit_eval, 0)
    share = _set_crop(spec, (train, test), crop_pct)
    # Of photographs nothing is decoded at the start: theirs are the figures of ImageNet.
    mean, std = (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD) if _photographs(train) else channel_statistics(train)
    channels, height, width = (CHANNELS, *train.size) if isinstance(train, OpenedImages) else train[0][0].shape
    return ImageData(
        spec=spec,
        train=train,
        test=test,
        classes=loaded.classes,
        channels=channels,
        img_size=(height, width),
        mean=mean,
        std=std,
        source=loaded.source,
        skipped=loaded.skipped,
        crop_pct=share,
    )


def _photographs(images: ImageSet) -> TypeGuard[OpenedImages]:
    return isinstance(images, OpenedImages) and images.photographs


def _set_crop(spec: str, parts: Sequence[ImageSet], crop_pct: float | None) -> float:
    if crop_pct is not None and not 0 < crop_pct <= 1:
        raise UserError(f"crop_pct is a share in (0, 1], got {crop_pct}")
    for images in parts:
        if not _photographs(images):
            if crop_pct is not None:
                raise UserError(f"crop_pct={crop_pct:g} is for imagefolder and wds; leave it out for {spec!r}")
            return 1.0
        images.crop_pct = crop_pct or images.crop_pct
    return crop_pct or CROP_PCT


def _load(spec: str, size: tuple[int, int] | None, root: Path | None) -> Loaded:
    name, colon, variant = spec.partition(":")
    if name not in DATA_SETS:
        if Path(spec).expanduser().is_dir():
            raise UserError(f"unknown data set {spec!r}; for the folder of that name give folder:{spec}")
        raise unknown_name("data set", spec, DATA_SETS)
    if colon and name not in ("folder", "imagefolder", "wds", "emoji"):
        raise UserError(f"{name} has no variants, got {spec!r}; give {name}")
    return importlib.import_module(DATA_SETS[name].module).load(variant, size, root)


def _limited(images: ImageSet, limit: int | None, seed: int) -> ImageSet:
    kept = choose(images.labels, limit, seed)
    return images if kept is None else images.subset(kept)
