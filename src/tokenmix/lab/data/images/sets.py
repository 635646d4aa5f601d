"""Users' folders of labelled images, and the two sets that the package knows by name.

Small folders are read at once, ImageNet's layout on demand. Digits: scikit-learn's 1,797 embedded grey scans of 8 x 8
pixels. Fashion-MNIST: 60,000 + 10,000 grey images of 28 x 28 pixels in 10 classes of clothing (Xiao, Rasul and
Vollgraf, 2017), fetched once and read by torchvision.
"""

import os
import zlib
from pathlib import Path

import numpy as np
import torch
from torchvision.datasets import FashionMNIST
from torchvision.datasets.utils import extract_archive

from tokenmix.errors import UserError
from tokenmix.lab.data.fetch import FetchError, apt_package, check_digest, download, first_that_works
from tokenmix.lab.data.images.decode import decode, is_read, stored_size
from tokenmix.lab.data.images.image_set import (
    CHANNELS,
    ImageData,
    ImageSet,
    InMemoryImages,
    LazyImages,
    warn_of_shrinking,
)
from tokenmix.lab.data.lookup import DataRequest, stored_path
from tokenmix.lab.data.reading import Item, Skipped, held_out, labelled_files, log_skipped, read_each
from tokenmix.lab.data.store import Names, Stored, fetched

# Decoded images up to this many bytes stay in memory; larger sets are read from files batch by batch.
MEMORY_BYTES = 2 << 30
NOT_IMAGES = ("thumbs.db", "desktop.ini")
NO_IMAGES = "a class needs readable PNG, JPEG, WebP, BMP, GIF or TIFF files"
NO_PICTURE = "has not the ending of a picture that is read"
LAYOUT = "one sub-folder per class, or train/ and test/ with one sub-folder per class in each"
IMAGENET_LAYOUT = "train/CLASS/*.JPEG and val/CLASS/*.JPEG"


class FileImages(LazyImages):
    """Images decoded from files on each read."""

    def __init__(self, items: list[Item], size: tuple[int, int], *, channels: int, photographs: bool = False) -> None:
        super().__init__(_labels(items), size, channels=channels, photographs=photographs)
        self.paths = Names.of(path for path, _ in items)

    def source(self, index: int) -> str:
        return self.paths[int(self.indices[index])]


def load_imagefolder(request: DataRequest) -> ImageData:
    """Photographs in ImageNet's layout, found by file ending and decoded on demand."""
    folder, size = request.path, request.img_size
    assert size is not None  # The registry has one.
    # By file ending: opening a million files would take an hour.
    others: list[Skipped] = []

    def wanted(path: str) -> bool:
        if _may_be_image(path) and not is_read(os.path.splitext(path)[1]):
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
    warn_of_shrinking(lambda index: stored_size(train.source(index)), len(train), size)
    return ImageData(train, test, classes, f"imagefolder: {folder.resolve()}, read from files", others)


def load_folder(request: DataRequest) -> ImageData:
    """Images of a folder as RGB or grey, resized and centre-cropped.

    train/ and test/ (or val/) are used if present. Otherwise a fifth of each class is for testing, chosen by file
    content: the same files give the same split, and copies of a file stay on one side.
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
        apart = held_out(readable, classes, "image")
        images, tested = (images.subset(torch.nonzero(part).flatten()) for part in (~apart, apart))
    log_skipped(skipped, f" of {folder}")
    warn_of_shrinking(lambda index: stored_size(readable[index][0]), len(readable), size)
    held = "in memory" if in_memory else "read from files"
    return ImageData(images, tested, classes, f"folder: {folder.resolve()}, {held}", skipped)


def _may_be_image(path: str) -> bool:
    """Any file ending; not files that operating systems leave."""
    return os.path.basename(path).lower() not in NOT_IMAGES


def _check_classes(images: ImageSet, classes: list[str], skipped: list[Skipped]) -> None:
    counts = torch.bincount(images.labels, minlength=len(classes)).tolist()
    if empty := [name for name, count in zip(classes, counts) if not count]:
        left_out = (
            f" ({len(skipped)} unreadable in all, the first: {skipped[0].path} {skipped[0].reason})" if skipped else ""
        )
        raise UserError(f"there are no images of class {empty[0]!r}{left_out}; {NO_IMAGES}")


def _labels(items: list[Item]) -> torch.Tensor:
    return torch.tensor([label for _, label in items], dtype=torch.int64)


def _read_all(
    items: list[Item], size: tuple[int, int], channels: int, label: str, *, in_memory: bool
) -> tuple[ImageSet, list[Item], list[Skipped]]:
    """Readable images, decoded if `in_memory`; their files; and skipped files."""
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


TEST_DIGITS = 360
HOME = "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/"
PACKAGE = "dataset-fashion-mnist"
CONTENT = "14410854cf7a289477dcfc7df3f8ec24741e281cdcc425ede0d9a748ca630214"
"""SHA-256 of the four unpacked files; sources compress them differently."""


def load_digits(request: DataRequest) -> ImageData:
    """The digits in a fixed stratified split: 1,437 training and 360 test images."""
    import sklearn
    from sklearn.datasets import load_digits as scans
    from sklearn.model_selection import train_test_split

    pixels, target = scans(return_X_y=True)
    # Levels 0 to 16 become 0 to 255.
    images = torch.from_numpy((np.asarray(pixels) * (255 / 16)).round()).byte().view(-1, 1, 8, 8)
    labels = torch.from_numpy(np.asarray(target)).long()
    parts = train_test_split(range(len(labels)), test_size=TEST_DIGITS, stratify=target, random_state=0)
    # A mirrored digit is no longer a digit.
    train, test = (InMemoryImages(images[part], labels[part], flip=False, fill=0) for part in parts)
    source = f"digits: scikit-learn {sklearn.__version__}, load_digits (UCI optical digits, BSD-3-Clause), embedded"
    return ImageData(train, test, [str(d) for d in range(10)], source)


def load_fashion_mnist(request: DataRequest) -> ImageData:
    tensors, notes = fetched("fashion-mnist", request.root, fetch_fashion_mnist)
    train, test = (
        InMemoryImages(
            tensors[f"{part}_images"].unsqueeze(1),
            tensors[f"{part}_labels"].long(),
            fill=0,
        )
        for part in ("train", "t10k")
    )
    source = f"Fashion-MNIST: {notes['source']}, MIT, in {stored_path('fashion-mnist', request.root)}"
    return ImageData(train, test, FashionMNIST.classes, source)


def fetch_fashion_mnist(folder: Path) -> Stored:
    """Fetch from the publisher, else from the Debian package."""

    def home() -> Stored:
        # Not torchvision's download, which has no timeout and no HTTPS.
        for name, _ in FashionMNIST.resources:
            download(HOME + name, folder / name)
        return _read_archives(folder, folder, f"publisher's files from {HOME}")

    def package() -> Stored:
        root, version = apt_package(PACKAGE, folder)
        archives = root / "usr" / "share" / "datasets" / "fashion-mnist"
        return _read_archives(archives, folder, f"Debian package {PACKAGE} {version}")

    return first_that_works("Fashion-MNIST (31 MB)", [(HOME, home), (f"Debian package {PACKAGE}", package)])


def _read_archives(archives: Path, folder: Path, source: str) -> Stored:
    raw, tensors = folder / "FashionMNIST" / "raw", {}
    raw.mkdir(parents=True, exist_ok=True)
    try:
        files = [Path(extract_archive(str(archives / name), str(raw))) for name, _ in FashionMNIST.resources]
        check_digest(files, CONTENT)
        for part in ("train", "t10k"):
            images = FashionMNIST(folder, train=part == "train")
            tensors |= {f"{part}_images": images.data, f"{part}_labels": images.targets.byte()}
    except (OSError, EOFError, zlib.error) as error:
        raise FetchError(f"{source} cannot be read ({error})") from None
    return tensors, {"source": source}
