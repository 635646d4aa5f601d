"""Labelled images by name."""

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from tokenmix.errors import UserError
from tokenmix.lab.data.images.decode import size_of
from tokenmix.lab.data.images.image_set import ImageSet, channel_statistics, with_channels
from tokenmix.lab.data.indexed import spread, train_validation_test
from tokenmix.lab.data.lookup import load_data, short_name
from tokenmix.lab.data.reading import Skipped

STATISTICS_SAMPLE = 2048


@dataclass(frozen=True)
class ImageData:
    """Training and test images of a data set. A reader gives the first five attributes, `load_images` the others.

    Attributes:
        train, test: map-style data sets of (uint8 (C, H, W), label), all of one size.
        classes: name of each label.
        source: one line: which home or package, version, licence, path.
        skipped: files that were left out.
        spec: what `load_images` was asked for.
        validation: those of the training images that are held out to choose by; None if there are none.
        mean, std: per channel, in 0..1, measured on the training images.
    """

    train: ImageSet
    test: ImageSet
    classes: list[str]
    source: str
    skipped: Sequence[Skipped] = ()
    spec: str = ""
    validation: ImageSet | None = None
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        """The spec as a part of a file name."""
        return short_name(self.spec)

    @property
    def channels(self) -> int:
        """1 or 3."""
        return self.train.channels

    @property
    def img_size(self) -> tuple[int, int]:
        """(height, width)."""
        return self.train.size

    @property
    def flip(self) -> bool:
        """A mirrored image is still of its class."""
        return self.train.flip

    @property
    def crop_pct(self) -> float:
        """Share of a test image that its centre crop keeps."""
        return self.train.crop_pct

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
    if crop_pct is not None and not 0 < crop_pct <= 1:
        raise UserError(f"crop_pct must be in (0, 1], got {crop_pct}")
    loaded: ImageData = load_data(spec, "images", root=root, img_size=size, channels=channels)
    train, test = (with_channels(images, channels) for images in (loaded.train, loaded.test))
    if crop_pct is not None:
        for images in (train, test):
            if not images.photographs:
                raise UserError(f"crop_pct={crop_pct:g} is for imagefolder and wds; leave it out for {spec!r}")
            images.crop_pct = crop_pct
    train, held_out, test = train_validation_test(
        train,
        test,
        (train.labels, test.labels),
        limit=limit,
        limit_eval=limit_eval,
        validation=validation,
        seed=seed,
    )
    mean, std = _statistics(train)
    return replace(loaded, train=train, test=test, spec=spec, validation=held_out, mean=mean, std=std)


def _statistics(images: ImageSet) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Those of ImageNet for photographs; else measured, on all images in memory or on evenly spread ones."""
    if images.photographs:
        # Nothing is decoded at the start.
        both = (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)
        mean, std = both if images.channels == 3 else ((statistics.mean(values),) for values in both)
        return mean, std
    places = spread(len(images), None if images.in_memory else STATISTICS_SAMPLE)
    return channel_statistics(images.pixels(part)[0] for part in places.split(4096))
