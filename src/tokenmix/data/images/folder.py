"""A folder of the user's own images: one sub-folder a class."""

import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from tokenmix.data.fetch import log
from tokenmix.data.images.decode import UnreadableImage, decode, probe
from tokenmix.data.images.image_set import ImageSet, InMemoryImages, LoadedImages, Skipped
from tokenmix.data.images.lazy import CHANNELS, LazyImages
from tokenmix.data.lookup import DataRequest
from tokenmix.errors import UserError

__all__ = ["FileImages", "load_folder"]

DEFAULT_SIZE = (64, 64)
TEST_SHARE = 0.2
# Decoded images up to this many bytes are kept in memory; larger sets are read from their files batch by batch.
MEMORY_BYTES = 2 << 30
TEST_NAMES = ("test", "val", "valid", "validation")
NOT_IMAGES = {"thumbs.db", "desktop.ini"}
NO_IMAGES = "a class needs readable PNG, JPEG, WebP, BMP, GIF or TIFF files"
LAYOUT = "one sub-folder a class, or train/ and test/ with one sub-folder a class in each"


@dataclass(frozen=True)
class Item:
    """A file and its label."""

    path: Path
    label: int


class FileImages(LazyImages):
    """Images that are decoded from their files each time."""

    def __init__(self, items: Sequence[Item], size: tuple[int, int]) -> None:
        super().__init__(torch.tensor([item.label for item in items], dtype=torch.int64), size)
        self.items = list(items)

    def source(self, index: int) -> Path:
        return self.items[index].path

    def subset(self, indices: Tensor) -> "FileImages":
        return FileImages([self.items[i] for i in indices.tolist()], self.size)


def load_folder(request: DataRequest) -> LoadedImages:
    """The images of a folder, as RGB, resized and cropped about the centre.

    train/ and test/ (or val/) are taken where they are there; else a fifth of each class is kept for testing, chosen by
    the files' contents: the same files give the same split, and copies of one file stay on one side.
    """
    folder, size = request.path, request.img_size or DEFAULT_SIZE
    train, test, classes = _find(folder)
    skipped: list[Skipped] = []
    in_memory = (len(train) + len(test)) * CHANNELS * size[0] * size[1] <= MEMORY_BYTES
    parts = []
    for name, items in (("train", train), ("test", test)):
        images, bad = _decode_all(items, size, name) if in_memory else _probe_all(items, size)
        _check_classes(images, classes, bad, everywhere=name == "train")
        parts.append(images)
        skipped += bad
    if test:
        train_set, test_set = parts
    else:
        train_set, test_set = _split(parts[0], _readable(train, skipped), classes)
    if skipped:
        first = "; ".join(f"{s.path} {s.reason}" for s in skipped[:3])
        log(f"{len(skipped)} file{'s' * (len(skipped) > 1)} of {folder} left out: {first}{'; …' * (len(skipped) > 3)}")
    held = "in memory" if in_memory else "read from files"
    return LoadedImages(train_set, test_set, classes, f"folder: {folder.resolve()}, {held}", skipped)


def _find(folder: Path) -> tuple[list[Item], list[Item], list[str]]:
    """Files of the training and the test side (empty if it is still to be split off), and the classes."""
    if not folder.is_dir():
        problem = "is a file" if folder.is_file() else "does not exist"
        raise UserError(f"the folder {str(folder)!r} {problem}; give --data folder:PATH with {LAYOUT}")
    train = folder / "train"
    tests = [folder / name for name in TEST_NAMES if (folder / name).is_dir()]
    if not train.is_dir() or (not tests and not _folders(train)):
        train, tests = folder, []
    classes = [path.name for path in _folders(train)]
    if not classes:
        _no_classes(train)
    if len(classes) == 1:
        raise UserError(f"{train} has one class only ({classes[0]!r}); give two sub-folders or more")
    items = [Item(path, label) for label, name in enumerate(classes) for path in _files(train / name)]
    if not items:
        raise UserError(f"there are no images in {folder}; it needs {LAYOUT}")
    return items, _test_items(tests[0], classes) if tests else [], classes


def _test_items(folder: Path, classes: list[str]) -> list[Item]:
    unknown = [path.name for path in _folders(folder) if path.name not in classes]
    if unknown:
        raise UserError(
            f"{folder} has the class {unknown[0]!r}, which is not in the training folder; rename or remove it"
        )
    items = [Item(path, label) for label, name in enumerate(classes) for path in _files(folder / name)]
    if not items:
        raise UserError(f"there are no images in {folder}; remove it to keep a fifth of the training images")
    return items


def _no_classes(folder: Path) -> None:
    images = sum(1 for path in _files(folder))
    if images:
        raise UserError(f"{folder} holds {images} files without labels; it needs {LAYOUT}")
    raise UserError(f"there are no images in {folder}; it needs {LAYOUT}")


def _folders(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith((".", "__")))


def _files(folder: Path) -> list[Path]:
    """Files below a folder, in a fixed order, without those that systems and programs leave behind."""
    found = []
    for place, folders, files in os.walk(folder, followlinks=True):
        folders[:] = sorted(f for f in folders if not f.startswith((".", "__")))
        found += [Path(place, f) for f in sorted(files) if not f.startswith(".") and f.lower() not in NOT_IMAGES]
    return found


def _decode_all(items: Sequence[Item], size: tuple[int, int], label: str) -> tuple[InMemoryImages, list[Skipped]]:
    images = torch.empty(len(items), CHANNELS, *size, dtype=torch.uint8)

    def one(place: int) -> Skipped | None:
        try:
            images[place] = decode(items[place].path, CHANNELS, size)
        except UnreadableImage as reason:
            return Skipped(str(items[place].path), str(reason))
        return None

    bad = _in_threads(one, items, f"reading {label} images")
    kept = torch.tensor([i for i, reason in enumerate(bad) if reason is None], dtype=torch.int64)
    labels = torch.tensor([item.label for item in items], dtype=torch.int64)
    if len(kept) < len(items):
        images, labels = images[kept], labels[kept]
    return InMemoryImages(images, labels, flip=True, fill=None), [b for b in bad if b is not None]


def _probe_all(items: Sequence[Item], size: tuple[int, int]) -> tuple[FileImages, list[Skipped]]:
    def one(place: int) -> Skipped | None:
        try:
            probe(items[place].path)
        except UnreadableImage as reason:
            return Skipped(str(items[place].path), str(reason))
        return None

    bad = _in_threads(one, items, "looking at files")
    kept = [item for item, reason in zip(items, bad) if reason is None]
    return FileImages(kept, size), [b for b in bad if b is not None]


def _in_threads(one: Callable[[int], Skipped | None], items: Sequence[Item], label: str) -> list[Skipped | None]:
    console = Console(stderr=True)
    quiet = not console.is_terminal or len(items) < 2000
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = pool.map(one, range(len(items)))
        return list(track(results, label, total=len(items), console=console, transient=True, disable=quiet))


def _readable(items: Sequence[Item], skipped: Sequence[Skipped]) -> list[Item]:
    bad = {s.path for s in skipped}
    return [item for item in items if str(item.path) not in bad]


def _check_classes(images: ImageSet, classes: list[str], bad: Sequence[Skipped], *, everywhere: bool) -> None:
    counts = torch.bincount(images.labels, minlength=len(classes)).tolist()
    empty = [name for name, count in zip(classes, counts) if not count]
    if everywhere and empty:
        left_out = f" ({len(bad)} unreadable, the first: {bad[0].path} {bad[0].reason})" if bad else ""
        raise UserError(f"there are no images of class {empty[0]!r}{left_out}; {NO_IMAGES}")


def _split(images: ImageSet, items: Sequence[Item], classes: list[str]) -> tuple[ImageSet, ImageSet]:
    """A fifth of each class, by content, for testing."""
    digests = [_digest(item.path) for item in items]
    test = torch.zeros(len(items), dtype=torch.bool)
    for label, name in enumerate(classes):
        places = [i for i, item in enumerate(items) if item.label == label]
        distinct = sorted({digests[i] for i in places})
        if len(distinct) < 2:
            raise UserError(f"class {name!r} has only one image; it needs two or more, one of them for testing")
        chosen = set(distinct[: max(1, round(TEST_SHARE * len(distinct)))])
        test[[i for i in places if digests[i] in chosen]] = True
    return images.subset(torch.nonzero(~test).flatten()), images.subset(torch.nonzero(test).flatten())


def _digest(path: Path) -> bytes:
    """A hash of the length and the first 64 KiB: tells pictures apart without reading a huge set twice."""
    with path.open("rb") as file:
        head = file.read(1 << 16)
    return hashlib.blake2b(head, digest_size=16, salt=path.stat().st_size.to_bytes(8, "little")).digest()
