"""Augmentation as a function of (seed, epoch, image index), independent of workers, batch size, order and resuming."""

import re
from collections.abc import Callable
from functools import cache, partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data import auto_augment as timm_augment
from timm.data.random_erasing import RandomErasing
from torch import Tensor
from torchvision.transforms import ColorJitter

from tokenmix.errors import UserError
from tokenmix.lab.data.indexed import hash_indices, restored_random_state, seed_all

# (images uint8 (B, C, H, W), epoch, indices int64 (B,)) -> images of the same shape.
Augment = Callable[[Tensor, int, Tensor], Tensor]
# Prefixes of timm's auto-augment strings.
POLICIES = ("rand", "augmix", "original", "originalr", "v0", "v0r", "3a")
Transform = Callable[[Image.Image], Image.Image]
MAKERS = {"rand": timm_augment.rand_augment_transform, "augmix": timm_augment.augment_and_mix_transform}
# timm would ignore many sections that it does not understand.
SECTION = re.compile(r"[a-z]+\d+(\.\d+)?|t[a-z0-9]+")
# Purpose in `hash_indices`.
ERASE = 2


def make_augment(
    name: str, *, seed: int, flip: bool, fill: int | None, color_jitter: float = 0.0, shift: bool = True
) -> Augment:
    """The augmentation of this name, a function of the seed, the epoch and the image's index.

    `light` shifts by up to an eighth of the size, unless a random crop makes it needless, and flips if a mirrored image
    keeps its class. A timm auto-augment string such as `rand-m9-mstd0.5-inc1` comes after `light`. `fill` is the grey
    level that is shifted in; None repeats the edge. `color_jitter` is the largest relative change of brightness,
    contrast and saturation, after `light`.
    """
    policy = name.split("-")[0] in POLICIES
    if color_jitter and (policy or name == "none"):
        raise UserError(
            f"color_jitter={color_jitter:g} only works with augment=light: timm does not combine it with RandAugment; "
            f"give --color-jitter 0, or --augment light instead of {name}"
        )
    if name == "none":
        return _unchanged
    light = partial(_shift_flip, seed=seed, flip=flip, fill=fill, shift=shift)
    if policy or (name == "light" and color_jitter):
        kind = name if policy else f"jitter-{color_jitter}"
        _transform(kind, 32, fill)  # a policy that timm cannot read fails here, not in the first batch
        return partial(_auto_augment, light=light, policy=kind, seed=seed, fill=fill)
    if name == "light":
        return light
    raise UserError(f"unknown augmentation {name!r}; known: none, light, or a timm string such as rand-m9-mstd0.5-inc1")


def _unchanged(images: Tensor, epoch: int, indices: Tensor) -> Tensor:
    return images


def _draw(bits: np.ndarray, place: int, count: int) -> Tensor:
    """Integers in 0..count-1 from 16 of the bits."""
    part = (bits >> np.uint64(place)) & np.uint64(0xFFFF)
    return torch.from_numpy(((part * np.uint64(count)) >> np.uint64(16)).astype(np.int64))


def _shift_flip(
    images: Tensor, epoch: int, indices: Tensor, *, seed: int, flip: bool, fill: int | None, shift: bool
) -> Tensor:
    """Random shift by padding, and horizontal flip."""
    bits = hash_indices(seed, epoch, indices)
    reach = [size // 8 if shift else 0 for size in images.shape[-2:]]
    down, right = (_draw(bits, 16 * i, 2 * r + 1) - r for i, r in enumerate(reach))
    flips = _draw(bits, 32, 2).bool() if flip else torch.zeros(len(images), dtype=torch.bool)
    return shift_and_flip(images, down, right, flips, fill)


def shift_and_flip(images: Tensor, down: Tensor, right: Tensor, flips: Tensor, fill: int | None) -> Tensor:
    """Mirror each uint8 image where `flips`, then move it by its own (down, right), filling with `fill` or the edge."""
    height, width = images.shape[-2:]
    reach_down, reach_right = (int(shift.abs().max()) if len(shift) else 0 for shift in (down, right))
    around = ((0, 0), (0, 0), (reach_down, reach_down), (reach_right, reach_right))
    padded = pixels = images.numpy()
    if reach_down or reach_right:
        padded = np.pad(pixels, around, "edge") if fill is None else np.pad(pixels, around, constant_values=fill)
    out = np.empty(images.shape, np.uint8)
    # Copying one window per image is several times faster than a gather once images exceed the cache.
    lefts = reach_right + torch.where(flips, right, -right)
    places = zip((reach_down - down).tolist(), lefts.tolist(), flips.tolist())
    for image, target, (top, left, flipped) in zip(padded, out, places):
        window = image[:, top : top + height, left : left + width]
        target[:] = window[..., ::-1] if flipped else window
    return torch.from_numpy(out)


def _auto_augment(
    images: Tensor, epoch: int, indices: Tensor, *, light: Augment, policy: str, seed: int, fill: int | None
) -> Tensor:
    """`light`, then timm's policy or `jitter-0.4`, image by image."""
    images = light(images, epoch, indices)
    transform = _transform(policy, min(images.shape[-2:]), fill)
    # Bits independent of the shift's.
    seeds = hash_indices(seed, epoch, ~indices)
    changed = torch.empty_like(images)
    with restored_random_state():
        for out, image, bits in zip(changed, images, seeds):
            seed_all(int(bits))
            # timm's operations fill with a colour, so grey images are converted to RGB and back.
            array = image.expand(3, -1, -1).permute(1, 2, 0).numpy()
            made = transform(Image.fromarray(np.ascontiguousarray(array))).convert("L" if len(image) == 1 else "RGB")
            out[:] = torch.from_numpy(np.array(made)).reshape(*image.shape[1:], -1).permute(2, 0, 1)
    return changed


@cache
def _transform(policy: str, size: int, fill: int | None) -> Transform:
    kind, *sections = policy.split("-")
    if kind == "jitter":
        return ColorJitter(*(3 * [float(sections[0])]))
    hints = {"translate_const": int(0.45 * size), "img_mean": (128 if fill is None else fill,) * 3}
    try:
        wrong = [section for section in sections if not SECTION.fullmatch(section)]
        if wrong:
            raise ValueError(f"unknown section {wrong[0]!r}")
        transform: Any = MAKERS.get(kind, timm_augment.auto_augment_transform)(policy, hints)
    except (AssertionError, ValueError, KeyError) as error:
        raise UserError(
            f"timm cannot read the augmentation {policy!r} ({error}); an example is rand-m9-mstd0.5-inc1"
        ) from None
    for operation in transform.ops if hasattr(transform, "ops") else chain(*transform.policy):
        if operation.aug_fn is timm_augment.posterize:
            operation.aug_fn = _posterize
    return transform


def _posterize(image: Image.Image, bits: int, **options: object) -> Image.Image:
    """timm asks for 0 bits at full strength, which newer releases of Pillow refuse."""
    return timm_augment.posterize(image, max(bits, 1), **options)


class Erase:
    """timm's random erasing: with probability `reprob` a box of an image becomes normal noise.

    Paper: Random Erasing Data Augmentation, arXiv:1708.04896. The box covers 2 % to a third of the image.
    """

    def __init__(self, reprob: float, seed: int) -> None:
        self.seed, self.erase = seed, RandomErasing(reprob, mode="pixel", device="cpu")

    def __call__(self, images: Tensor, epoch: int, indices: Tensor) -> None:
        """Erase in normalised images (B, C, H, W), in place."""
        with restored_random_state():
            for image, bits in zip(images, hash_indices(self.seed, epoch, indices, ERASE)):
                seed_all(int(bits))
                self.erase(image)
