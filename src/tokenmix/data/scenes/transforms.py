"""Augmentation of an image together with the classes of its pixels, or with its objects, by torchvision's transforms.

What one sample becomes is a function of (seed, epoch, index); the global random states are left as they were.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from timm.data.constants import IMAGENET_DEFAULT_MEAN
from torch import Tensor
from torchvision import tv_tensors
from torchvision.ops import masks_to_boxes
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from tokenmix.data.scenes.scenes import Objects
from tokenmix.data.seeding import hash_indices, restored_random_state, seed_all
from tokenmix.errors import UserError

__all__ = ["ObjectAugment", "PixelAugment", "RandomScale", "scale_steps"]


def scale_steps(low: float, high: float, step: float) -> tuple[float, ...]:
    """Scales from low to high: scale_steps(0.5, 2.0, 0.1) are the sixteen of the published segmentation recipes."""
    if not 0 < low <= high or step <= 0:
        raise UserError(f"scales from {low:g} to {high:g} by {step:g} are not possible; give 0 < low <= high, step > 0")
    return tuple(float(s) for s in np.round(np.arange(low, high + step / 2, step), 6))


class RandomScale(v2.Transform):
    """Resize by one of several factors, each as likely: images bilinear, classes by the nearest."""

    def __init__(self, scales: Sequence[float]) -> None:
        super().__init__()
        self.scales = tuple(scales)

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        """The size that all of a sample's parts take."""
        scale = self.scales[int(torch.randint(len(self.scales), ()))]
        height, width = v2.functional.get_size(flat_inputs[0])
        return {"size": [max(round(height * scale), 1), max(round(width * scale), 1)]}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        """Of one part."""
        return F.resize(inpt, params["size"], antialias=True)


class _Drawn:
    """Transforms whose draws are a function of (seed, epoch, index)."""

    def __init__(self, seed: int, chain: v2.Transform) -> None:
        self.seed, self.chain = seed, chain

    def __call__(self, parts: list[Any], epoch: int, index: int) -> list[Any]:
        bits = hash_indices(self.seed, epoch, torch.tensor([index]), purpose=3)
        with restored_random_state():
            seed_all(int(bits[0]))
            return list(self.chain(*parts))


def _crop(crop: tuple[int, int], fill: Sequence[float], ignore: int) -> v2.Transform:
    filled = {
        tv_tensors.Image: [round(255 * level) for level in fill],
        tv_tensors.Mask: ignore,
        "others": 0,
    }
    return v2.RandomCrop(crop, pad_if_needed=True, fill=cast("Any", filled))


@dataclass(frozen=True)
class PixelAugment:
    """Random scale, crop, flip and colours of an image and the classes of its pixels.

    Attributes:
        seed: with the epoch and the index of a sample, all that it depends on.
        crop: (height, width) that comes out; None leaves the size, and samples of one size cannot then be scaled.
        ignore: class of what is padded where the scaled image is smaller than the crop.
        scales: factors to choose from, see `scale_steps`.
        flip: chance of a mirrored sample.
        color_jitter: brightness, contrast and saturation change by up to this share.
        fill: colour of what is padded, in 0..1; the mean that is subtracted makes it 0.
    """

    seed: int
    crop: tuple[int, int] | None
    ignore: int
    scales: tuple[float, ...] = (1.0,)
    flip: float = 0.5
    color_jitter: float = 0.0
    fill: Sequence[float] = IMAGENET_DEFAULT_MEAN
    _drawn: _Drawn = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_settings(self.crop, self.scales, self.flip, self.color_jitter)
        if self.crop is None and set(self.scales) != {1.0}:
            raise UserError(
                f"scales {self.scales} without a crop give images of several sizes; give a crop, or scale 1"
            )
        steps: list[v2.Transform] = [] if self.scales == (1.0,) else [RandomScale(self.scales)]
        steps += [] if self.crop is None else [_crop(self.crop, self.fill, self.ignore)]
        steps += _flip_and_colors(self.flip, self.color_jitter)
        object.__setattr__(self, "_drawn", _Drawn(self.seed, v2.Compose(steps)))

    def __call__(self, image: Tensor, classes: Tensor, epoch: int, index: int) -> tuple[Tensor, Tensor]:
        """uint8 (3, H, W) and int64 (H, W) of the crop's size."""
        out = self._drawn([tv_tensors.Image(image), tv_tensors.Mask(classes)], epoch, index)
        return out[0].as_subclass(Tensor), out[1].as_subclass(Tensor)


@dataclass(frozen=True)
class ObjectAugment:
    """Random scale, crop, flip and colours of an image and its objects.

    Objects smaller than `min_size` afterwards are dropped, and those of no area; a box that a crop cuts becomes what is
    left of it, with masks the box of what is left of the mask.

    Attributes:
        seed: with the epoch and the index of a sample, all that it depends on.
        crop: (height, width) that comes out, padded if need be; None leaves the size, which a detector settles itself.
        scales: factors to choose from, see `scale_steps`.
        flip: chance of a mirrored sample.
        color_jitter: brightness, contrast and saturation change by up to this share.
        fill: colour of what is padded, in 0..1.
        min_size: least width and height of an object in pixels.
    """

    seed: int
    crop: tuple[int, int] | None = None
    scales: tuple[float, ...] = (1.0,)
    flip: float = 0.5
    color_jitter: float = 0.0
    fill: Sequence[float] = IMAGENET_DEFAULT_MEAN
    min_size: float = 1.0
    _drawn: _Drawn = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_settings(self.crop, self.scales, self.flip, self.color_jitter)
        steps: list[v2.Transform] = [] if self.scales == (1.0,) else [RandomScale(self.scales)]
        steps += [] if self.crop is None else [_crop(self.crop, self.fill, 0)]
        steps += _flip_and_colors(self.flip, self.color_jitter)
        object.__setattr__(self, "_drawn", _Drawn(self.seed, v2.Compose(steps)))

    def __call__(self, image: Tensor, objects: Objects, epoch: int, index: int) -> tuple[Tensor, Objects]:
        """uint8 (3, H, W) and the objects that are left."""
        height, width = image.shape[1:]
        parts: list[Any] = [
            tv_tensors.Image(image),
            tv_tensors.BoundingBoxes(objects.boxes, format="XYXY", canvas_size=(height, width)),  # type: ignore[call-arg]
        ]
        if objects.masks is not None:
            parts.append(tv_tensors.Mask(objects.masks.byte()))
        out = self._drawn(parts, epoch, index)
        boxes = F.clamp_bounding_boxes(out[1]).as_subclass(Tensor)
        masks = out[2].as_subclass(Tensor).bool() if objects.masks is not None else None
        return out[0].as_subclass(Tensor), left_over(boxes, objects, masks, self.min_size)


def left_over(boxes: Tensor, objects: Objects, masks: Tensor | None, min_size: float) -> Objects:
    """The objects of these changed boxes and masks that are still large enough."""
    keep = torch.ones(len(boxes), dtype=torch.bool)
    if masks is not None:
        keep &= masks.flatten(1).any(1)
        boxes = boxes.clone()
        # The last pixel belongs to the object: its box ends one further.
        boxes[keep] = masks_to_boxes(masks[keep]) + torch.tensor([0.0, 0.0, 1.0, 1.0])
    sides = boxes[:, 2:] - boxes[:, :2]
    keep &= (sides > 0).all(1) & (sides >= min_size).all(1)
    return Objects(boxes[keep], objects.labels[keep], None if masks is None else masks[keep], objects.crowd[keep])


def _flip_and_colors(flip: float, jitter: float) -> list[v2.Transform]:
    flips: list[v2.Transform] = [v2.RandomHorizontalFlip(flip)] if flip else []
    return [*flips, v2.ColorJitter(jitter, jitter, jitter)] if jitter else flips or [v2.Identity()]


def _check_settings(crop: tuple[int, int] | None, scales: Sequence[float], flip: float, jitter: float) -> None:
    if crop is not None and min(crop) < 1:
        raise UserError(f"a crop of {crop[0]} x {crop[1]} is not possible; give at least 1 x 1")
    if not scales or min(scales) <= 0:
        raise UserError(f"scales must be above 0, got {tuple(scales)}")
    if not 0 <= flip <= 1:
        raise UserError(f"flip is a chance in 0..1, got {flip:g}")
    if not 0 <= jitter <= 1:
        raise UserError(f"color_jitter is a share in 0..1, got {jitter:g}")
