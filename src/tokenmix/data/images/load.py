"""Labelled images by name."""

from collections.abc import Sequence
from pathlib import Path
from typing import TypeGuard

from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from tokenmix.data.images.decode import size_of
from tokenmix.data.images.image_set import ImageData, ImageSet, LoadedImages, channel_statistics, choose
from tokenmix.data.images.lazy import CHANNELS, CROP_PCT, LazyImages
from tokenmix.data.lookup import load_data
from tokenmix.errors import UserError

__all__ = ["load_images"]


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
    size = None if img_size is None else size_of(img_size)
    loaded: LoadedImages = load_data(spec, "images", root=root, img_size=size)
    train, test = _limited(loaded.train, limit, seed), _limited(loaded.test, limit_eval, 0)
    share = _set_crop(spec, (train, test), crop_pct)
    # Of photographs nothing is decoded at the start: theirs are the figures of ImageNet.
    mean, std = (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD) if _photographs(train) else channel_statistics(train)
    channels, height, width = (CHANNELS, *train.size) if isinstance(train, LazyImages) else train[0][0].shape
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


def _photographs(images: ImageSet) -> TypeGuard[LazyImages]:
    return isinstance(images, LazyImages) and images.photographs


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


def _limited(images: ImageSet, limit: int | None, seed: int) -> ImageSet:
    kept = choose(images.labels, limit, seed)
    return images if kept is None else images.subset(kept)
