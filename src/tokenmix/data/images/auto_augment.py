"""timm's auto-augment policies and colour jitter, each image under its own seed."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data import auto_augment as timm_augment
from torch import Tensor
from torchvision.transforms import ColorJitter

from tokenmix.data.images.augment import Light, hash_indices
from tokenmix.data.seeded import restored_random_state, seed_all
from tokenmix.errors import UserError

__all__ = ["AutoAugment"]

Transform = Callable[[Image.Image], Image.Image]
MAKERS = {"rand": timm_augment.rand_augment_transform, "augmix": timm_augment.augment_and_mix_transform}
# A section that timm does not understand would often be ignored by it.
SECTION = re.compile(r"[a-z]+\d+(\.\d+)?|t[a-z0-9]+")


class AutoAugment:
    """`light`, and then timm's policy or `jitter-0.4`, on one image after the other."""

    def __init__(self, policy: str, light: Light) -> None:
        self.policy, self.light = policy, light
        self._transforms: dict[int, Transform] = {}
        self._transform(32)  # a policy that timm cannot read fails here, not in the first batch

    def __call__(self, images: Tensor, epoch: int, indices: Tensor) -> Tensor:
        if not len(images):
            return images
        images = self.light(images, epoch, indices)
        transform = self._transform(min(images.shape[-2:]))
        # Other bits than those of the shift.
        seeds = hash_indices(self.light.seed, epoch, ~indices)
        with restored_random_state():
            return torch.stack([_one(image, int(seed), transform) for image, seed in zip(images, seeds)])

    def __getstate__(self) -> dict[str, Any]:
        # timm's operations are closures, which cannot be pickled for a loader process that is not forked.
        return {**self.__dict__, "_transforms": {}}

    def _transform(self, size: int) -> Transform:
        if size not in self._transforms:
            self._transforms[size] = _make(self.policy, size, self.light.fill)
        return self._transforms[size]


def _make(policy: str, size: int, fill: int | None) -> Transform:
    kind, *sections = policy.split("-")
    if kind == "jitter":
        return ColorJitter(*(3 * [float(sections[0])]))
    level = 128 if fill is None else fill
    hints = {"translate_const": int(0.45 * size), "img_mean": (level,) * 3}
    try:
        wrong = [section for section in sections if not SECTION.fullmatch(section)]
        if wrong:
            raise ValueError(f"unknown section {wrong[0]!r}")
        transform = MAKERS.get(kind, timm_augment.auto_augment_transform)(policy, hints)
    except (AssertionError, ValueError, KeyError) as error:
        raise UserError(
            f"timm cannot read the augmentation {policy!r} ({error}); an example is rand-m9-mstd0.5-inc1"
        ) from None
    for operation in _operations(transform):
        if operation.aug_fn is timm_augment.posterize:
            operation.aug_fn = _posterize
    return transform


def _operations(transform: Any) -> list[Any]:
    if hasattr(transform, "ops"):
        return list(transform.ops)
    return [operation for chain in transform.policy for operation in chain]


def _posterize(image: Image.Image, bits: int, **options: Any) -> Image.Image:
    """timm's operation asks for 0 bits at its strongest, which newer releases of Pillow refuse."""
    return timm_augment.posterize(image, max(bits, 1), **options)


def _one(image: Tensor, seed: int, transform: Transform) -> Tensor:
    seed_all(seed)
    # timm's operations fill with a colour, so grey images make the trip as RGB.
    array = image.expand(3, -1, -1).permute(1, 2, 0).numpy()
    changed = transform(Image.fromarray(np.ascontiguousarray(array)))
    if image.shape[0] == 1:
        changed = changed.convert("L")
    return torch.from_numpy(np.array(changed)).reshape(*image.shape[1:], -1).permute(2, 0, 1)
