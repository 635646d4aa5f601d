"""No mixing: the control of every comparison."""

from typing import ClassVar

import torch
from torch import Tensor

from tokenmix.layers.base import Capabilities, Device, Mixer, finish
from tokenmix.ops.checks import check_whole


class IdentityMixer(Mixer):
    """The identity: each token keeps its own features, and no token sees another.

        out = X

    A network of such blocks is one MLP that is applied to every token. Data on which this network does as well as
    self-attention does not test token mixing.

    Paper: Yu et al., MetaFormer Baselines for Vision, arXiv 2210.13452, whose IdentityFormer is this control.

    Args:
        dim: width D.

    Shape:
        x (B, N, D) to (B, N, D).
    """

    capabilities: ClassVar[Capabilities] = Capabilities(linear=True, map=None)

    def __init__(self, dim: int, *, device: Device = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        check_whole(dim=dim)
        self.dim = dim

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x (B, N, dim) unchanged, 0 at masked positions."""
        x, mask = self.checked(x, mask)
        return finish(x.clone(), mask)

    def macs(self, num_tokens: int) -> int:
        """0."""
        check_whole(num_tokens=num_tokens)
        return 0
