"""The generator of SAGAN: noise and a class to an image, by residual blocks that double the sides."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tokenmix.layers.base import Mixer
from tokenmix.tasks.generation.models.norm import ConditionalBatchNorm2d, orthogonal_start, spectral

__all__ = ["Generator"]

BOTTOM = 4


class GeneratorBlock(nn.Module):
    """Conditional norm, ReLU, twice the sides, 3 x 3; conditional norm, ReLU, 3 x 3; beside it a 1 x 1 shortcut."""

    def __init__(self, width_in: int, width_out: int, num_classes: int, **place: Any) -> None:
        super().__init__()
        self.norm1 = ConditionalBatchNorm2d(width_in, num_classes, **place)
        self.conv1 = spectral(nn.Conv2d(width_in, width_out, 3, padding=1, **place))
        self.norm2 = ConditionalBatchNorm2d(width_out, num_classes, **place)
        self.conv2 = spectral(nn.Conv2d(width_out, width_out, 3, padding=1, **place))
        self.shortcut = spectral(nn.Conv2d(width_in, width_out, 1, **place))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        out = self.conv1(_doubled(F.relu(self.norm1(x, labels))))
        out = self.conv2(F.relu(self.norm2(out, labels)))
        # A 1 x 1 convolution before the doubling gives the same as after it, for a quarter of the work.
        return out + _doubled(self.shortcut(x))

    def macs(self, pixels: int) -> int:
        """Multiply-adds of the convolutions, for so many pixels that come in."""
        width_out, width_in = self.conv2.out_channels, self.conv1.in_channels
        return 4 * pixels * 9 * width_out * (width_in + width_out) + pixels * width_in * width_out


def _doubled(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2.0, mode="nearest")


class Generator(nn.Module):
    """Images of a class from noise.

        x = W z, 4 x 4;  x = block_i(x, class), i = 1 ...;  x = attention(x) after one of them;
        image = tanh(conv3x3(relu(BN(x))))

    Paper: Zhang et al., Self-Attention Generative Adversarial Networks, arXiv 1805.08318; with the widths of
    PyTorch-StudioGAN, whose parameter counts come out exactly. There the gains and shifts of the conditional norm are
    1 plus an embedding, and an embedding; here they are tables that start at 1 and 0. Spectral norm is on every
    convolution and projection, not on those tables.

    Shapes: noise (B, latent_dim), labels (B,) int64; image (B, channels, S, S) in -1 .. 1, S = 4 * 2^blocks.

    Args:
        widths: channels at 4 x 4 pixels and after each block.
        latent_dim: length of the noise.
        num_classes: classes.
        channels: of the image.
        attention: layer of maps with as many channels as the block has that it follows, or None.
        attention_after: the block that it follows, counted from 1.
    """

    def __init__(
        self,
        widths: Sequence[int],
        *,
        latent_dim: int,
        num_classes: int,
        channels: int,
        attention: Mixer | None,
        attention_after: int,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        place = {"device": device, "dtype": dtype}
        self.widths, self.latent_dim = tuple(widths), latent_dim
        self.num_classes, self.channels, self.attention_after = num_classes, channels, attention_after
        self.start = spectral(nn.Linear(latent_dim, widths[0] * BOTTOM**2, **place))
        self.blocks = nn.ModuleList(
            GeneratorBlock(before, after, num_classes, **place) for before, after in pairwise(widths)
        )
        self.attention = attention
        self.norm = nn.BatchNorm2d(widths[-1], **place)
        self.last = spectral(nn.Conv2d(widths[-1], channels, 3, padding=1, **place))
        orthogonal_start(self)

    @property
    def img_size(self) -> int:
        """Side of the images."""
        return BOTTOM * 2 ** len(self.blocks)

    def forward(self, noise: Tensor, labels: Tensor) -> Tensor:
        """The image of each noise and class."""
        x = self.start(noise).unflatten(1, (self.widths[0], BOTTOM, BOTTOM))
        for number, block in enumerate(self.blocks, 1):
            x = block(x, labels)
            if self.attention is not None and number == self.attention_after:
                x = self.attention(x)
        return self.last(F.relu(self.norm(x))).tanh()

    @property
    def attention_side(self) -> int:
        """Side of the map after the block that attention follows."""
        return BOTTOM * 2**self.attention_after

    def macs(self) -> int:
        """Multiply-adds of one image: projections, convolutions and attention."""
        total = self.latent_dim * self.widths[0] * BOTTOM**2
        for number, block in enumerate(self.blocks):
            assert isinstance(block, GeneratorBlock)
            total += block.macs((BOTTOM * 2**number) ** 2)
        if self.attention is not None:
            total += self.attention.macs(self.attention_side**2)
        return total + self.img_size**2 * 9 * self.widths[-1] * self.channels
