"""The discriminator of SAGAN: how real an image looks, as one of its class."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tokenmix.layers.base import Mixer
from tokenmix.tasks.generation.models.norm import orthogonal_start, spectral

__all__ = ["Discriminator"]


class DiscriminatorBlock(nn.Module):
    """ReLU, 3 x 3, ReLU, 3 x 3, half the sides; beside it a 1 x 1 shortcut. The first block begins without ReLU."""

    def __init__(self, width_in: int, width_out: int, *, first: bool, halves: bool, **place: Any) -> None:
        super().__init__()
        self.first, self.halves = first, halves
        self.conv1 = spectral(nn.Conv2d(width_in, width_out, 3, padding=1, **place))
        self.conv2 = spectral(nn.Conv2d(width_out, width_out, 3, padding=1, **place))
        same = width_in == width_out and not halves
        self.shortcut = nn.Identity() if same else spectral(nn.Conv2d(width_in, width_out, 1, **place))

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv2(F.relu(self.conv1(x if self.first else F.relu(x))))
        if self.halves:
            # The mean before the 1 x 1 convolution gives the same as behind it, for a quarter of the work.
            out, x = F.avg_pool2d(out, 2), F.avg_pool2d(x, 2)
        return out + self.shortcut(x)

    def macs(self, pixels: int) -> int:
        """Multiply-adds of the convolutions, for so many pixels that come in."""
        width_in, width_out = self.conv1.in_channels, self.conv1.out_channels
        shortcut = 0 if isinstance(self.shortcut, nn.Identity) else width_in * width_out
        return pixels * 9 * width_out * (width_in + width_out) + pixels // (4 if self.halves else 1) * shortcut


class Discriminator(nn.Module):
    """The score of an image and its class: a projection discriminator.

        h = sum over pixels of relu(blocks(image));  score = w h + b + e_class h

    Paper: Miyato and Koyama, cGANs with Projection Discriminator, arXiv 1802.05637; as in SAGAN with spectral norm on
    every convolution, on w and on the class embeddings e.

    Shapes: image (B, channels, S, S), labels (B,) int64; score (B,).

    Args:
        widths: channels after each block.
        num_halvings: how many of the first blocks halve the sides.
        num_classes: classes.
        channels: of the image.
        attention: layer of maps with as many channels as the block has that it follows, or None.
        attention_after: the block that it follows, counted from 1.
    """

    def __init__(
        self,
        widths: Sequence[int],
        *,
        num_halvings: int,
        num_classes: int,
        channels: int,
        attention: Mixer | None,
        attention_after: int,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        place = {"device": device, "dtype": dtype}
        self.attention_after = attention_after
        self.blocks = nn.ModuleList(
            DiscriminatorBlock(before, after, first=number == 0, halves=number < num_halvings, **place)
            for number, (before, after) in enumerate(zip((channels, *widths), widths))
        )
        self.attention = attention
        self.score = spectral(nn.Linear(widths[-1], 1, **place))
        self.classes = spectral(nn.Embedding(num_classes, widths[-1], **place))
        orthogonal_start(self)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """The score of each image as one of its class."""
        x = images
        for number, block in enumerate(self.blocks, 1):
            x = block(x)
            if self.attention is not None and number == self.attention_after:
                x = self.attention(x)
        features = F.relu(x).sum((2, 3))
        return self.score(features).squeeze(1) + (self.classes(labels) * features).sum(1)

    def macs(self, img_size: int) -> int:
        """Multiply-adds of one image of this side: convolutions, attention and scores."""
        total, side = 0, img_size
        for number, block in enumerate(self.blocks, 1):
            assert isinstance(block, DiscriminatorBlock)
            total += block.macs(side**2)
            side //= 2 if block.halves else 1
            if self.attention is not None and number == self.attention_after:
                total += self.attention.macs(side**2)
        return total + 2 * self.score.in_features
