"""Masks of objects as Pascal VOC has them: a picture of their numbers, beside the one of their classes."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from tokenmix.data.scenes.pairs import PairScenes, numbers_table
from tokenmix.data.scenes.scenes import Scene, Scenes, no_objects, objects_of_masks
from tokenmix.errors import UserError

__all__ = ["MaskScenes"]

BORDER = 255
NO_CLASS = 255
# Who a pixel belongs to: 0 is nobody, and so is the border around each object.
OWNERS = numbers_table({**{number: number for number in range(BORDER)}, BORDER: 0})


class MaskScenes(Scenes):
    """Images with a mask for each object, whose class is that of most of its pixels.

    Args:
        root: the folder of JPEGImages, SegmentationObject and SegmentationClass.
        stems: names of the images.
        num_classes: classes of objects; in the pictures they are numbered from 1.

    Raises:
        UserError: an image or a picture that does not exist.
    """

    def __init__(self, root: Path, stems: Sequence[str], num_classes: int) -> None:
        table = numbers_table({0: NO_CLASS, BORDER: NO_CLASS, **{n + 1: n for n in range(num_classes)}})
        images = [root / "JPEGImages" / f"{stem}.jpg" for stem in stems]
        self.owners, self.classes = (
            PairScenes([(image, root / folder / f"{image.stem}.png") for image in images], numbers)
            for folder, numbers in (("SegmentationObject", OWNERS), ("SegmentationClass", table))
        )

    def __len__(self) -> int:
        return len(self.owners)

    def name(self, index: int) -> str:
        """The file of the image."""
        return self.owners.name(index)

    def scene(self, index: int) -> Scene:
        """The image and its objects; none of them is background."""
        scene = self.owners.scene(index)
        owners, classes = scene.classes, self.classes.labels(index, scene.image)
        assert owners is not None
        numbers = [number for number in owners.unique().tolist() if number]
        if not numbers:
            return replace(scene, classes=None, objects=no_objects(tuple(owners.shape)))  # type: ignore[arg-type]
        masks = owners == torch.tensor(numbers).view(-1, 1, 1)
        labels = [self._label(classes[mask], number, index) for mask, number in zip(masks, numbers, strict=True)]
        return replace(scene, classes=None, objects=objects_of_masks(masks, labels))

    def _label(self, classes: Tensor, number: int, index: int) -> int:
        known = classes[classes != NO_CLASS]
        if not len(known):
            owners, told = (scenes.pairs[index][1] for scenes in (self.owners, self.classes))
            raise UserError(f"object {number} of {owners} has no class in {told}; both pictures must show it")
        return int(known.mode().values)
