"""Folders of the user's own images, one sub-folder per class: small sets read at once, and ImageNet's layout."""

import hashlib
import os
from pathlib import Path

import torch

from tokenmix.errors import UserError
from tokenmix.files import open_regular
from tokenmix.lab.data.class_folders import Item, held_out, labelled_files
from tokenmix.lab.data.images.decode import decode, picture_endings, stored_size
from tokenmix.lab.data.images.image_set import (
    CHANNELS,
    ImageData,
    ImageSet,
    InMemoryImages,
    LazyImages,
    warn_of_shrinking,
)
from tokenmix.lab.data.lookup import DataRequest
from tokenmix.lab.data.reading import Skipped, log_skipped, read_each
from tokenmix.lab.data.store import Names

# Decoded images up to this many bytes are kept in memory; larger sets are read from their files batch by batch.
MEMORY_BYTES = 2 << 30
NOT_IMAGES = ("thumbs.db", "desktop.ini")
NO_IMAGES = "a class needs readable PNG, JPEG, WebP, BMP, GIF or TIFF files"
NO_PICTURE = "has not the ending of a picture that is read"
LAYOUT = "one sub-folder per class, or train/ and test/ with one sub-folder per class in each"
IMAGENET_LAYOUT = "train/CLASS/*.JPEG and val/CLASS/*.JPEG"


class FileImages(LazyImages):
    """Images that are decoded from their files each time."""

    def __init__(self, items: list[Item], size: tuple[int, int], *, channels: int, photographs: bool = False) -> None:
        super().__init__(_labels(items), size, channels=channels, photographs=photographs)
        self.paths = Names.of(path for path, _ in items)

    def source(self, index: int) -> Path:
        return Path(self.paths[int(self.places[index])])


def load_imagefolder(request: DataRequest) -> ImageData:
    """The photographs of a folder in ImageNet's layout, by their endings; none is decoded before it is needed."""
    folder, size = request.path, request.img_size
    assert size is not None  # The registry has one.
    # By its ending: to look into a million files would take an hour.
    endings = picture_endings()
    others: list[Skipped] = []

    def wanted(path: str) -> bool:
        if _may_be_image(path) and os.path.splitext(path)[1].lower() not in endings:
            others.append(Skipped(path, NO_PICTURE))
            return False
        return _may_be_image(path)

    *sides, classes = labelled_files(
        folder,
        wanted,
        of="images",
        layout=f"{IMAGENET_LAYOUT}; --data folder:PATH takes a folder of classes without it",
        test_names=("val", "validation", "test"),
        hidden=".",
        whole=False,
    )
    channels = request.channels or CHANNELS
    train, test = (FileImages(side, size, channels=channels, photographs=True) for side in sides)
    log_skipped(others, f" of {folder}")
    _check_classes(train, classes, others)
    warn_of_shrinking(train.source, len(train), size)
    return ImageData(train, test, classes, f"imagefolder: {folder.resolve()}, read from files", others)


def load_folder(request: DataRequest) -> ImageData:
    """The images of a folder, as RGB or grey, resized and cropped about the centre.

    train/ and test/ (or val/) are taken where they are there; else a fifth of each class is kept for testing, chosen by
    the files' contents: the same files give the same split, and copies of one file stay on one side.
    """
    folder, size, channels = request.path, request.img_size, request.channels or CHANNELS
    assert size is not None  # The registry has one.
    train, test, classes = labelled_files(folder, _may_be_image, of="images", layout=LAYOUT)
    in_memory = (len(train) + len(test)) * channels * size[0] * size[1] <= MEMORY_BYTES
    images, readable, skipped = _read_all(train, size, channels, "training", in_memory=in_memory)
    _check_classes(images, classes, skipped)
    if test:
        tested, _, more = _read_all(test, size, channels, "test", in_memory=in_memory)
        skipped += more
    else:
        apart = held_out(readable, classes, _digest, "image")
        images, tested = (images.subset(torch.nonzero(part).flatten()) for part in (~apart, apart))
    log_skipped(skipped, f" of {folder}")
    warn_of_shrinking(lambda place: Path(readable[place][0]), len(readable), size)
    held = "in memory" if in_memory else "read from files"
    return ImageData(images, tested, classes, f"folder: {folder.resolve()}, {held}", skipped)


def _may_be_image(path: str) -> bool:
    """Whatever its ending; not what systems leave after."""
    return os.path.basename(path).lower() not in NOT_IMAGES


def _check_classes(images: ImageSet, classes: list[str], skipped: list[Skipped]) -> None:
    counts = torch.bincount(images.labels, minlength=len(classes)).tolist()
    if empty := [name for name, count in zip(classes, counts) if not count]:
        left_out = f" ({len(skipped)} unreadable, the first: {skipped[0].path} {skipped[0].reason})" if skipped else ""
        raise UserError(f"there are no images of class {empty[0]!r}{left_out}; {NO_IMAGES}")


def _labels(items: list[Item]) -> torch.Tensor:
    return torch.tensor([label for _, label in items], dtype=torch.int64)


def _read_all(
    items: list[Item], size: tuple[int, int], channels: int, label: str, *, in_memory: bool
) -> tuple[ImageSet, list[Item], list[Skipped]]:
    """The images that can be read, decoded if they are to be `in_memory`; their files; and the others."""
    images = torch.empty(len(items) if in_memory else 0, channels, *size, dtype=torch.uint8)

    def read(place: int) -> None:
        if in_memory:
            images[place] = decode(items[place][0], channels, size)
        else:
            stored_size(items[place][0])

    found, skipped = read_each(
        range(len(items)), read, lambda place: items[place][0], f"reading {label} images", threads=os.cpu_count()
    )
    kept = [place for place, _ in found]
    readable = [items[place] for place in kept]
    if not in_memory:
        return FileImages(readable, size, channels=channels), readable, skipped
    return InMemoryImages(images[kept] if skipped else images, _labels(readable)), readable, skipped


def _digest(path: str) -> bytes:
    """A hash of the length and the first 64 KiB: distinguishes images without reading a huge set twice."""
    with open_regular(Path(path)) as file:
        head = file.read(1 << 16)
    return hashlib.blake2b(head, digest_size=16, salt=os.path.getsize(path).to_bytes(8, "little")).digest()
