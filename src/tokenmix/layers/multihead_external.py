"""Multi-head external attention: EAMLP's token mixer."""

import torch
from torch import Tensor, nn

from tokenmix.layers.base import Capabilities, Device, Mixer, finish
from tokenmix.layers.external import Memory, Tie
from tokenmix.ops.checks import check_flags, check_heads, check_rates, check_whole
from tokenmix.ops.external.api import Backend, Normalization


class MultiHeadExternalAttention(Mixer):
    """External attention with many heads that share both memories.

        F_h = (X W_q + b_q)_h                             D -> e D, cut into e H heads of width d = D / H
        out = concat_h (Norm(F_h M_k^T + b_k) M_v + b_v) W_o + b_o

    Paper: Guo et al., arXiv 2105.02358, Algorithm 2, with the expansion e = 4 and the biases of the released EAMLP
    code; the paper has neither (`expansion=1, memory_bias=False` is the printed algorithm). Its epsilon is gone.

    Cost: 2 e D^2 + 2 e D S multiply-adds per token, 8 D^2 + 512 D as published, against 4 D^2 + 2 N D of multi-head
    self-attention. So it is cheaper only above N = 2 D + 256 tokens, and at 224 px with patch 16 it costs nearly twice
    as much. The map has e H N S entries.

    Shapes: x (B, N, dim), mask (B, N) bool; map (B, expansion * num_heads, N, num_slots). Any N.

    Args:
        dim: width D.
        num_heads: H, the heads before expansion; the width of every head is dim / num_heads (64 as published).
        expansion: e, how many times wider and with how many times more heads the inside is.
        memory_bias: the memories have biases b_k (S,) and b_v (d,). Under double normalisation b_k cancels exactly.
        dropout: of the output.
        attention_dropout: of the map; not together with chunk_size.
        num_slots, tie, normalization, num_steps, chunk_size, backend: as in `ExternalAttention`.

    Raises:
        UserError: num_heads does not divide dim, an unknown option, or input that does not fit. There is no causal
            form, see `ExternalAttention`.
    """

    capabilities = Capabilities(linear=True, map="slots")

    def __init__(
        self,
        dim: int,
        *,
        num_heads: int = 8,
        expansion: int = 4,
        memory_bias: bool = True,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        num_slots: int = 64,
        tie: Tie = "none",
        normalization: Normalization = "double",
        num_steps: int = 1,
        chunk_size: int | None = None,
        backend: Backend | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        width = check_heads(dim, num_heads)
        check_whole(expansion=expansion)
        check_flags(memory_bias=memory_bias)
        check_rates(dropout=dropout, attention_dropout=attention_dropout)
        self.dim, self.num_heads, self.expansion, self.attention_dropout = dim, num_heads, expansion, attention_dropout
        self.query = nn.Linear(dim, expansion * dim, device=device, dtype=dtype)
        self.memory = Memory(
            width,
            num_slots=num_slots,
            tie=tie,
            normalization=normalization,
            num_steps=num_steps,
            chunk_size=chunk_size,
            backend=backend,
            bias=memory_bias,
            device=device,
            dtype=dtype,
        )
        self.memory.check_dropout(attention_dropout)
        self.proj = nn.Linear(expansion * dim, dim, device=device, dtype=dtype)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x (B, N, dim) to (B, N, dim)."""
        x, mask = self.checked(x, mask)
        mixed = self.memory(self._heads(x), mask, self.attention_dropout if self.training else 0.0)
        return finish(self.dropout(self.proj(mixed.transpose(1, 2).flatten(2))), mask)

    def attention_map(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """A (B, expansion * num_heads, N, num_slots), before dropout."""
        x, mask = self.checked(x, mask)
        return self.memory.attention_map(self._heads(x), mask)

    def macs(self, num_tokens: int) -> int:
        """N (2 e D^2 + 2 e D S)."""
        check_whole(num_tokens=num_tokens)
        projections = 2 * num_tokens * self.query.in_features * self.query.out_features
        return projections + self.expansion * self.num_heads * self.memory.macs(num_tokens)

    def _heads(self, x: Tensor) -> Tensor:
        """F as (B, e H, N, d)."""
        return self.query(x).unflatten(-1, (self.expansion * self.num_heads, -1)).transpose(1, 2)
