"""ImageNet's layout: train/CLASS/*.JPEG and val/CLASS/*.JPEG. Nothing is decoded before it is needed."""

import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from tokenmix.data.images.image_set import LoadedImages
from tokenmix.data.images.lazy import CROP_PCT, LazyImages
from tokenmix.data.lookup import DataRequest
from tokenmix.data.store import Names
from tokenmix.errors import UserError

__all__ = ["ImageFolderDataset", "load_imagefolder"]

SIZE = (224, 224)
TEST_NAMES = ("val", "validation", "test")
ENDINGS = (".jpeg", ".jpg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")
LAYOUT = "train/CLASS/*.JPEG and val/CLASS/*.JPEG"


class ImageFolderDataset(LazyImages):
    """Files below one folder; which image is which place of `paths` is kept apart, so that a subset is small."""

    photographs = True

    def __init__(
        self, folder: Path, paths: Names, labels: Tensor, size: tuple[int, int], places: Tensor | None = None
    ) -> None:
        places = torch.arange(len(paths)) if places is None else places
        super().__init__(labels, size, CROP_PCT)
        self.folder, self.paths, self.places = folder, paths, places

    def source(self, index: int) -> Path:
        return self.folder / self.paths[int(self.places[index])]

    def subset(self, indices: Tensor) -> "ImageFolderDataset":
        kept = ImageFolderDataset(self.folder, self.paths, self.labels[indices], self.size, self.places[indices])
        kept.crop_pct = self.crop_pct
        return kept


def load_imagefolder(request: DataRequest) -> LoadedImages:
    """The photographs of a folder in ImageNet's layout; the classes are the sub-folders of train/, sorted."""
    folder = request.path
    train = folder / "train"
    tests = [folder / name for name in TEST_NAMES if (folder / name).is_dir()]
    if not train.is_dir() or not tests:
        missing = "train" if not train.is_dir() else "val"
        raise UserError(
            f"{str(folder)!r} has no folder {missing}/; --data imagefolder:PATH needs {LAYOUT}, and --data folder:PATH "
            "takes a folder of classes without it"
        )
    classes = _classes(train)
    unknown = sorted(set(_classes(tests[0])) - set(classes))
    if unknown:
        raise UserError(f"{tests[0]} has the class {unknown[0]!r}, which {train} has not; rename or remove it")
    parts = [_part(part, classes, request.img_size or SIZE) for part in (train, tests[0])]
    empty = torch.bincount(parts[0].labels, minlength=len(classes)).eq(0).nonzero()
    if len(empty):
        raise UserError(f"there are no images in {train / classes[int(empty[0])]}; {LAYOUT} is needed")
    if not len(parts[1]):
        raise UserError(f"there are no images in {tests[0]}; {LAYOUT} is needed")
    return LoadedImages(parts[0], parts[1], classes, f"imagefolder: {folder.resolve()}, read from files")


def _classes(part: Path) -> list[str]:
    names = sorted(entry.name for entry in os.scandir(part) if entry.is_dir() and not entry.name.startswith("."))
    if len(names) < 2:
        raise UserError(f"{part} has {len(names)} sub-folders of classes; a classifier needs at least two ({LAYOUT})")
    return names


def _part(part: Path, classes: list[str], size: tuple[int, int]) -> ImageFolderDataset:
    paths, labels = [], []
    for label, name in enumerate(classes):
        found = sorted(_files(part / name, name)) if (part / name).is_dir() else []
        paths += found
        labels += [label] * len(found)
    return ImageFolderDataset(part, Names.of(paths), torch.tensor(labels, dtype=torch.int64), size)


def _files(folder: Path, prefix: str) -> Iterator[str]:
    """Pictures by their endings, with sub-folders: to look into a million files would take an hour."""
    for entry in os.scandir(folder):
        if entry.is_dir():
            yield from _files(Path(entry.path), f"{prefix}/{entry.name}")
        elif entry.name.lower().endswith(ENDINGS) and not entry.name.startswith("."):
            yield f"{prefix}/{entry.name}"
