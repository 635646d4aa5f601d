"""Pairs of real pictures: two items of Fashion-MNIST side by side, and whether they are of one class.

What one half shows says nothing of the answer: each class is as likely on either side, and half of the pairs are of one
class. So a network that mixes no tokens and averages them at the end has to add up what each half says alone, and
guesses. The items of training pairs are training items, those of test pairs are test items.
"""

import numpy as np
import torch
from torch import Tensor

from tokenmix.lab.data.images.image_set import ImageData, InMemoryImages
from tokenmix.lab.data.images.sets import fetch_fashion_mnist
from tokenmix.lab.data.lookup import DataRequest
from tokenmix.lab.data.store import fetched

__all__ = ["draw_pairs", "load_pairs"]

COUNTS = {"train": 60_000, "t10k": 10_000}


def load_pairs(request: DataRequest) -> ImageData:
    """60,000 training and 10,000 test pairs of 28 x 56 pixels, always the same."""
    tensors, notes = fetched("fashion-mnist", request.root, fetch_fashion_mnist)
    parts = []
    for seed, (part, count) in enumerate(COUNTS.items()):
        items, same = draw_pairs(tensors[f"{part}_labels"].long(), count, seed)
        pictures = torch.cat([tensors[f"{part}_images"][side] for side in items], -1).unsqueeze(1)
        parts.append(InMemoryImages(pictures, same, flip=True, fill=0))
    source = f"pairs of Fashion-MNIST: {notes['source']}, MIT"
    train, test = parts
    return ImageData(train, test, ["different", "same"], source)


def draw_pairs(labels: Tensor, count: int, seed: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Numbers of the left and of the right items, and 1 where both are of one class; a function of the seed."""
    rng = np.random.default_rng(seed)
    classes = int(labels.max()) + 1
    same = rng.integers(2, size=count)
    left = rng.integers(classes, size=count)
    right = np.where(same == 1, left, (left + rng.integers(1, classes, size=count)) % classes)
    by_class = np.argsort(labels.numpy(), kind="stable")
    sizes = np.bincount(labels.numpy(), minlength=classes)
    starts = np.cumsum(sizes) - sizes

    def some_of(wanted: np.ndarray) -> Tensor:
        return torch.from_numpy(by_class[starts[wanted] + (rng.random(count) * sizes[wanted]).astype(np.int64)])

    return (some_of(left), some_of(right)), torch.from_numpy(same)
