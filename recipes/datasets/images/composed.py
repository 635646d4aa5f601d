"""Composed scenes of real items: articles of Fashion-MNIST pasted on pieces of Blue Marble.

Each scene is made when it is read, as a function of (seed, index): nothing is stored. An item's mask is what is seen of
it after later items were pasted over it. Items of the training images lie on training columns of the map, those of the
test images on test columns, so nothing of a test scene was in a training scene.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.datasets import FashionMNIST

from recipes.datasets.images.blue_marble import BLOCK, TEST_BLOCKS, whole_map
from tokenmix.errors import UserError
from tokenmix.lab.data.images.image_set import channel_statistics
from tokenmix.lab.data.images.sets import fetch_fashion_mnist
from tokenmix.lab.data.lookup import DataRequest
from tokenmix.lab.data.scenes import Scene, SceneData, Scenes, objects_of
from tokenmix.lab.data.store import fetched

__all__ = ["load_composed"]

SIDE = 128
COUNTS = {"train": 2000, "test": 400}
ITEMS = (3, 8)
# Of the scene's side.
SIZES = (0.18, 0.5)
# An item's grey levels above this are the item, the others show what is behind.
THRESHOLD = 16
# No item is covered so far that less than this share of it is seen.
VISIBLE = 0.3
TRIES = 20
PALETTE = [
    (230, 25, 75),
    (60, 180, 75),
    (255, 225, 25),
    (0, 130, 200),
    (245, 130, 48),
    (145, 30, 180),
    (70, 240, 240),
    (240, 50, 230),
    (210, 245, 60),
    (250, 190, 212),
]


@dataclass(frozen=True)
class Composer:
    """Makes the scene of an index.

    Attributes:
        part: train or test.
        image: the map, uint8 (3, H, W).
        blocks: left edges of the blocks of columns that belong to the part.
        items: uint8 (n, 28, 28).
        labels: (n,).
        seed: with the index, all that a scene depends on.
        side: of a scene, in pixels.
        with_masks: scenes have the masks of their objects, else boxes alone.
    """

    part: str
    image: Tensor
    blocks: list[int]
    items: Tensor
    labels: Tensor
    seed: int
    side: int
    with_masks: bool

    def __call__(self, index: int) -> Scene:
        """Three to eight items on a piece of the map."""
        rng = np.random.default_rng([abs(self.seed), ["train", "test"].index(self.part), index])
        left = self.blocks[int(rng.integers(len(self.blocks)))] + int(rng.integers(BLOCK - self.side + 1))
        top = int(rng.integers(self.image.shape[1] - self.side + 1))
        image = self.image[:, top : top + self.side, left : left + self.side].clone()
        owner = torch.full((self.side, self.side), -1)
        placed = _Placed([], [])
        labels: list[int] = []
        for _ in range(rng.integers(ITEMS[0], ITEMS[1] + 1)):
            which = int(rng.integers(len(self.items)))
            if _paste(image, owner, self.items[which], placed, rng):
                labels.append(int(self.labels[which]))
        objects = objects_of(labels, masks=owner == torch.arange(len(labels))[:, None, None])
        objects = objects if self.with_masks else replace(objects, masks=None)
        return Scene(image, f"composed {self.part} scene {index}", objects=objects)


@dataclass
class _Placed:
    """Pixels of the items so far: at first, and what is still seen."""

    sizes: list[int]
    seen: list[int]


def _paste(image: Tensor, owner: Tensor, item: Tensor, placed: _Placed, rng: np.random.Generator) -> bool:
    """Paste an item, in place, where enough of the others is still seen; False if there is no such place."""
    side, number = image.shape[1], len(placed.sizes)
    for _ in range(TRIES):
        length = round(side * float(np.exp(rng.uniform(*np.log(SIZES)))))
        levels = F.interpolate(item[None, None].float(), (length, length), mode="bilinear", align_corners=False)[0, 0]
        levels = levels.flip(1) if rng.random() < 0.5 else levels
        top, left = (int(rng.integers(side - length + 1)) for _ in range(2))
        shape = levels > THRESHOLD
        under = owner[top : top + length, left : left + length]
        covered = torch.bincount(under[shape] + 1, minlength=number + 1)[1:].tolist()
        seen = [before - lost for before, lost in zip(placed.seen, covered)]
        size = int(shape.sum())
        if size and all(left_of >= VISIBLE * whole for left_of, whole in zip(seen, placed.sizes)):
            under[shape] = number
            image[:, top : top + length, left : left + length][:, shape] = levels[shape].round().byte()
            placed.sizes.append(size)
            placed.seen[:] = [*seen, size]
            return True
    return False


def load_composed(request: DataRequest) -> SceneData:
    """2,000 scenes for training under the seed, 400 for testing that are the same for every seed."""
    side = _side(request.variant)
    world = whole_map(request.root)
    items, notes = fetched("fashion-mnist", request.root, fetch_fashion_mnist)
    blocks = range(world.image.shape[2] // BLOCK)
    scenes = {
        part: Scenes(
            range(COUNTS[part]),
            Composer(
                part,
                world.image,
                [b * BLOCK for b in blocks if (b in TEST_BLOCKS) == (part == "test")],
                items[f"{key}_images"],
                items[f"{key}_labels"],
                seed=request.seed if part == "train" else 0,
                side=side,
                with_masks=request.kind == "masks",
            ),
        )
        for part, key in (("train", "train"), ("test", "t10k"))
    }
    mean, std = channel_statistics(scenes["train"].scene(i).image for i in range(64))
    return SceneData(
        train=scenes["train"],
        test=scenes["test"],
        classes=FashionMNIST.classes,
        palette=PALETTE,
        mean=mean,
        std=std,
        crop=(side, side),
        source=f"composed scenes of real items: Fashion-MNIST ({notes['source']}, MIT) on Blue Marble (public domain)",
        notes={"seed": request.seed, "threshold": THRESHOLD, "items": list(ITEMS)},
    )


def _side(variant: str) -> int:
    if not variant:
        return SIDE
    if not variant.isdecimal() or not 64 <= int(variant) <= BLOCK:
        raise UserError(f"composed:{variant} is no side of a scene; give 64 to {BLOCK} pixels")
    return int(variant)
