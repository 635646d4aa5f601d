"""The two networks of SAGAN, image of a class from noise and score of an image as one of its class, and their norms."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import is_parametrized

from tokenmix.layers.base import Mixer

BOTTOM = 4
Layer = TypeVar("Layer", bound=nn.Module)

# Of power iteration, after which the estimate of a first weight's largest singular value is good to a few per cent.
STARTING_STEPS = 15


def spectral(layer: Layer) -> Layer:
    """The layer with its weight divided by its largest singular value; one step of power iteration a training pass."""
    parametrizations.spectral_norm(layer)
    return layer


@torch.no_grad()
def orthogonal_start(network: nn.Module) -> None:
    """Draw every convolution, projection and embedding orthogonal, biases 0, and let power iteration follow.

    Reading a weight in training mode takes a step of power iteration. Without, the vectors that spectral norm keeps
    would be those of the weight before, and its estimate far too small.
    """
    for layer in network.modules():
        if not isinstance(layer, nn.Conv2d | nn.Linear | nn.Embedding):
            continue
        normed = is_parametrized(layer, "weight")
        weight: Any = layer.parametrizations["weight"].original if normed else layer.weight  # type: ignore[index]
        if weight.is_meta:
            continue
        nn.init.orthogonal_(weight)
        if getattr(layer, "bias", None) is not None:
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
        for _ in range(STARTING_STEPS if normed else 0):
            _ = layer.weight


class ConditionalBatchNorm2d(nn.Module):
    """Batch norm whose gain and shift are learned for each class.

        y = g_c (x - mean) / sqrt(var + eps) + s_c

    Paper: de Vries et al., Modulating early visual processing by language, arXiv 1707.00683; as in SAGAN, gains start
    at 1 and shifts at 0, in every class alike.

    Shapes: x (B, C, H, W) and labels (B,) int64 to (B, C, H, W).
    """

    def __init__(
        self, channels: int, num_classes: int, *, device: Any = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        place = {"device": device, "dtype": dtype}
        self.norm = nn.BatchNorm2d(channels, affine=False, **place)
        # Parameters and not embeddings: an orthogonal start is for what multiplies a signal.
        self.gain = nn.Parameter(torch.ones(num_classes, channels, **place))
        self.shift = nn.Parameter(torch.zeros(num_classes, channels, **place))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """Normalise x, then scale and shift each sample as its class asks."""
        gain, shift = self.gain[labels], self.shift[labels]
        return torch.addcmul(shift[:, :, None, None], self.norm(x), gain[:, :, None, None])


class GeneratorBlock(nn.Module):
    """Conditional norm, ReLU, twice the sides, 3 x 3; conditional norm, ReLU, 3 x 3; next to it a 1 x 1 shortcut."""

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


class DiscriminatorBlock(nn.Module):
    """ReLU, 3 x 3, ReLU, 3 x 3, half the sides; next to it a 1 x 1 shortcut. The first block begins without ReLU."""

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
            # The mean before the 1 x 1 convolution gives the same as after it, for a quarter of the work.
            out, x = F.avg_pool2d(out, 2), F.avg_pool2d(x, 2)
        return out + self.shortcut(x)


class Discriminator(nn.Module):
    """The score of an image and its class: a projection discriminator.

        h = sum over pixels of relu(blocks(image));  score = w h + b + e_class h

    Paper: Miyato and Koyama, cGANs with Projection Discriminator, arXiv 1802.05637; as in SAGAN with spectral norm on
    every convolution, on w and on the class embeddings e.

    Shapes: image (B, channels, S, S), labels (B,) int64; score (B,).

    Args:
        widths: channels after each block.
        num_halvings: how many of the first blocks halve the sides.
        num_classes, channels, attention, attention_after: as the generator's.
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
