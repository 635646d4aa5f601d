"""Linear attention with ReLU features."""

from contextlib import nullcontext
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tokenmix.layers.base import Capabilities, Device, Mixer, finish
from tokenmix.ops.checks import check_flags, check_heads, check_rates, check_whole

EPSILON = 1e-15


class LinearAttention(Mixer):
    """Attention with the kernel relu(q) relu(k)^T, computed in time linear in the tokens.

        out_i = sum_j relu(q_i) . relu(k_j) v_j / (sum_j relu(q_i) . relu(k_j) + eps)
              = relu(q_i) (relu(K)^T V) / (relu(q_i) . relu(K)^T 1 + eps)

    The second form makes a d x d matrix for each head, whatever N. It is summed in float32 for half precision.

    Papers: Katharopoulos et al., Transformers are RNNs, arXiv 2006.16236; the ReLU kernel without a local window as in
    Sana, Xie et al., arXiv 2410.10629.

    Args:
        dim: width D.
        num_heads: heads H; must divide dim.
        qkv_bias: give q, k and v a bias.
        dropout: on the output.

    Shape:
        x (B, N, D) to (B, N, D); `attention_map` (B, H, N, N), which `forward` never makes.

    Cost: 4 N D^2 + 2 N D (d + 1) multiply-adds with heads of width d.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(linear=True, map="tokens")

    def __init__(
        self,
        dim: int,
        *,
        num_heads: int = 8,
        qkv_bias: bool = True,
        dropout: float = 0.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_flags(qkv_bias=qkv_bias)
        check_rates(dropout=dropout)
        self.dim, self.num_heads, self.head_dim = dim, num_heads, check_heads(dim, num_heads)
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias, device=device, dtype=dtype)
        self.proj = nn.Linear(dim, dim, device=device, dtype=dtype)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Mix tokens (B, N, dim)."""
        x, mask = self.checked(x, mask)
        query, key, value = self._features(x, mask)
        wide = torch.promote_types(x.dtype, torch.float32)
        # The meta device has no autocast and refuses the context.
        with nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False):
            summary = key.to(wide).transpose(-2, -1) @ F.pad(value.to(wide), (0, 1), value=1.0)  # (B, H, d, d + 1)
            sums = query.to(wide) @ summary
        mixed = (sums[..., :-1] / (sums[..., -1:] + EPSILON)).to(value.dtype)
        return finish(self.dropout(self.proj(mixed.transpose(1, 2).flatten(2))), mask)

    def attention_map(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The weights (B, H, N, N) that the sums amount to; a row without a positive product is 0."""
        x, mask = self.checked(x, mask)
        query, key, _ = self._features(x, mask)
        weights = query @ key.transpose(-2, -1)
        weights = weights / (weights.sum(-1, keepdim=True) + EPSILON)
        return weights if mask is None else weights.masked_fill(~mask[:, None, :, None], 0.0)

    def _features(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """relu(q), relu(k) and v, each (B, H, N, d). Masked keys are 0, so that no sum has them."""
        query, key, value = (
            part.unflatten(2, (self.num_heads, self.head_dim)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=2)
        )
        key = F.relu(key)
        return F.relu(query), key if mask is None else key.masked_fill(~mask[:, None, :, None], 0.0), value

    def macs(self, num_tokens: int) -> int:
        """4 N D^2 for the projections, 2 N D (d + 1) for the sums and their denominators."""
        check_whole(num_tokens=num_tokens)
        summary = num_tokens * self.dim * (2 * self.head_dim + 2)
        return 4 * num_tokens * self.dim**2 + summary
