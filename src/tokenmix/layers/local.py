"""Local mixers: the identity, pooling and depthwise convolution."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenmix.errors import UserError
from tokenmix.layers.base import Capabilities, Device, Mixer, masked_output, zero_masked
from tokenmix.ops.checks import check_whole


class IdentityMixer(Mixer):
    """The identity: no token sees another token.

        out = X

    A network of identity blocks is one MLP applied to every token. If this network matches self-attention on a data
    set, the data set does not test token mixing.

    Args:
        dim: width D.

    Shape: x (B, N, D) to (B, N, D).

    Reference: Yu et al., MetaFormer Baselines for Vision, arXiv 2210.13452 (IdentityFormer).
    """

    capabilities: ClassVar[Capabilities] = Capabilities(linear=True, map=None)

    def __init__(self, dim: int, *, device: Device = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        check_whole(dim=dim)
        self.dim = dim

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x, mask = self.checked(x, mask)
        return masked_output(x.clone(), mask)

    def macs(self, num_tokens: int) -> int:
        check_whole(num_tokens=num_tokens)
        return 0


class Pooling2d(Mixer):
    """PoolFormer's mixer: the mean of a window around each position, minus the position itself.

        out_p = mean_(q in window(p)) x_q - x_p

    The mean excludes masked positions and positions outside the map. There are no weights.

    Args:
        dim: channels.
        pool_size: side of the window, odd.

    Shape: x (B, dim, H, W) to the same; mask (B, H * W).

    Cost: no multiply-adds; pool_size^2 additions per value.

    Reference: Yu et al., MetaFormer Is Actually What You Need for Vision, arXiv 2111.11418.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(layout="2d", linear=True, map=None, equivariant=False)

    def __init__(
        self, dim: int, *, pool_size: int = 3, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        check_whole(dim=dim, pool_size=pool_size)
        if pool_size % 2 == 0:
            raise UserError(f"pool_size must be odd, got {pool_size}; give {pool_size + 1}")
        self.dim, self.pool_size = dim, pool_size

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x, mask = self.checked(x, mask)
        if mask is None:
            return F.avg_pool2d(x, self.pool_size, 1, self.pool_size // 2, count_include_pad=False) - x
        # Masked positions are 0 in x. Divide by the fraction of the window that is not masked.
        part = mask.unflatten(1, x.shape[2:]).unsqueeze(1).to(x.dtype)
        total, count = (F.avg_pool2d(v, self.pool_size, 1, self.pool_size // 2) for v in (x, part))
        return zero_masked(total / count.clamp_min(0.5 / self.pool_size**2) - x, mask)

    def macs(self, num_tokens: int) -> int:
        check_whole(num_tokens=num_tokens)
        return 0


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

    def macs(self, num_tokens: int) -> int:
        check_whole(num_tokens=num_tokens)
        return num_tokens * self.conv.weight.numel()


class DepthwiseConvolution(_Depthwise):
    """One filter per channel over neighbouring tokens of a sequence.

        out_ic = sum_(|r| <= k/2) w_cr x_(i + r) c + b_c

    Masked tokens and tokens outside the sequence count as 0. The paper's weight sharing over heads and softmax of the
    filter are left out.

    Args:
        dim: width D.
        kernel_size: tokens per window, odd.

    Shape: x (B, N, D) to (B, N, D).

    Cost: k N D multiply-adds, including the padding.

    Reference: Wu et al., Pay Less Attention with Lightweight and Dynamic Convolutions, arXiv 1901.10430.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(linear=True, map=None, equivariant=False)

    kind = nn.Conv1d

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x, mask = self.checked(x, mask)
        return masked_output(self.conv(x.transpose(1, 2)).transpose(1, 2), mask)


class DepthwiseConvolution2d(_Depthwise):
    """One filter per channel over a window of a map.

        out_pc = sum_(q in k x k) w_cq x_(p + q) c + b_c

    Masked positions and positions outside the map count as 0.

    Args:
        dim: channels.
        kernel_size: side of the window, odd.

    Shape: x (B, dim, H, W) to the same; mask (B, H * W).

    Cost: k^2 N D multiply-adds for N = H * W positions, including the padding.

    Reference: Trockman and Kolter, Patches Are All You Need?, arXiv 2201.09792; Liu et al., A ConvNet for the 2020s,
    arXiv 2201.03545.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(layout="2d", linear=True, map=None, equivariant=False)

    kind = nn.Conv2d

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x, mask = self.checked(x, mask)
        return zero_masked(self.conv(x), mask)
