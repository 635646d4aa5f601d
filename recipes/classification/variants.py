"""Mixers that differ from a layer in the one thing that an ablation is about."""

from typing import Any

import torch
from torch import Tensor, nn

from tokenmix.layers import ExternalAttention, GatedMLP, MultiHeadExternalAttention
from tokenmix.ops import double_normalize


class Unnormalized(ExternalAttention):
    """External attention without normalisation: (F M_k^T / S) M_v, which mixes no tokens."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x (B, N, dim) to (B, N, dim)."""
        keys, values = self.memory.key_memory, self.memory.value_memory
        return self.dropout(self.out(self.query(x) @ keys.T / len(keys) @ values))


class HeadMemories(MultiHeadExternalAttention):
    """Multi-head external attention whose heads have memories of their own, instead of sharing one pair."""

    def __init__(self, dim: int, *, num_heads: int = 8, expansion: int = 4, num_slots: int = 64, **kwargs: Any) -> None:
        super().__init__(dim, num_heads=num_heads, expansion=expansion, num_slots=num_slots, **kwargs)
        shape = (num_heads * expansion, num_slots, dim // num_heads)
        std = (2.0 / shape[-1]) ** 0.5
        self.keys, self.values = (nn.Parameter(torch.randn(shape) * std) for _ in range(2))
        self.value_bias = nn.Parameter(torch.zeros(num_heads * expansion, 1, dim // num_heads))
        del self.memory

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x (B, N, dim) to (B, N, dim)."""
        shares = double_normalize(self._heads(x) @ self.keys.mT)
        mixed = shares @ self.values + self.value_bias
        return self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))

    def macs(self, num_tokens: int) -> int:
        """As with shared memories."""
        projections = 2 * num_tokens * self.query.in_features * self.query.out_features
        return projections + 2 * num_tokens * self.keys.numel()


class LinearStart(GatedMLP):
    """gMLP's branch with a gate that starts as a linear layer does, with std 1 / sqrt(n), instead of near identity."""

    def __init__(self, dim: int, num_tokens: int, **kwargs: Any) -> None:
        super().__init__(dim, num_tokens, **kwargs)
        self.gating.init_std = num_tokens**-0.5
        self.gating.reset_parameters()
