"""GANs by name: SAGAN's networks at the published widths, with its attention, with external attention, with none."""

from dataclasses import dataclass
from typing import Literal

from tokenmix.registry import MODELS, ModelEntry, Published

Attention = Literal["none", "sagan", "external"]


@dataclass(frozen=True)
class GANLayout:
    """Widths in units of a preset's width, and where attention is.

    Attributes:
        generator: at 4 x 4 pixels and after each block.
        discriminator: after each block.
        num_halvings: first blocks of the discriminator that halve the sides.
        after: block of the generator, and of the discriminator, that attention follows.
    """

    generator: tuple[int, ...]
    discriminator: tuple[int, ...]
    num_halvings: int
    after: tuple[int, int]


@dataclass(frozen=True)
class GANPreset:
    """A GAN: unit of width, length of the noise, attention, its layout for each image size, and a line on it."""

    width: int
    latent_dim: int
    attention: Attention
    layouts: dict[int, GANLayout]
    about: str
    published: Published | None = None


# PyTorch-StudioGAN's of 2021, with which EANet compared (its SAGAN configs for CIFAR-10, Tiny-ImageNet and ImageNet).
PUBLISHED = {
    32: GANLayout((4, 4, 4, 4), (2, 2, 2, 2), 2, (2, 1)),
    64: GANLayout((16, 8, 4, 2, 1), (1, 2, 4, 8, 16), 4, (3, 1)),
    128: GANLayout((16, 16, 8, 4, 2, 1), (1, 2, 4, 8, 16, 16), 5, (4, 1)),
}
# At 32 px three quarters of the published generator's work are its last block; for a CPU it narrows towards there.
NANO = {**PUBLISHED, 32: GANLayout((8, 4, 2, 2), (2, 2, 4, 8), 3, (2, 1))}

COUNTED = Published(
    4.386308, None, None, "the authors' logs of PyTorch-StudioGAN, CIFAR-10 with 10 classes at 32 px", part="generator"
)
GANS: dict[str, GANPreset] = {
    "sagan": GANPreset(64, 128, "sagan", PUBLISHED, "SAGAN at the published widths", COUNTED),
    "eagan": GANPreset(64, 128, "external", PUBLISHED, "the same networks with external attention"),
    "resnet_gan": GANPreset(64, 128, "none", PUBLISHED, "the same networks without attention"),
    "sagan_nano": GANPreset(16, 64, "sagan", NANO, "SAGAN at nano size"),
    "eagan_nano": GANPreset(16, 64, "external", NANO, "external attention at nano size"),
    "resnet_gan_nano": GANPreset(16, 64, "none", NANO, "no attention at nano size"),
}

MODELS.register(
    *(
        ModelEntry(
            name=name,
            tasks=("image-generation",),
            about=preset.about,
            build="tokenmix.models.generation.gan:create_gan",
            arguments={"name": name},
            published=preset.published,
        )
        for name, preset in GANS.items()
    )
)
