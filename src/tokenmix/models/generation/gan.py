"""A GAN as one module, since a run saves one, and how it is built from its preset."""

import copy
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from tokenmix.errors import UserError, unknown_name
from tokenmix.layers.base import Mixer, count_parameters
from tokenmix.layers.counting import count_macs, on_meta
from tokenmix.layers.external import ExternalAttention2d
from tokenmix.layers.sagan import SAGANAttention2d
from tokenmix.models.generation.networks import Discriminator, Generator, spectral
from tokenmix.presets.generation import GANS, Attention

Variant = Literal["official", "paper", "compact"]
ATTENTIONS = get_args(Attention)


class NetworkRow(NamedTuple):
    """One row of the cost table, of one image."""

    network: str
    parameters: int
    macs: int


class GAN(nn.Module):
    """Generator and discriminator, optionally with an exponential moving average of the generator.

    Attributes:
        generator, discriminator: what is trained.
        average: the averaged generator after `keep_average`, else None.
    """

    def __init__(self, generator: Generator, discriminator: Discriminator) -> None:
        super().__init__()
        self.generator, self.discriminator = generator, discriminator
        self.average: Generator | None = None

    @property
    def img_size(self) -> tuple[int, int]:
        """Height and width of the images."""
        return self.generator.img_size, self.generator.img_size

    @property
    def grid_size(self) -> tuple[int, int]:
        """Height and width of the map that the generator's attention mixes, or would."""
        return self.generator.attention_side, self.generator.attention_side

    @property
    def num_tokens(self) -> int:
        """Pixels of that map."""
        return self.generator.attention_side**2

    @property
    def mixer_name(self) -> str:
        """The attention, by its name in the table of mixers; none without."""
        names: dict[type, str] = {SAGANAttention2d: "sagan", ExternalAttention2d: "external-2d"}
        return names.get(type(self.generator.attention), "none")

    def cost_table(self) -> list[NetworkRow]:
        """What each network has and takes, counted on the meta device."""
        twin, label = on_meta(self), torch.zeros(1, dtype=torch.int64, device="meta")
        noise = torch.empty(1, self.generator.latent_dim, device="meta")
        image, generating = count_macs(twin.generator, noise, label)
        _, judging = count_macs(twin.discriminator, image, label)
        # The product with the class's embedding is elementwise to the counter.
        judging += self.discriminator.score.in_features
        return [
            NetworkRow("generator", count_parameters(self.generator), generating),
            NetworkRow("discriminator", count_parameters(self.discriminator), judging),
        ]

    def keep_average(self) -> "GAN":
        """Start an average of the generator; call `update_average` after each of its steps."""
        self.average = copy.deepcopy(self.generator).requires_grad_(False)
        self.register_buffer("updates", torch.zeros((), device=self.average.norm.weight.device))
        return self

    @torch.no_grad()
    def update_average(self, decay: float) -> None:
        """Take the generator's weights into the average.

        After t updates the decay is (1 + t) / (10 + t), `decay` at most; else a short run would keep its first weights.
        Running statistics and the vectors of spectral norm are copied.
        """
        assert self.average is not None
        share = 1 - torch.clamp((1 + self.updates) / (10 + self.updates), max=decay)  # type: ignore[operator]
        for averaged, own in zip(self.average.parameters(), self.generator.parameters()):
            averaged.lerp_(own, share.to(own.dtype))
        for averaged, own in zip(self.average.buffers(), self.generator.buffers()):
            averaged.copy_(own)
        self.updates += 1  # type: ignore[operator]

    def forward(self, noise: Tensor, labels: Tensor) -> Tensor:
        """Images (B, C, S, S) in -1 .. 1 of noise (B, z) and labels (B,): of the average, if there is one."""
        return (self.generator if self.average is None else self.average)(noise, labels)

    def macs(self) -> int:
        """Multiply-adds of one image that is generated."""
        return self.cost_table()[0].macs


def create_gan(
    name: str,
    *,
    num_classes: int = 10,
    img_size: int = 32,
    channels: int = 3,
    attention: Attention | None = None,
    variant: Variant | None = None,
    num_slots: int | None = None,
    width: int | None = None,
    latent_dim: int | None = None,
    device: Any = None,
    dtype: torch.dtype | None = None,
) -> GAN:
    """Build a GAN by name.

    Papers: Zhang et al., arXiv 1805.08318 (SAGAN); Guo et al., arXiv 2105.02358 (EAGAN). The authors of the second
    released no code for it; we put their segmentation block, with its norm, identity and ReLU, in place of SAGAN's
    block in both networks, with spectral norm on its two convolutions.

    Args:
        name: one of `GANS`.
        num_classes: classes.
        img_size: 32, 64 or 128.
        channels: 1 or 3.
        attention: `"none"`, `"sagan"` or `"external"`; the preset's own if not given.
        variant: of SAGAN's block, see `SAGANAttention2d`; `"official"` if not given.
        num_slots: of external attention; 64 if not given.
        width: channels of one unit; the preset's own if not given.
        latent_dim: length of the noise; the preset's own if not given.

    Raises:
        UserError: an unknown name, a size or number that no GAN has, or an argument of another attention.
    """
    if name not in GANS:
        raise unknown_name("GAN", name, GANS)
    preset = GANS[name]
    kind = preset.attention if attention is None else attention
    if img_size not in preset.layouts:
        raise UserError(f"a GAN makes images of 32, 64 or 128 px, got {img_size}; give --img-size 32")
    if channels not in (1, 3):
        raise UserError(f"an image has 1 or 3 channels, got {channels}")
    if kind not in ATTENTIONS:
        raise unknown_name("attention", kind, ATTENTIONS)
    if variant is not None and kind != "sagan":
        raise UserError(f"variant={variant!r} only applies to SAGAN's attention, this GAN has {kind!r}; leave it out")
    if num_slots is not None and kind != "external":
        raise UserError(
            f"num_slots={num_slots} only applies to external attention, this GAN has {kind!r}; leave it out"
        )
    for what, number in (("num_classes", num_classes), ("width", width), ("latent_dim", latent_dim)):
        if number is not None and not (isinstance(number, int) and number >= 1):
            raise UserError(f"{what} must be a whole number of at least 1, got {number!r}")
    layout, unit = preset.layouts[img_size], width or preset.width
    place = {"device": device, "dtype": dtype}
    generator_widths, discriminator_widths = (
        [unit * n for n in units] for units in (layout.generator, layout.discriminator)
    )

    def block(dim: int) -> Mixer | None:
        if kind == "none":
            return None
        if kind == "sagan":
            return SAGANAttention2d(dim, variant=variant or "official", spectral_norm=True, **place)
        external = ExternalAttention2d(dim, num_slots=num_slots or 64, **place)
        spectral(external.conv1)
        spectral(external.conv2)
        return external

    shared: dict[str, Any] = {"num_classes": num_classes, "channels": channels, **place}
    after_g, after_d = layout.after
    return GAN(
        Generator(
            generator_widths,
            latent_dim=latent_dim or preset.latent_dim,
            attention=block(generator_widths[after_g]),
            attention_after=after_g,
            **shared,
        ),
        Discriminator(
            discriminator_widths,
            num_halvings=layout.num_halvings,
            attention=block(discriminator_widths[after_d - 1]),
            attention_after=after_d,
            **shared,
        ),
    )
