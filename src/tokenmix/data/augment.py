"""Augmentation that is a function of (seed, epoch, index of the image) alone.

Hence the number of workers, the batch size, the order and a resumed run change nothing: an image in an epoch always
comes out the same.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from tokenmix.errors import UserError

__all__ = ["Augment", "hash_indices", "make_augment", "shift_and_flip"]

# (images uint8 (B, C, H, W), epoch, indices int64 (B,)) -> images of the same shape.
Augment = Callable[[Tensor, int, Tensor], Tensor]
TIMM_POLICIES = ("rand", "augmix", "original", "originalr", "v0", "v0r", "3a")


def make_augment(name: str, *, seed: int, flip: bool, fill: int | None) -> Augment:
    """The augmentation of this name.

    Args:
        name: `none`; `light` (shift by up to an eighth of the size, horizontal flip where `flip` allows it); or a timm
            auto-augment string such as `rand-m9-mstd0.5-inc1`, which is applied after `light`.
        seed: with the epoch and the index of an image, all that its augmentation depends on.
        flip: a mirrored image is still of its class.
        fill: grey level that is shifted in; None repeats the edge.
    """
    if name == "none":
        return _unchanged
    light = Light(seed=seed, flip=flip, fill=fill)
    if name == "light":
        return light
    if name.split("-")[0] in TIMM_POLICIES:
        return AutoAugment(name, light)
    raise UserError(f"unknown augmentation {name!r}; known: none, light, or a timm string such as rand-m9-mstd0.5-inc1")


def _unchanged(images: Tensor, epoch: int, indices: Tensor) -> Tensor:
    return images


def hash_indices(seed: int, epoch: int, indices: Tensor) -> np.ndarray:
    """64 random bits for each index, a pure function of (seed, epoch, index).

    The finaliser is splitmix64's (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014).
    """
    key = np.random.SeedSequence([abs(seed), epoch]).generate_state(1, np.uint64)
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

    def __init__(self, *, seed: int, flip: bool, fill: int | None) -> None:
        self.seed, self.flip, self.fill = seed, flip, fill

    def __call__(self, images: Tensor, epoch: int, indices: Tensor) -> Tensor:
        bits = hash_indices(self.seed, epoch, indices)
        reach = [size // 8 for size in images.shape[-2:]]
        down, right = (_draw(bits, 16 * i, 2 * r + 1) - r for i, r in enumerate(reach))
        flips = _draw(bits, 32, 2).bool() if self.flip else torch.zeros(len(images), dtype=torch.bool)
        return shift_and_flip(images, down, right, flips, self.fill)


def shift_and_flip(images: Tensor, down: Tensor, right: Tensor, flips: Tensor, fill: int | None) -> Tensor:
    """Each uint8 image moved by its own (down, right) and mirrored where `flips`; `fill` or the edge comes in."""
    height, width = images.shape[-2:]
    rows = torch.arange(height) - down[:, None]
    columns = torch.arange(width).expand(len(images), width)
    columns = torch.where(flips[:, None], width - 1 - columns, columns)
    columns = torch.where(flips[:, None], columns + right[:, None], columns - right[:, None])
    if fill is not None:
        # One more row and column at the bottom and on the right hold the level that comes in.
        images = F.pad(images, (0, 1, 0, 1), value=fill)
        rows = torch.where((rows < 0) | (rows >= height), height, rows)
        columns = torch.where((columns < 0) | (columns >= width), width, columns)
    else:
        rows, columns = rows.clamp(0, height - 1), columns.clamp(0, width - 1)
    places = rows[:, :, None] * images.shape[-1] + columns[:, None, :]
    places = places.flatten(1)[:, None].expand(-1, images.shape[1], -1)
    return images.flatten(2).gather(2, places).unflatten(2, (height, width))


class AutoAugment:
    """timm's policies on one image after the other, each under its own seed."""

    def __init__(self, policy: str, light: Light) -> None:
        self.policy, self.light = policy, light
        self._transforms: dict[int, Callable[[Image.Image], Image.Image]] = {}
        self._transform(32)  # a policy that timm cannot read fails here, not in the first batch

    def __call__(self, images: Tensor, epoch: int, indices: Tensor) -> Tensor:
        images = self.light(images, epoch, indices)
        transform = self._transform(min(images.shape[-2:]))
        seeds = hash_indices(self.light.seed + 1, epoch, indices)
        with _restored_random_state():
            parts = [_one(image, int(seed), transform) for image, seed in zip(images, seeds)]
        return torch.stack(parts) if parts else images

    def __getstate__(self) -> dict[str, object]:
        # Loader processes that are not forked get the policy's name; its closures cannot be pickled.
        return {**self.__dict__, "_transforms": {}}

    def _transform(self, size: int) -> Callable[[Image.Image], Image.Image]:
        if size not in self._transforms:
            from timm.data.auto_augment import auto_augment_transform

            level = 128 if self.light.fill is None else self.light.fill
            hints = {"translate_const": int(0.45 * size), "img_mean": (level,) * 3}
            try:
                self._transforms[size] = auto_augment_transform(self.policy, hints)
            except (AssertionError, ValueError, KeyError, IndexError) as error:
                raise UserError(
                    f"timm cannot read the augmentation {self.policy!r} ({str(error) or type(error).__name__}); "
                    "an example is rand-m9-mstd0.5-inc1"
                ) from None
        return self._transforms[size]


def _one(image: Tensor, seed: int, transform: Callable[[Image.Image], Image.Image]) -> Tensor:
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    # timm's operations fill with a colour, so grey images make the trip as RGB.
    array = image.expand(3, -1, -1).permute(1, 2, 0).numpy()
    changed = transform(Image.fromarray(np.ascontiguousarray(array)))
    if image.shape[0] == 1:
        changed = changed.convert("L")
    return torch.from_numpy(np.array(changed)).reshape(*image.shape[1:], -1).permute(2, 0, 1)


@contextmanager
def _restored_random_state() -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
