"""Labelled images by name."""

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard

import torch
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from tokenmix.errors import UserError
from tokenmix.lab.data.images.decode import size_of
from tokenmix.lab.data.images.image_set import (
    CROP_PCT,
    ImageSet,
    LazyImages,
    Skipped,
    channel_statistics,
    with_channels,
)
from tokenmix.lab.data.lookup import load_data, short_name
from tokenmix.lab.data.split import hold_out, limited

STATISTICS_SAMPLE = 2048


@dataclass(frozen=True)
class LoadedImages:
    """A data set as its reader gives it: whole, at the size that was asked for."""

    train: ImageSet
    test: ImageSet
    classes: list[str]
    source: str
    skipped: Sequence[Skipped] = ()


@dataclass(frozen=True)
class ImageData:
    """Training and test images of a data set.

    Attributes:
        spec: what `load_images` was asked for.
        train, test: map-style data sets of (uint8 (C, H, W), label), all of size `img_size`.
        validation: those of the training images that are held out to choose by; None if there are none.
        classes: name of each label.
        channels: 1 or 3.
        img_size: (height, width).
        mean, std: per channel, in 0..1, measured on the training images.
        source: one line: which home or package, version, licence, path.
        skipped: files that were left out.
        crop_pct: share of a test image that its centre crop keeps.
    """

    spec: str
    train: ImageSet
    test: ImageSet
    classes: list[str]
    channels: int
    img_size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    source: str
    skipped: Sequence[Skipped] = ()
    crop_pct: float = 1.0
    validation: ImageSet | None = None

    @property
    def name(self) -> str:
        """The spec as a part of a file name."""
        return short_name(self.spec)

    @property
    def flip(self) -> bool:
        """A mirrored image is still of its class."""
        return self.train.flip

    def describe(self) -> dict[str, Any]:
        """What a run folder's data.json keeps; only JSON types."""
        parts = {"train": self.train, "validation": self.validation, "test": self.test}
        return {
            "name": self.name,
            "spec": self.spec,
            "source": self.source,
            "classes": self.classes,
            "counts": {
                part: dict(zip(self.classes, torch.bincount(images.labels, minlength=len(self.classes)).tolist()))
                for part, images in parts.items()
                if images is not None
            },
            "channels": self.channels,
            "img_size": list(self.img_size),
            "mean": list(self.mean),
            "std": list(self.std),
            "flip": self.flip,
            "fill": self.train.fill,
            "crop_pct": self.crop_pct,
            "skipped": len(self.skipped),
            # Bytes of a path that are not UTF-8 would make a JSON that other readers refuse.
            "skipped_first": [
                {"path": os.fsencode(s.path).decode("utf-8", "replace"), "reason": s.reason} for s in self.skipped[:20]
            ],
        }


def load_images(
    spec: str,
    *,
    img_size: int | tuple[int, int] | None = None,
    limit: int | None = None,
    limit_eval: int | None = None,
    validation: int | None = 0,
    seed: int = 0,
    crop_pct: float | None = None,
    channels: int | None = None,
    root: Path | None = None,
) -> ImageData:
    """Training and test images of a data set.

    Which images are for testing and validation never depends on the seed, so a run never saw the images it is evaluated
    on.

    Args:
        spec: a name of `tokenmix list data`, such as `fashion-mnist`, `folder:PATH`, `imagefolder:PATH` or
            `wds:TRAIN_SHARDS,TEST_SHARDS`.
        img_size: side of the square (or height and width) that images are resized to; the set's own if not given, 64
            for a folder, 224 for photographs.
        limit: keep this many training images, in the shares of the classes, chosen by the seed.
        limit_eval: keep this many test images, in the shares of the classes, the same for every seed.
        validation: hold out this many training images; a tenth of those used if None. `limit` is taken of the others.
        seed: chooses the images that `limit` keeps, nothing else.
        crop_pct: share of a photograph's centre that testing keeps, 0.875 if not given; for imagefolder and wds alone.
        channels: 3, or 1 for grey; the set's own if not given, 3 for the user's own files.
        root: the cache; $TOKENMIX_DATA or ~/.cache/tokenmix/data if not given.

    Raises:
        UserError: unknown set, unusable folder, or a data set that cannot be obtained.
    """
    size = None if img_size is None else size_of(img_size)
    if channels not in (None, 1, 3):
        raise UserError(f"channels must be 1 or 3, got {channels}")
    loaded: LoadedImages = load_data(spec, "images", root=root, img_size=size, channels=channels)
    train, test = (with_channels(images, channels) for images in (loaded.train, loaded.test))
    loaded = replace(loaded, train=train, test=test)
    kept, held = hold_out(loaded.train.labels, validation, limit)
    test, whole = loaded.test, loaded.train.subset(kept) if len(held) else loaded.train
    test = limited(test, test.labels, limit_eval, 0)
    train, held_out = limited(whole, whole.labels, limit, seed), loaded.train.subset(held) if len(held) else None
    share = _set_crop(spec, [part for part in (train, test, held_out) if part is not None], crop_pct)
    mean, std = _statistics(train)
    channels, height, width = (train.channels, *train.size) if isinstance(train, LazyImages) else train[0][0].shape
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
        validation=held_out,
    )


def _photographs(images: ImageSet) -> TypeGuard[LazyImages]:
    return isinstance(images, LazyImages) and images.photographs


def _set_crop(spec: str, parts: Sequence[ImageSet], crop_pct: float | None) -> float:
    if crop_pct is not None and not 0 < crop_pct <= 1:
        raise UserError(f"crop_pct must be in (0, 1], got {crop_pct}")
    for images in parts:
        if not _photographs(images):
            if crop_pct is not None:
                raise UserError(f"crop_pct={crop_pct:g} is for imagefolder and wds; leave it out for {spec!r}")
            return 1.0
        images.crop_pct = crop_pct or images.crop_pct
    return crop_pct or CROP_PCT


def _statistics(images: ImageSet) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Those of ImageNet for photographs; else measured, on all images in memory or on evenly spread ones."""
    if _photographs(images):
        # Nothing is decoded at the start.
        both = (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)
        mean, std = both if images.channels == 3 else ((statistics.mean(values),) for values in both)
        return mean, std
    places = torch.arange(len(images))
    if not images.in_memory and len(images) > STATISTICS_SAMPLE:
        places = torch.linspace(0, len(images) - 1, STATISTICS_SAMPLE).long()
    return channel_statistics(images.pixels(part)[0] for part in places.split(4096))
