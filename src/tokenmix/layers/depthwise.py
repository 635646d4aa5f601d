"""Depthwise convolution as a token mixer, over a sequence and over a map."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from tokenmix.errors import UserError
from tokenmix.layers.base import Capabilities, Device, Mixer, finish, zero_masked
from tokenmix.ops.checks import check_whole


class _Depthwise(Mixer):
    kind: ClassVar[type[nn.Conv1d | nn.Conv2d]]

    def __init__(
        self, dim: int, *, kernel_size: int = 7, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        check_whole(dim=dim, kernel_size=kernel_size)
        if kernel_size % 2 == 0:
            raise UserError(f"kernel_size must be odd, got {kernel_size}; give {kernel_size + 1}")
        self.dim, self.kernel_size = dim, kernel_size
        half = kernel_size // 2
        self.conv = self.kind(dim, dim, kernel_size, padding=half, groups=dim, device=device, dtype=dtype)


class DepthwiseConvolution(_Depthwise):
    """One filter for each channel over neighbouring tokens of a sequence.

        out_ic = sum_(|r| <= k/2) w_cr x_(i + r) c + b_c

    Masked tokens and tokens outside the sequence count as 0.

    Paper: Wu et al., Pay Less Attention with Lightweight and Dynamic Convolutions, arXiv 1901.10430, without their
    sharing of filters over heads and their softmax of the filter.

    Args:
        dim: width D.
        kernel_size: tokens that one output sees, odd.

    Shape:
        x (B, N, D) to (B, N, D).

    Cost: k N D multiply-adds.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(linear=True, map=None, equivariant=False)

    kind = nn.Conv1d

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Mix tokens (B, N, dim)."""
        x, mask = self.checked(x, mask)
        return finish(self.conv(x.transpose(1, 2)).transpose(1, 2), mask)

    def macs(self, num_tokens: int) -> int:
        """k N D; products with the padding are counted."""
        check_whole(num_tokens=num_tokens)
        return self.kernel_size * num_tokens * self.dim


class DepthwiseConvolution2d(_Depthwise):
    """One filter for each channel over a window of a map.

        out_pc = sum_(q in k x k) w_cq x_(p + q) c + b_c

    Masked positions and positions outside the map count as 0.

    Paper: Trockman and Kolter, Patches Are All You Need?, arXiv 2201.09792, and Liu et al., A ConvNet for the 2020s,
    arXiv 2201.03545, mix positions by such a convolution.

    Args:
        dim: channels.
        kernel_size: side of the window, odd.

    Shape:
        x (B, dim, H, W) to the same; mask (B, H * W).

    Cost: k^2 N D multiply-adds for N = H * W positions.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(layout="2d", linear=True, map=None, equivariant=False)

    kind = nn.Conv2d

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Mix a map (B, dim, H, W)."""
        x, mask = self.checked(x, mask)
        return zero_masked(self.conv(x), mask)

    def macs(self, num_tokens: int) -> int:
        """k^2 N D; products with the padding are counted."""
        check_whole(num_tokens=num_tokens)
        return self.kernel_size**2 * num_tokens * self.dim
