"""The two sets of labelled images that the package itself knows by name.

Digits: scikit-learn's 1,797 grey scans of 8 x 8 pixels, embedded there. Fashion-MNIST: 60,000 + 10,000 grey images of
28 x 28 pixels, 10 kinds of clothing (Xiao, Rasul and Vollgraf, 2017), fetched once and read by torchvision.
"""

import zlib
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.datasets import FashionMNIST
from torchvision.datasets.utils import extract_archive

from tokenmix.lab.data.fetch import FetchError, apt_package, check_digest, download, first_that_works
from tokenmix.lab.data.images.image_set import ImageData, InMemoryImages, resize_images
from tokenmix.lab.data.lookup import DataRequest, stored_path
from tokenmix.lab.data.store import Stored, fetched

TEST_DIGITS = 360
HOME = "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/"
PACKAGE = "dataset-fashion-mnist"
CONTENT = "14410854cf7a289477dcfc7df3f8ec24741e281cdcc425ede0d9a748ca630214"
"""SHA-256 of the four files, unpacked: each source packs them in its own way."""


def load_digits(request: DataRequest) -> ImageData:
    """The digits with a split that never changes: 1,437 training and 360 test images, stratified."""
    import sklearn

    images, labels, parts = _digits()
    images = resize_images(images, request.img_size)
    # A mirrored digit is no longer a digit.
    train, test = (InMemoryImages(images[part], labels[part], flip=False, fill=0) for part in parts)
    source = f"digits: scikit-learn {sklearn.__version__}, load_digits (UCI optical digits, BSD-3-Clause), embedded"
    return ImageData(train, test, [str(d) for d in range(10)], source)


@cache
def _digits() -> tuple[Tensor, Tensor, list[Any]]:
    from sklearn import datasets
    from sklearn.model_selection import train_test_split

    pixels, target = datasets.load_digits(return_X_y=True)
    # Levels 0 to 16 become 0 to 255.
    images = torch.from_numpy((np.asarray(pixels) * (255 / 16)).round()).byte().view(-1, 1, 8, 8)
    labels = torch.from_numpy(np.asarray(target)).long()
    return images, labels, train_test_split(range(len(labels)), test_size=TEST_DIGITS, stratify=target, random_state=0)


def load_fashion_mnist(request: DataRequest) -> ImageData:
    """The publisher's split, fetched once."""
    tensors, notes = fetched("fashion-mnist", request.root, fetch_fashion_mnist)
    train, test = (
        InMemoryImages(
            resize_images(tensors[f"{part}_images"].unsqueeze(1), request.img_size),
            tensors[f"{part}_labels"].long(),
            fill=0,
        )
        for part in ("train", "t10k")
    )
    source = f"Fashion-MNIST: {notes['source']}, MIT, in {stored_path('fashion-mnist', request.root)}"
    return ImageData(train, test, FashionMNIST.classes, source)


def fetch_fashion_mnist(folder: Path) -> Stored:
    """From the publisher, else from the Debian package."""
    sources = [
        (HOME, partial(_from_home, folder)),
        (f"Debian package {PACKAGE}", partial(_from_package, folder)),
    ]
    return first_that_works("Fashion-MNIST (31 MB)", sources)


def _from_home(folder: Path) -> Stored:
    # Not torchvision's download, which has no time limit, and no HTTPS.
    for name, _ in FashionMNIST.resources:
        download(HOME + name, folder / name)
    return _read_archives(folder, folder, f"publisher's files from {HOME}")


def _from_package(folder: Path) -> Stored:
    root, version = apt_package(PACKAGE, folder)
    archives = root / "usr" / "share" / "datasets" / "fashion-mnist"
    return _read_archives(archives, folder, f"Debian package {PACKAGE} {version}")


def _read_archives(archives: Path, folder: Path, source: str) -> Stored:
    """The images and labels in the publisher's four files."""
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
