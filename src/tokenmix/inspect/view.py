"""What a model sees of an image, and the picture that its maps are laid over."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tokenmix.data.images import read_image
from tokenmix.tasks.classification.output import stored_images
from tokenmix.tasks.detection.models import Detector
from tokenmix.tasks.segmentation.models import Segmenter

__all__ = ["View", "view_of"]

LONGEST = 1000


class View(NamedTuple):
    """An image as it is drawn, (C, H, W), and as the model takes it, (1, C, H', W')."""

    shown: Tensor
    images: Tensor


def view_of(model: nn.Module, file: Path, description: Mapping[str, Any]) -> View:
    """The image of a file as `predict` would look at it.

    A classifier takes the middle of it, a detector all of it at a scale of its own, a segmenter all of it as it is,
    unless it takes one size alone or has self-attention, whose map of N x N places would not fit in memory.
    """
    if isinstance(model, Detector):
        image = _stored(file).float().div(255)
        seen, _ = model.net.transform([image])
        mean, std = _columns(model.mean, model.std)
        return View(_small(seen.tensors[0] * std + mean), seen.tensors)
    mean, std = _columns(description["mean"], description["std"])
    if isinstance(model, Segmenter) and not model.fixed_size and model.mixer_name != "self":
        pixels = _stored(file)
    else:
        pixels = read_image(file, description["channels"], tuple(description["img_size"]))
    levels = pixels.float().div(255)
    return View(_small(levels), levels.sub(mean).div(std)[None])


def _stored(file: Path) -> Tensor:
    ((_, image),) = stored_images([file])
    return image


def _columns(mean: Any, std: Any) -> tuple[Tensor, Tensor]:
    return torch.tensor(mean).view(-1, 1, 1), torch.tensor(std).view(-1, 1, 1)


def _small(levels: Tensor) -> Tensor:
    """The image with at most 1,000 pixels on a side; a picture shows no more."""
    scale = LONGEST / max(levels.shape[1:])
    if scale >= 1:
        return levels
    size = [max(1, round(side * scale)) for side in levels.shape[1:]]
    return F.interpolate(levels[None], size=size, mode="bilinear", antialias=True)[0]
