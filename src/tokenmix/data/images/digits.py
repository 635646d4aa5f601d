"""Scikit-learn's handwritten digits: 1,797 grey images of 8 x 8 pixels, embedded in the package."""

import numpy as np
import torch

from tokenmix.data.images.image_set import InMemoryImages, LoadedImages, resize_images
from tokenmix.data.lookup import DataRequest

__all__ = ["load_digits"]

NUM_TEST = 360


def load_digits(request: DataRequest) -> LoadedImages:
    """The digits with a split that never changes: 1,437 training and 360 test images, stratified."""
    import sklearn
    from sklearn import datasets
    from sklearn.model_selection import train_test_split

    pixels, target = datasets.load_digits(return_X_y=True)
    # Levels 0 to 16 become 0 to 255.
    images = torch.from_numpy((np.asarray(pixels) * (255 / 16)).round()).byte().view(-1, 1, 8, 8)
    labels = torch.from_numpy(np.asarray(target)).long()
    parts = train_test_split(range(len(labels)), test_size=NUM_TEST, stratify=target, random_state=0)
    images = resize_images(images, request.img_size)
    # A mirrored digit is no digit any more.
    train, test = (InMemoryImages(images[part], labels[part], flip=False, fill=0) for part in parts)
    source = f"digits: scikit-learn {sklearn.__version__}, load_digits (UCI optical digits, BSD-3-Clause), embedded"
    return LoadedImages(train, test, [str(d) for d in range(10)], source)
