"""An image as it is drawn under a map, and as a model takes it."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from tokenmix.train.programs import View

__all__ = ["channel_columns", "image_view", "shown_image"]

LONGEST = 1000


def image_view(pixels: Tensor, mean: Sequence[float], std: Sequence[float]) -> View:
    """Of an image uint8 (C, H, W), normalised for the model."""
    levels = pixels.float().div(255)
    return View(shown_image(levels), levels.sub(channel_columns(mean)).div(channel_columns(std))[None])


def channel_columns(values: Sequence[float]) -> Tensor:
    """A number for each channel as (C, 1, 1)."""
    return torch.tensor(values).view(-1, 1, 1)


def shown_image(levels: Tensor) -> Tensor:
    """The image with at most 1,000 pixels on a side; a picture shows no more."""
    scale = LONGEST / max(levels.shape[1:])
    if scale >= 1:
        return levels
    size = [max(1, round(side * scale)) for side in levels.shape[1:]]
    return F.interpolate(levels[None], size=size, mode="bilinear", antialias=True)[0]
