"""Tiny attention: the one narrow head that aMLP adds to its gate."""

import torch
from torch import Tensor, nn

from tokenmix.layers.base import Capabilities, Device, Factory, Mixer, finish
from tokenmix.ops.attention import attention, attention_probabilities
from tokenmix.ops.checks import check_flags, check_whole


class TinyAttention(Mixer):
    """Single-head self-attention of small width.

        Q, K, V = split(W_qkv x),    out = W_o softmax(Q K^T / sqrt(d)) V

    Paper:
        Liu et al., Pay Attention to MLPs (arXiv 2105.08050), section 4.3 (aMLP).

    Args:
        dim: width D of the tokens.
        out_dim: width of the output; D if not given. In aMLP it is half of the hidden width.
        attention_dim: width d of the head: 64 in aMLP-base, 128 in aMLP-large.
        causal: token i sees tokens up to i.

    Shape:
        (B, N, D) to (B, N, out_dim).
    """

    capabilities = Capabilities(causal=True, map="tokens")

    def __init__(
        self,
        dim: int,
        *,
        out_dim: int | None = None,
        attention_dim: int = 64,
        causal: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        out_dim = dim if out_dim is None else out_dim
        check_whole(dim=dim, out_dim=out_dim, attention_dim=attention_dim)
        check_flags(causal=causal)
        factory: Factory = {"device": device, "dtype": dtype}
        self.dim, self.out_dim, self.attention_dim, self.causal = dim, out_dim, attention_dim, causal
        self.qkv = nn.Linear(dim, 3 * attention_dim, **factory)
        self.proj = nn.Linear(attention_dim, out_dim, **factory)

    # Without a `*`: the ONNX exporter of traced graphs gives every argument of a forward method by place.
    def forward(self, x: Tensor, mask: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        """Attend over the tokens of x (B, N, D); `weights` (B, 1, N, N) replaces the layer's own map."""
        x, mask = self.checked(x, mask)
        query, key, value = self.qkv(x).unsqueeze(1).chunk(3, dim=-1)
        if weights is None:
            mixed = attention(query, key, value, mask=mask, causal=self.causal)
        else:
            mixed = weights @ value
        return finish(self.proj(mixed.squeeze(1)), None if self.inside else mask)

    def attention_map(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B, 1, N, N): what token i took from token j."""
        x, mask = self.checked(x, mask)
        query, key, _ = self.qkv(x).unsqueeze(1).chunk(3, dim=-1)
        return attention_probabilities(query, key, mask=mask, causal=self.causal)

    def macs(self, num_tokens: int) -> int:
        """3 N D d + 2 N^2 d + N d out_dim."""
        check_whole(num_tokens=num_tokens)
        projections = num_tokens * self.attention_dim * (3 * self.dim + self.out_dim)
        return projections + 2 * num_tokens**2 * self.attention_dim
