"""Scenes as batches: pixels with their classes for segmentation, images with their objects for detection."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tokenmix.data.images.samples import normalize
from tokenmix.data.indexed import IndexedDataset
from tokenmix.data.reading import LeftOut
from tokenmix.data.scenes.scenes import Objects, Scene, SceneData, Scenes
from tokenmix.data.scenes.transforms import ObjectAugment, PixelAugment, left_over
from tokenmix.errors import UserError

__all__ = ["ObjectSamples", "PixelSamples", "SceneSamples"]

# After that many unreadable scenes in a row the set itself must be wrong.
TRIED = 10


class SceneSamples(IndexedDataset):
    """Scenes as a task takes them; what a sample is, `PixelSamples` and `ObjectSamples` say.

    A scene that cannot be read is left out of its batch, and named on stderr. For a batch of which none can be read
    the first that follows stands in.
    """

    unit = "images"

    def __init__(self, scenes: Scenes) -> None:
        self.scenes = scenes
        self._left_out = LeftOut()

    def __len__(self) -> int:
        return len(self.scenes)

    @abstractmethod
    def _one(self, index: int, epoch: int) -> tuple[Any, Any]:
        """The scene at this place as the task takes it; `UserError` if it cannot be read."""

    def _readable(self, indices: Tensor, epoch: int) -> tuple[list[Any], list[Any], Tensor]:
        """The two halves of each scene that can be read, and its index."""
        wanted, found, problem = indices.tolist(), [], None
        following = [index % len(self) for index in range(wanted[-1] + 1, wanted[-1] + 1 + TRIED)]
        for number, index in enumerate([*wanted, *following]):
            if found and number >= len(wanted):
                break
            try:
                found.append((*self._one(index, epoch), index))
            except UserError as reason:
                self._left_out.add(index, str(reason))
                problem = problem or reason
        if not found:
            assert problem is not None
            raise problem
        left, right, kept = (list(part) for part in zip(*found))
        return left, right, torch.tensor(kept)


class PixelSamples(SceneSamples):
    """Images with the class of each pixel.

    `read` gives {"image": float32 (B, 3, H, W), normalised, "classes": int64 (B, H, W), "index": int64 (B,)}. Whole
    images of several sizes in one batch are padded to the largest, below and on the right, with the ignored class; a
    network that mixes all tokens sees that, so evaluate such sets one image at a time.

    Args:
        data: where mean, std and the ignored class are.
        scenes: `data.train` or `data.test`.
        augment: of training; None for whole images as they are.

    Raises:
        UserError: a scene without classes.
    """

    def __init__(self, data: SceneData, scenes: Scenes, augment: PixelAugment | None = None) -> None:
        super().__init__(scenes)
        self.mean, self.std, self.ignore, self.augment = data.mean, data.std, data.ignore, augment

    def read(self, indices: Tensor, epoch: int) -> dict[str, Tensor]:
        """The batch of these images."""
        images, classes, kept = self._readable(indices, epoch)
        return {
            "image": _stacked([normalize(image, self.mean, self.std) for image in images], 0.0),
            "classes": _stacked(classes, self.ignore),
            "index": kept,
        }

    def _one(self, index: int, epoch: int) -> tuple[Tensor, Tensor]:
        scene = self.scenes.scene(index)
        if scene.classes is None:
            raise UserError(f"{scene.name} has no classes of its pixels; load_scenes with want='classes'")
        if self.augment is None:
            return scene.image, scene.classes
        return self.augment(scene.image, scene.classes, epoch, index)


class ObjectSamples(SceneSamples):
    """Images with their objects, as torchvision's detectors take them.

    `read` gives {"images": list of float32 (3, H, W) in 0..1, not normalised since the detectors do it, "targets": list
    of dicts of boxes (M, 4), labels (M,) counted from 0, masks bool (M, H, W) if known, iscrowd (M,), area (M,) and
    image_id (), "index": int64 (B,)}. Objects of no area are left out, and regions of crowds with `augment`: neither
    can be learned.

    Args:
        scenes: `data.train` or `data.test`.
        augment: of training; None for whole images as they are.

    Raises:
        UserError: a scene without objects, which is another thing than one with none of them.
    """

    def __init__(self, scenes: Scenes, augment: ObjectAugment | None = None) -> None:
        super().__init__(scenes)
        self.augment = augment

    def read(self, indices: Tensor, epoch: int) -> dict[str, Any]:
        """The batch of these images."""
        images, targets, kept = self._readable(indices, epoch)
        return {"images": images, "targets": targets, "index": kept}

    def _one(self, index: int, epoch: int) -> tuple[Tensor, dict[str, Tensor]]:
        scene = self.scenes.scene(index)
        image, objects = scene.image, scene.objects
        if objects is None:
            raise UserError(f"{scene.name} has no objects; load_scenes with want='boxes' or 'masks'")
        if self.augment is None:
            objects = left_over(objects.boxes, objects, objects.masks, 0.0)
        else:
            image, objects = self.augment(image, _without_crowds(objects), epoch, index)
        return image.float() / 255, _target(objects, scene)


def _without_crowds(objects: Objects) -> Objects:
    keep = ~objects.crowd
    masks = None if objects.masks is None else objects.masks[keep]
    return Objects(objects.boxes[keep], objects.labels[keep], masks, objects.crowd[keep])


def _target(objects: Objects, scene: Scene) -> dict[str, Tensor]:
    boxes = objects.boxes
    target = {
        "boxes": boxes,
        "labels": objects.labels,
        "iscrowd": objects.crowd,
        "image_id": torch.tensor(scene.key),
    }
    if objects.masks is None:
        return {**target, "area": (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])}
    return {**target, "masks": objects.masks, "area": objects.masks.flatten(1).sum(1).float()}


def _stacked(parts: Sequence[Tensor], fill: float) -> Tensor:
    """The parts in the corner of a batch of the largest's size."""
    height, width = (max(part.shape[side] for part in parts) for side in (-2, -1))
    if all(part.shape[-2:] == (height, width) for part in parts):
        return torch.stack(list(parts))
    out = parts[0].new_full((len(parts), *parts[0].shape[:-2], height, width), fill)
    for place, part in zip(out, parts):
        place[..., : part.shape[-2], : part.shape[-1]] = part
    return out
