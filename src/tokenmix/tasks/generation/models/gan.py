"""Generator and discriminator in one module, since a run saves one."""

import copy
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tokenmix.layers.external import ExternalAttention2d
from tokenmix.layers.sagan import SAGANAttention2d
from tokenmix.tasks.generation.models.discriminator import Discriminator
from tokenmix.tasks.generation.models.generator import Generator

__all__ = ["GAN"]


class NetworkRow(NamedTuple):
    """One row of the cost table, of one image."""

    network: str
    parameters: int
    macs: int


class GAN(nn.Module):
    """Two networks, and if asked for a third: the generator's exponential moving average.

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
        return {SAGANAttention2d: "sagan", ExternalAttention2d: "external-2d"}.get(
            type(self.generator.attention), "none"
        )

    def cost_table(self) -> list[NetworkRow]:
        """What each network has and takes."""
        macs = {"generator": self.generator.macs(), "discriminator": self.discriminator.macs(self.img_size[0])}
        return [
            NetworkRow(name, sum(p.numel() for p in getattr(self, name).parameters()), count)
            for name, count in macs.items()
        ]

    def keep_average(self) -> "GAN":
        """Keep an average of the generator from now on; call `update_average` after each of its steps."""
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
        return self.generator.macs()
