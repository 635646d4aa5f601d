"""Generator and discriminator in one module, since a run saves one."""

import copy

import torch
from torch import Tensor, nn

from tokenmix.models.gan.discriminator import Discriminator
from tokenmix.models.gan.generator import Generator

__all__ = ["GAN"]


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
