"""Fashion-MNIST: 60,000 + 10,000 grey images of 28 x 28 pixels, 10 kinds of clothing.

Xiao, Rasul and Vollgraf, "Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning Algorithms", 2017.
"""

from functools import partial
from pathlib import Path

from torch import Tensor

from tokenmix.data.fetch import FetchError, apt_package, check_digest, download, first_that_works
from tokenmix.data.images.idx import read_idx
from tokenmix.data.images.image_set import MemoryImages, resize_images
from tokenmix.data.images.loaded import Loaded
from tokenmix.data.store import Stored, fetched, stored_path
from tokenmix.errors import UserError

__all__ = ["load"]

HOME = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
PACKAGE = "dataset-fashion-mnist"
CLASSES = ["T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"]
# md5 of the publisher's files; apt checks the package itself.
FILES = {
    "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
}
SHAPES = {
    "train_images": (60000, 28, 28),
    "train_labels": (60000,),
    "t10k_images": (10000, 28, 28),
    "t10k_labels": (10000,),
}


def load(variant: str, size: tuple[int, int] | None, root: Path | None) -> Loaded:
    """The publisher's split, fetched once."""
    tensors, notes = fetched("fashion-mnist", root, fetch)
    train, test = (_part(tensors, part, size) for part in ("train", "t10k"))
    source = f"Fashion-MNIST: {notes['source']}, MIT, in {stored_path('fashion-mnist', root)}"
    return Loaded(train, test, CLASSES, source)


def _part(tensors: dict[str, Tensor], part: str, size: tuple[int, int] | None) -> MemoryImages:
    images = resize_images(tensors[f"{part}_images"].unsqueeze(1), size)
    return MemoryImages(images, tensors[f"{part}_labels"].long(), flip=True, fill=0)


def fetch(folder: Path) -> Stored:
    """From the publisher, else from the Debian package."""
    sources = [
        (HOME, partial(_from_home, folder)),
        (f"Debian package {PACKAGE}", partial(_from_package, folder)),
    ]
    files, source = first_that_works("Fashion-MNIST (31 MB)", sources)
    return read_files(files), {"source": source}


def _from_home(folder: Path) -> tuple[Path, str]:
    for name, digest in FILES.items():
        check_digest(download(HOME + name, folder / name), "md5", digest)
    return folder, f"publisher's files from {HOME}"


def _from_package(folder: Path) -> tuple[Path, str]:
    root, version = apt_package(PACKAGE, folder)
    return root / "usr" / "share" / "datasets" / "fashion-mnist", f"Debian package {PACKAGE} {version}"


def read_files(folder: Path) -> dict[str, Tensor]:
    """The four idx files of a folder; `FetchError` unless they have the shapes that are published."""
    tensors = {}
    for name in FILES:
        part, kind = name.split("-")[:2]
        try:
            tensors[f"{part}_{kind}"] = read_idx(folder / name)
        except (OSError, UserError) as error:
            raise FetchError(str(error)) from None
    for key, tensor in tensors.items():
        if tuple(tensor.shape) != SHAPES[key]:
            raise FetchError(f"{key} has shape {tuple(tensor.shape)}, expected {SHAPES[key]}")
    return tensors
