"""Fashion-MNIST: 60,000 + 10,000 grey images of 28 x 28 pixels, 10 kinds of clothing.

Xiao, Rasul and Vollgraf, "Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning Algorithms", 2017.
"""

import gzip
import math
import struct
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from tokenmix.data.fetch import FetchError, apt_package, check_digest, download, first_that_works
from tokenmix.data.images.image_set import InMemoryImages, LoadedImages, resize_images
from tokenmix.data.lookup import DataRequest, stored_path
from tokenmix.data.store import Stored, fetched
from tokenmix.errors import UserError

__all__ = ["fetch_fashion_mnist", "load_fashion_mnist", "parse_idx", "read_idx"]

HOME = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
PACKAGE = "dataset-fashion-mnist"
# In an idx file: two zero bytes, a type, the number of axes, their lengths, the values.
UNSIGNED_BYTE = 0x08
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


def load_fashion_mnist(request: DataRequest) -> LoadedImages:
    """The publisher's split, fetched once."""
    tensors, notes = fetched("fashion-mnist", request.root, fetch_fashion_mnist)
    train, test = (_part(tensors, part, request.img_size) for part in ("train", "t10k"))
    source = f"Fashion-MNIST: {notes['source']}, MIT, in {stored_path('fashion-mnist', request.root)}"
    return LoadedImages(train, test, CLASSES, source)


def _part(tensors: dict[str, Tensor], part: str, size: tuple[int, int] | None) -> InMemoryImages:
    images = resize_images(tensors[f"{part}_images"].unsqueeze(1), size)
    return InMemoryImages(images, tensors[f"{part}_labels"].long(), flip=True, fill=0)


def fetch_fashion_mnist(folder: Path) -> Stored:
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


def read_idx(path: str | Path) -> Tensor:
    """The uint8 tensor of an idx file, gzipped or not; `UserError` naming the file if it is none."""
    raw = Path(path).read_bytes()
    try:
        return parse_idx(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
    except (EOFError, OSError, ValueError) as error:
        raise UserError(f"{path} is no readable idx file ({error}); remove it and fetch it again") from None


def parse_idx(raw: bytes) -> Tensor:
    """The uint8 tensor of an idx file's bytes; `ValueError` if they are none."""
    if len(raw) < 4 or raw[:2] != b"\0\0":
        raise ValueError("it does not start with the idx magic number")
    kind, axes = raw[2], raw[3]
    if kind != UNSIGNED_BYTE:
        raise ValueError(f"type 0x{kind:02x} instead of unsigned bytes")
    start = 4 + 4 * axes
    if axes == 0 or len(raw) < start:
        raise ValueError("its head is cut off")
    shape = struct.unpack(f">{axes}I", raw[4:start])
    if len(raw) - start != math.prod(shape):
        raise ValueError(f"{len(raw) - start} values for shape {shape}")
    # The copy gives a tensor that owns its memory: the bytes are read-only.
    return torch.frombuffer(bytearray(raw[start:]), dtype=torch.uint8).reshape(shape)
