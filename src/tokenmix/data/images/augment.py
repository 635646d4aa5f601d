"""Augmentation that is a function of (seed, epoch, index of the image) alone.

Hence the number of workers, the batch size, the order and a resumed run change nothing: an image in an epoch always
comes out the same.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from tokenmix.errors import UserError

__all__ = ["Augment", "Light", "hash_indices", "make_augment", "shift_and_flip"]

# (images uint8 (B, C, H, W), epoch, indices int64 (B,)) -> images of the same shape.
Augment = Callable[[Tensor, int, Tensor], Tensor]
# What timm's auto-augment strings start with.
POLICIES = ("rand", "augmix", "original", "originalr", "v0", "v0r", "3a")


def make_augment(
    name: str, *, seed: int, flip: bool, fill: int | None, color_jitter: float = 0.0, shift: bool = True
) -> Augment:
    """The augmentation of this name.

    Args:
        name: `none`; `light` (shift by up to an eighth of the size, horizontal flip where `flip` allows it); or a timm
            auto-augment string such as `rand-m9-mstd0.5-inc1`, which is applied after `light`.
        seed: with the epoch and the index of an image, all that its augmentation depends on.
        flip: a mirrored image is still of its class.
        fill: grey level that is shifted in; None repeats the edge.
        color_jitter: brightness, contrast and saturation change by up to this share, after `light`.
        shift: `light` shifts; not needed where a random part of the image was taken before.

    Raises:
        UserError: unknown augmentation, or colour jitter beside one that has its own colours.
    """
    policy = name.split("-")[0] in POLICIES
    if color_jitter and (policy or name == "none"):
        raise UserError(
            f"color_jitter={color_jitter:g} goes with augment=light alone: timm leaves it out beside RandAugment; "
            f"give --color-jitter 0, or --augment light instead of {name}"
        )
    if name == "none":
        return _unchanged
    light = Light(seed=seed, flip=flip, fill=fill, shift=shift)
    if policy or (name == "light" and color_jitter):
        from tokenmix.data.images.auto_augment import AutoAugment

        return AutoAugment(name if policy else f"jitter-{color_jitter}", light)
    if name == "light":
        return light
    raise UserError(f"unknown augmentation {name!r}; known: none, light, or a timm string such as rand-m9-mstd0.5-inc1")


def _unchanged(images: Tensor, epoch: int, indices: Tensor) -> Tensor:
    return images


def hash_indices(seed: int, epoch: int, indices: Tensor, purpose: int = 0) -> np.ndarray:
    """64 random bits for each index, a pure function of (seed, epoch, index); others for each `purpose`.

    The finaliser is splitmix64's (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014).
    """
    words = [abs(seed), epoch, purpose] if purpose else [abs(seed), epoch]
    key = np.random.SeedSequence(words).generate_state(1, np.uint64)
    bits = indices.numpy().astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + key
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def _draw(bits: np.ndarray, place: int, count: int) -> Tensor:
    """Integers in 0..count-1 from 16 of the bits."""
    part = (bits >> np.uint64(place)) & np.uint64(0xFFFF)
    return torch.from_numpy(((part * np.uint64(count)) >> np.uint64(16)).astype(np.int64))


class Light:
    """Random shift by padding, and horizontal flip."""

    def __init__(self, *, seed: int, flip: bool, fill: int | None, shift: bool = True) -> None:
        self.seed, self.flip, self.fill, self.shift = seed, flip, fill, shift

    def __call__(self, images: Tensor, epoch: int, indices: Tensor) -> Tensor:
        bits = hash_indices(self.seed, epoch, indices)
        reach = [size // 8 if self.shift else 0 for size in images.shape[-2:]]
        down, right = (_draw(bits, 16 * i, 2 * r + 1) - r for i, r in enumerate(reach))
        flips = _draw(bits, 32, 2).bool() if self.flip else torch.zeros(len(images), dtype=torch.bool)
        return shift_and_flip(images, down, right, flips, self.fill)


def shift_and_flip(images: Tensor, down: Tensor, right: Tensor, flips: Tensor, fill: int | None) -> Tensor:
    """Each uint8 image mirrored where `flips`, then moved by its own (down, right); `fill` or the edge comes in."""
    height, width = images.shape[-2:]
    reach_down, reach_right = _reach(down), _reach(right)
    around = ((0, 0), (0, 0), (reach_down, reach_down), (reach_right, reach_right))
    pixels = images.numpy()
    padded = np.pad(pixels, around, "edge") if fill is None else np.pad(pixels, around, constant_values=fill)
    out = np.empty(images.shape, np.uint8)
    # One copied window an image: several times faster than a gather once images no longer fit into the cache.
    lefts = reach_right + torch.where(flips, right, -right)
    places = zip((reach_down - down).tolist(), lefts.tolist(), flips.tolist())
    for image, target, (top, left, flipped) in zip(padded, out, places):
        window = image[:, top : top + height, left : left + width]
        target[:] = window[..., ::-1] if flipped else window
    return torch.from_numpy(out)


def _reach(shift: Tensor) -> int:
    return int(shift.abs().max()) if len(shift) else 0
