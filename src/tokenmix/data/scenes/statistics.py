"""Mean and deviation of the channels of images of any size."""

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["IMAGENET", "channel_statistics"]

# Of photographs in a folder nothing is decoded at the start.
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def channel_statistics(images: Iterable[Tensor]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel in 0..1, exact, of images uint8 (3, H, W)."""
    counts = torch.zeros(3, 256, dtype=torch.float64)
    for image in images:
        counts += torch.stack([torch.bincount(channel.flatten(), minlength=256) for channel in image])
    weights = counts / counts.sum(1, keepdim=True)
    levels = torch.arange(256, dtype=torch.float64) / 255
    mean = (weights * levels).sum(1)
    std = (weights * (levels - mean[:, None]).square()).sum(1).sqrt()
    # Images of one level have no spread; dividing by less than one level would only blow up rounding.
    return tuple(mean.tolist()), tuple(std.clamp_min(1 / 255).tolist())
