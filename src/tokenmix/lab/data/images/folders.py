"""Folders of the user's own images, one sub-folder per class: small sets read at once, and ImageNet's layout."""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

from tokenmix.errors import UserError
from tokenmix.files import open_regular
from tokenmix.lab.data.class_folders import (
    Items,
    check_test_classes,
    class_files,
    class_names,
    first_folder,
    held_out,
)
from tokenmix.lab.data.images.decode import UnreadableImage, decode, picture_endings, probe
from tokenmix.lab.data.images.image_set import (
    CHANNELS,
    ImageSet,
    InMemoryImages,
    LazyImages,
    Skipped,
    log_skipped,
    warn_of_shrinking,
)
from tokenmix.lab.data.images.load import LoadedImages
from tokenmix.lab.data.lookup import DataRequest
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

    def __init__(
        self, items: Items, size: tuple[int, int], *, channels: int = CHANNELS, photographs: bool = False
    ) -> None:
        labels = torch.tensor([label for _, label in items], dtype=torch.int64)
        super().__init__(labels, size, channels=channels, photographs=photographs)
        self.paths = Names.of(path for path, _ in items)

    def source(self, index: int) -> Path:
        return Path(self.paths[int(self.places[index])])


def load_imagefolder(request: DataRequest) -> LoadedImages:
    """The photographs of a folder in ImageNet's layout, by their endings; none is decoded before it is needed."""
    folder, size = request.path, request.img_size
    assert size is not None  # The registry has one.
    train, test = folder / "train", first_folder(folder, ("val", "validation", "test"))
    if not train.is_dir() or test is None:
        missing = "val" if train.is_dir() else "train"
        raise UserError(
            f"{str(folder)!r} has no folder {missing}/; --data imagefolder:PATH needs {IMAGENET_LAYOUT}, and "
            "--data folder:PATH takes a folder of classes without it"
        )
    classes, tested = class_names(train, hidden="."), class_names(test, hidden=".")
    for part, names in ((train, classes), (test, tested)):
        if len(names) < 2:
            raise UserError(
                f"{part} has {len(names)} sub-folders of classes; a classifier needs at least two ({IMAGENET_LAYOUT})"
            )
    check_test_classes(test, train, tested, classes)
    parts, skipped, endings = [], [], picture_endings()
    for part, other in ((train, test), (test, train)):
        items = class_files(part, classes, _may_be_image, other)
        # By its ending: to look into a million files would take an hour.
        named = [item for item in items if os.path.splitext(item[0])[1].lower() in endings]
        skipped += [Skipped(path, NO_PICTURE) for path, _ in items if os.path.splitext(path)[1].lower() not in endings]
        named.sort(key=lambda item: (item[1], item[0]))
        parts.append(FileImages(named, size, channels=request.channels or CHANNELS, photographs=True))
    log_skipped(skipped, "file", f" of {folder}")
    empty = torch.bincount(parts[0].labels, minlength=len(classes)).eq(0).nonzero()
    if len(empty):
        raise UserError(f"there are no images in {train / classes[int(empty[0])]}; {IMAGENET_LAYOUT} is needed")
    if not len(parts[1]):
        raise UserError(f"there are no images in {test}; {IMAGENET_LAYOUT} is needed")
    warn_of_shrinking(parts[0].source, len(parts[0]), size)
    return LoadedImages(parts[0], parts[1], classes, f"imagefolder: {folder.resolve()}, read from files", skipped)


def load_folder(request: DataRequest) -> LoadedImages:
    """The images of a folder, as RGB or grey, resized and cropped about the centre.

    train/ and test/ (or val/) are taken where they are there; else a fifth of each class is kept for testing, chosen by
    the files' contents: the same files give the same split, and copies of one file stay on one side.
    """
    folder, size, channels = request.path, request.img_size, request.channels or CHANNELS
    assert size is not None  # The registry has one.
    train, test, classes = _find(folder)
    in_memory = (len(train) + len(test)) * channels * size[0] * size[1] <= MEMORY_BYTES
    images, readable, skipped = _read_all(train, size, channels, "training", in_memory=in_memory)
    counts = torch.bincount(images.labels, minlength=len(classes)).tolist()
    if empty := [name for name, count in zip(classes, counts) if not count]:
        left_out = f" ({len(skipped)} unreadable, the first: {skipped[0].path} {skipped[0].reason})" if skipped else ""
        raise UserError(f"there are no images of class {empty[0]!r}{left_out}; {NO_IMAGES}")
    if test:
        tested, _, more = _read_all(test, size, channels, "test", in_memory=in_memory)
        skipped += more
    else:
        apart = held_out(readable, classes, _digest, "image")
        images, tested = (images.subset(torch.nonzero(part).flatten()) for part in (~apart, apart))
    log_skipped(skipped, "file", f" of {folder}")
    warn_of_shrinking(lambda place: Path(readable[place][0]), len(readable), size)
    held = "in memory" if in_memory else "read from files"
    return LoadedImages(images, tested, classes, f"folder: {folder.resolve()}, {held}", skipped)


def _may_be_image(name: str) -> bool:
    """Whatever its ending; not what systems leave after."""
    return name.lower() not in NOT_IMAGES


def _find(folder: Path) -> tuple[Items, Items, list[str]]:
    """Files of the training and the test side (empty if it is still to be split off), and the classes."""
    if not folder.is_dir():
        problem = "is a file" if folder.is_file() else "does not exist"
        raise UserError(f"the folder {str(folder)!r} {problem}; give --data folder:PATH with {LAYOUT}")
    train, test = folder / "train", first_folder(folder, ("test", "val", "valid", "validation"))
    if not train.is_dir() or (test is None and not class_names(train)):
        train, test = folder, None
    classes = class_names(train)
    loose = [] if classes else [path for path in train.rglob("*") if path.is_file() and not path.name.startswith(".")]
    if loose:
        raise UserError(f"{train} holds {len(loose)} files without labels; it needs {LAYOUT}")
    if len(classes) == 1:
        raise UserError(f"{train} has only one class ({classes[0]!r}); give two sub-folders or more")
    items = class_files(train, classes, _may_be_image, test) if classes else []
    if not items:
        raise UserError(f"there are no images in {folder}; it needs {LAYOUT}")
    if test is None:
        return items, [], classes
    check_test_classes(test, train, class_names(test), classes)
    test_items = class_files(test, classes, _may_be_image, train)
    if not test_items:
        raise UserError(f"there are no images in {test}; remove it to keep a fifth of the training images")
    return items, test_items, classes


def _read_all(
    items: Items, size: tuple[int, int], channels: int, label: str, *, in_memory: bool
) -> tuple[ImageSet, Items, list[Skipped]]:
    """The images that can be read, decoded if they are to be `in_memory`; their files; and the others."""
    images = torch.empty(len(items) if in_memory else 0, channels, *size, dtype=torch.uint8)

    def problem_of(place: int) -> Skipped | None:
        path = items[place][0]
        try:
            if in_memory:
                images[place] = decode(path, channels, size)
            else:
                probe(path)
        except UnreadableImage as reason:
            return Skipped(path, str(reason))
        return None

    console = Console(stderr=True)
    quiet = not console.is_terminal or len(items) < 2000
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(problem_of, range(len(items)))
        problems = list(
            track(found, f"reading {label} images", total=len(items), console=console, transient=True, disable=quiet)
        )
    kept = [place for place, problem in enumerate(problems) if problem is None]
    readable, skipped = [items[place] for place in kept], [problem for problem in problems if problem is not None]
    if not in_memory:
        return FileImages(readable, size, channels=channels), readable, skipped
    labels = torch.tensor([label for _, label in readable], dtype=torch.int64)
    return InMemoryImages(images[kept] if skipped else images, labels, flip=True, fill=None), readable, skipped


def _digest(path: str) -> bytes:
    """A hash of the length and the first 64 KiB: distinguishes images without reading a huge set twice."""
    with open_regular(Path(path)) as file:
        head = file.read(1 << 16)
    return hashlib.blake2b(head, digest_size=16, salt=os.path.getsize(path).to_bytes(8, "little")).digest()
