"""Average pooling as a token mixer."""

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from tokenmix.errors import UserError
from tokenmix.layers.base import Capabilities, Device, Mixer, zero_masked
from tokenmix.ops.checks import check_whole


class Pooling2d(Mixer):
    """PoolFormer's mixer: the mean of a window around each position, minus the position itself.

        out_p = mean_(q in window(p)) x_q - x_p

    Positions outside the map, and masked positions, are left out of the mean. There are no weights.

    Paper: Yu et al., MetaFormer Is Actually What You Need for Vision, arXiv 2111.11418.

    Args:
        dim: channels.
        pool_size: side of the window, odd.

    Shape:
        x (B, dim, H, W) to the same; mask (B, H * W).

    Cost: no multiply-adds; pool_size^2 additions a value.
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
        """Mix a map (B, dim, H, W)."""
        x, mask = self.checked(x, mask)
        if mask is None:
            return F.avg_pool2d(x, self.pool_size, 1, self.pool_size // 2, count_include_pad=False) - x
        # Masked positions are 0 in x; the mean is over the share of the window that takes part.
        part = mask.unflatten(1, x.shape[2:]).unsqueeze(1).to(x.dtype)
        total, count = (F.avg_pool2d(v, self.pool_size, 1, self.pool_size // 2) for v in (x, part))
        return zero_masked(total / count.clamp_min(0.5 / self.pool_size**2) - x, mask)

    def macs(self, num_tokens: int) -> int:
        """0: sums alone."""
        check_whole(num_tokens=num_tokens)
        return 0
