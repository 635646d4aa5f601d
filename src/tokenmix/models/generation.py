"""Generative adversarial networks with an optional attention block: SAGAN, EAGAN and a plain GAN."""

import copy
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple, Unpack, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.nn.utils.parametrize import is_parametrized

from tokenmix.errors import UserError
from tokenmix.layers.base import Device, Factory, Mixer, count_macs, count_parameters, on_meta
from tokenmix.layers.external import ExternalAttention2d
from tokenmix.layers.sagan import SAGANAttention2d, Variant
from tokenmix.models.interface import PartCost
from tokenmix.ops.checks import check_choice, check_whole

Attention = Literal["none", "sagan", "external"]


class Layout(NamedTuple):
    """Widths in units, and the blocks before attention in generator and discriminator (`after`).

    The generator has a width at 4 x 4 pixels and after each block, the discriminator after each block. The first
    `num_halvings` discriminator blocks halve the sides.
    """

    generator: tuple[int, ...]
    discriminator: tuple[int, ...]
    num_halvings: int
    after: tuple[int, int]


# From PyTorch-StudioGAN in 2021, EANet's baseline (SAGAN configs for CIFAR-10, Tiny-ImageNet and ImageNet).
PUBLISHED = {
    32: Layout((4, 4, 4, 4), (2, 2, 2, 2), 2, (2, 1)),
    64: Layout((16, 8, 4, 2, 1), (1, 2, 4, 8, 16), 4, (3, 1)),
    128: Layout((16, 16, 8, 4, 2, 1), (1, 2, 4, 8, 16, 16), 5, (4, 1)),
}
# At 32 px, the last block does three quarters of the published generator's work; this layout is narrower there, for
# CPUs.
LAYOUTS = {"published": PUBLISHED, "narrowing": {**PUBLISHED, 32: Layout((8, 4, 2, 2), (2, 2, 4, 8), 3, (2, 1))}}

BOTTOM = 4

# Power iteration steps at the start, for an error of a few per cent in the largest singular value.
STARTING_STEPS = 15


@torch.no_grad()
def orthogonal_start(network: nn.Module) -> None:
    """Initialise convolutions, projections and embeddings orthogonally and biases with 0, and update power iteration.

    Reading a weight in training mode takes a step of power iteration. Without these steps, the vectors of spectral norm
    would belong to the old weight, and the estimate would be far too small.
    """
    for layer in network.modules():
        if not isinstance(layer, nn.Conv2d | nn.Linear | nn.Embedding):
            continue
        normed = is_parametrized(layer, "weight")
        weight = layer.get_parameter("parametrizations.weight.original" if normed else "weight")
        if weight.is_meta:
            continue
        nn.init.orthogonal_(weight)
        if getattr(layer, "bias", None) is not None:
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
        for _ in range(STARTING_STEPS if normed else 0):
            _ = layer.weight


class ConditionalBatchNorm2d(nn.Module):
    """Batch norm with a learned gain and shift per class.

        y = g_c (x - mean) / sqrt(var + eps) + s_c

    As in SAGAN, gains start at 1 and shifts at 0 in every class.

    Shape: x (B, C, H, W) and labels (B,) int64 to (B, C, H, W).

    Reference: de Vries et al., Modulating early visual processing by language, arXiv 1707.00683.
    """

    def __init__(self, channels: int, num_classes: int, **factory: Unpack[Factory]) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels, affine=False, **factory)
        # Not embeddings, which would be initialised orthogonally.
        self.gain = nn.Parameter(torch.ones(num_classes, channels, **factory))
        self.shift = nn.Parameter(torch.zeros(num_classes, channels, **factory))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        gain, shift = self.gain[labels], self.shift[labels]
        return torch.addcmul(shift[:, :, None, None], self.norm(x), gain[:, :, None, None])


class GeneratorBlock(nn.Module):
    """Conditional norm, ReLU, upsampling by 2, 3 x 3; conditional norm, ReLU, 3 x 3; with a 1 x 1 shortcut."""

    def __init__(self, width_in: int, width_out: int, num_classes: int, **factory: Unpack[Factory]) -> None:
        super().__init__()
        self.norm1 = ConditionalBatchNorm2d(width_in, num_classes, **factory)
        self.conv1 = spectral_norm(nn.Conv2d(width_in, width_out, 3, padding=1, **factory))
        self.norm2 = ConditionalBatchNorm2d(width_out, num_classes, **factory)
        self.conv2 = spectral_norm(nn.Conv2d(width_out, width_out, 3, padding=1, **factory))
        self.shortcut = spectral_norm(nn.Conv2d(width_in, width_out, 1, **factory))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        out = self.conv1(_doubled(F.relu(self.norm1(x, labels))))
        out = self.conv2(F.relu(self.norm2(out, labels)))
        # A 1 x 1 convolution before upsampling gives the same result for a quarter of the work.
        return out + _doubled(self.shortcut(x))


def _doubled(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2.0, mode="nearest")


class Generator(nn.Module):
    """Images of a class from noise.

        x = W z, 4 x 4;  x = block_i(x, class), i = 1 ...;  x = attention(x) after one of them;
        image = tanh(conv3x3(relu(BN(x))))

    Widths and parameter counts equal PyTorch-StudioGAN's. In StudioGAN the gains of the conditional norm are 1 plus an
    embedding, and its shifts are an embedding. Here they are tables that start at 1 and 0. Spectral norm applies to all
    convolutions and projections, not to these tables.

    `widths` are the channels at 4 x 4 pixels and after each block; attention follows block `attention_after`, from 1.

    Shape: noise (B, latent_dim), labels (B,) int64; image (B, channels, S, S) in -1 .. 1, S = 4 * 2^blocks.

    Reference: Zhang et al., Self-Attention Generative Adversarial Networks, arXiv 1805.08318.
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
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__()
        self.widths, self.latent_dim = tuple(widths), latent_dim
        self.num_classes, self.channels, self.attention_after = num_classes, channels, attention_after
        self.start = spectral_norm(nn.Linear(latent_dim, widths[0] * BOTTOM**2, **factory))
        self.blocks = nn.ModuleList(
            GeneratorBlock(before, after, num_classes, **factory) for before, after in pairwise(widths)
        )
        self.attention = attention
        self.norm = nn.BatchNorm2d(widths[-1], **factory)
        self.last = spectral_norm(nn.Conv2d(widths[-1], channels, 3, padding=1, **factory))
        orthogonal_start(self)

    def forward(self, noise: Tensor, labels: Tensor) -> Tensor:
        x = self.start(noise).unflatten(1, (self.widths[0], BOTTOM, BOTTOM))
        for number, block in enumerate(self.blocks, 1):
            x = block(x, labels)
            if self.attention is not None and number == self.attention_after:
                x = self.attention(x)
        return self.last(F.relu(self.norm(x))).tanh()


class DiscriminatorBlock(nn.Module):
    """ReLU, 3 x 3, ReLU, 3 x 3, optional pooling by 2, with a 1 x 1 shortcut. The first block starts without ReLU."""

    def __init__(self, width_in: int, width_out: int, *, first: bool, halves: bool, **factory: Unpack[Factory]) -> None:
        super().__init__()
        self.first, self.halves = first, halves
        self.conv1 = spectral_norm(nn.Conv2d(width_in, width_out, 3, padding=1, **factory))
        self.conv2 = spectral_norm(nn.Conv2d(width_out, width_out, 3, padding=1, **factory))
        same = width_in == width_out and not halves
        self.shortcut = nn.Identity() if same else spectral_norm(nn.Conv2d(width_in, width_out, 1, **factory))

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv2(F.relu(self.conv1(x if self.first else F.relu(x))))
        if self.halves:
            # Pooling before the 1 x 1 convolution gives the same result for a quarter of the work.
            out, x = F.avg_pool2d(out, 2), F.avg_pool2d(x, 2)
        return out + self.shortcut(x)


class Discriminator(nn.Module):
    """The score of an image and its class: a projection discriminator.

        h = sum over pixels of relu(blocks(image));  score = w h + b + e_class h

    As in SAGAN, spectral norm applies to all convolutions, to w and to the class embeddings e.

    `widths` are the channels after each block; the first `num_halvings` blocks halve the sides.

    Shape: image (B, channels, S, S), labels (B,) int64; score (B,).

    Reference: Miyato and Koyama, cGANs with Projection Discriminator, arXiv 1802.05637.
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
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__()
        self.attention_after = attention_after
        self.blocks = nn.ModuleList(
            DiscriminatorBlock(before, after, first=number == 0, halves=number < num_halvings, **factory)
            for number, (before, after) in enumerate(zip((channels, *widths), widths))
        )
        self.attention = attention
        self.score = cast(nn.Linear, spectral_norm(nn.Linear(widths[-1], 1, **factory)))
        self.classes = spectral_norm(nn.Embedding(num_classes, widths[-1], **factory))
        orthogonal_start(self)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = images
        for number, block in enumerate(self.blocks, 1):
            x = block(x)
            if self.attention is not None and number == self.attention_after:
                x = self.attention(x)
        features = F.relu(x).sum((2, 3))
        return self.score(features).squeeze(1) + (self.classes(labels) * features).sum(1)


class GAN(nn.Module):
    """Generator and discriminator, and `average`, a moving average of the generator's weights after `keep_average`."""

    def __init__(self, generator: Generator, discriminator: Discriminator) -> None:
        super().__init__()
        self.generator, self.discriminator = generator, discriminator
        self.average: Generator | None = None
        side = BOTTOM * 2 ** len(generator.blocks)
        self.img_size = (side, side)
        # The grid at the position of the generator's attention.
        side = BOTTOM * 2**generator.attention_after
        self.grid_size, self.num_tokens = (side, side), side**2
        names: dict[type, str] = {SAGANAttention2d: "sagan", ExternalAttention2d: "external-2d"}
        self.mixer_name = names.get(type(generator.attention), "none")

    def cost_table(self) -> list[PartCost]:
        """Parameters and multiply-adds of each network, counted on the meta device."""
        twin, label = on_meta(self), torch.zeros(1, dtype=torch.int64, device="meta")
        noise = torch.empty(1, self.generator.latent_dim, device="meta")
        image, generating = count_macs(twin.generator, noise, label)
        _, judging = count_macs(twin.discriminator, image, label)
        # The counter misses the product with the class embedding, which is elementwise.
        judging += self.discriminator.score.in_features
        return [
            PartCost("generator", count_parameters(self.generator), generating),
            PartCost("discriminator", count_parameters(self.discriminator), judging),
        ]

    def warnings(self) -> list[str]:
        return []

    def keep_average(self) -> "GAN":
        """Start an average of the generator; call `update_average` after each generator step."""
        self.average = copy.deepcopy(self.generator).requires_grad_(False)
        self.register_buffer("updates", torch.zeros((), device=self.average.norm.weight.device))
        return self

    @torch.no_grad()
    def update_average(self, decay: float) -> None:
        """Update the average with the generator's weights.

        After t updates the decay is (1 + t) / (10 + t), at most `decay`, so that short runs do not keep the first
        weights. Running statistics and the vectors of spectral norm are copied.
        """
        assert self.average is not None
        share = 1 - torch.clamp((1 + self.updates) / (10 + self.updates), max=decay)  # type: ignore[operator]
        for averaged, own in zip(self.average.parameters(), self.generator.parameters()):
            averaged.lerp_(own, share.to(own.dtype))
        for averaged, own in zip(self.average.buffers(), self.generator.buffers()):
            averaged.copy_(own)
        self.updates += 1  # type: ignore[operator]

    def forward(self, noise: Tensor, labels: Tensor) -> Tensor:
        """Images (B, C, S, S) in -1 .. 1 from noise (B, z) and labels (B,), by the averaged generator if it exists."""
        return (self.generator if self.average is None else self.average)(noise, labels)

    def macs(self) -> int:
        return self.cost_table()[0].macs


def create_gan(
    *,
    num_classes: int = 10,
    img_size: int = 32,
    channels: int = 3,
    attention: Attention = "none",
    variant: Variant | None = None,
    num_slots: int | None = None,
    layout: Literal["published", "narrowing"] = "published",
    width: int = 64,
    latent_dim: int = 128,
    device: Device = None,
    dtype: torch.dtype | None = None,
) -> GAN:
    """A generator and a discriminator of one width, both with attention at the same resolution.

    There is no released code for EAGAN. Here the EANet segmentation block, with its norm, identity and ReLU, replaces
    SAGAN's block in both networks. Spectral norm applies to the block's two convolutions.

    Args:
        num_classes: classes.
        img_size: 32, 64 or 128.
        channels: 1 or 3.
        attention: `"none"`, `"sagan"` or `"external"`.
        variant: of SAGAN's block, see `SAGANAttention2d` (default `"official"`).
        num_slots: memory slots of external attention (default 64).
        layout: `"published"`, or `"narrowing"`, which needs less work in the generator at 32 px.
        width: channels per unit.
        latent_dim: length of the noise vector.

    Reference: Zhang et al., arXiv 1805.08318 (SAGAN); Guo et al., arXiv 2105.02358 (EAGAN).
    """
    check_choice("attention", attention, get_args(Attention))
    check_choice("layout", layout, LAYOUTS)
    if img_size not in LAYOUTS[layout]:
        raise UserError(f"a GAN makes images of 32, 64 or 128 px, got {img_size}; give --img-size 32")
    if channels not in (1, 3):
        raise UserError(f"an image has 1 or 3 channels, got {channels}")
    if variant is not None and attention != "sagan":
        raise UserError(
            f"variant={variant!r} only applies to SAGAN's attention, this GAN has {attention!r}; leave it out"
        )
    if num_slots is not None and attention != "external":
        raise UserError(
            f"num_slots={num_slots} only applies to external attention, this GAN has {attention!r}; leave it out"
        )
    check_whole(num_classes=num_classes, width=width, latent_dim=latent_dim)
    shape = LAYOUTS[layout][img_size]
    factory: Factory = {"device": device, "dtype": dtype}
    to_image, to_score = ([width * units for units in side] for side in (shape.generator, shape.discriminator))

    def block(dim: int) -> Mixer | None:
        if attention == "none":
            return None
        if attention == "sagan":
            return SAGANAttention2d(dim, variant=variant or "official", spectral_norm=True, **factory)
        external = ExternalAttention2d(dim, num_slots=num_slots or 64, **factory)
        spectral_norm(external.conv1)
        spectral_norm(external.conv2)
        return external

    after_g, after_d = shape.after
    generator = Generator(
        to_image,
        latent_dim=latent_dim,
        num_classes=num_classes,
        channels=channels,
        attention=block(to_image[after_g]),
        attention_after=after_g,
        **factory,
    )
    discriminator = Discriminator(
        to_score,
        num_halvings=shape.num_halvings,
        num_classes=num_classes,
        channels=channels,
        attention=block(to_score[after_d - 1]),
        attention_after=after_d,
        **factory,
    )
    return GAN(generator, discriminator)
