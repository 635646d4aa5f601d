"""Multi-head self-attention, the baseline, and a form without weights."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenmix.layers.base import Capabilities, Device, Factory, Mixer, masked_output
from tokenmix.ops.attention import AttentionNormalization, attention, attention_probabilities, check_attention_options
from tokenmix.ops.checks import check_flags, check_heads, check_numbers, check_rates, check_whole
from tokenmix.ops.less import Scores


class SelfAttention(Mixer):
    """Multi-head self-attention.

        out = concat_h [ Norm(Q_h K_h^T / sqrt(d)) V_h ] W_o,   Q, K, V = X W_qkv

    Softmax runs in PyTorch's fused kernels. `normalization="double"` (softmax over the queries, then L1 over the keys)
    materializes the N x N map.

    Args:
        dim: width D.
        num_heads: heads H; must divide dim.
        normalization: `"softmax"` over the keys, or `"double"`.
        causal: token i sees tokens 0 to i only.
        qkv_bias: give q, k and v a bias.
        dropout: rate on the output.
        attention_dropout: rate on the attention map.

    Shape: x (B, N, D) to (B, N, D); `attention_map` (B, H, N, N).

    Cost: 4 N D^2 + 2 N^2 D multiply-adds.

    Reference: Vaswani et al., Attention Is All You Need, arXiv 1706.03762. Double normalisation of this map: Guo et
    al., arXiv 2105.02358, who report a gain.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(map="tokens", causal=True)

    def __init__(
        self,
        dim: int,
        *,
        num_heads: int = 8,
        normalization: AttentionNormalization = "softmax",
        causal: bool = False,
        qkv_bias: bool = True,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory: Factory = {"device": device, "dtype": dtype}
        self.dim, self.num_heads, self.head_dim = dim, num_heads, check_heads(dim, num_heads)
        check_attention_options(normalization, causal)
        check_flags(qkv_bias=qkv_bias)
        check_rates(dropout=dropout, attention_dropout=attention_dropout)
        self.normalization: AttentionNormalization = normalization
        self.causal, self.attention_dropout = causal, attention_dropout
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias, **factory)
        self.proj = nn.Linear(dim, dim, **factory)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self._attend(x, mask, None)[0]

    def mix(
        self,
        x: Tensor,
        carry: Scores | None = None,
        mask: Tensor | None = None,
        *,
        residual: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> tuple[Tensor, Scores | None]:
        """`forward` in a stack; also returns the pre-softmax scores in factors.

        Args:
            x: (B, N, D).
            carry: scores of the previous layer, replaced by this layer's own scores. A causal layer returns `carry`
                unchanged: the factors do not contain its mask, so later less-attention would leak the future.
            mask: (B, N) bool, True = the token takes part.
            residual: (B, H, N, N) added to the scores, from `AttentionResidual`.
            weights: the map (B, H, N, N) of `mix_map` with the same arguments, so that gradients reach the map. It
                replaces the layer's own map.
        """
        out, query, key = self._attend(x, mask, residual, weights)
        return out, carry if self.causal else Scores(query * self.head_dim**-0.5, key, residual)

    def _attend(
        self, x: Tensor, mask: Tensor | None, residual: Tensor | None, weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Output, query and key."""
        query, key, value = self._heads(x, mask)
        dropout = self.attention_dropout if self.training else 0.0
        if weights is not None:
            out = F.dropout(weights, dropout) @ value
        else:
            out = attention(
                query,
                key,
                value,
                mask=mask,
                bias=residual,
                causal=self.causal,
                normalization=self.normalization,
                dropout=dropout,
            )
        return masked_output(self.dropout(self.proj(out.transpose(1, 2).flatten(2))), mask), query, key

    def attention_map(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.mix_map(x, None, mask)

    def mix_map(
        self, x: Tensor, carry: Scores | None = None, mask: Tensor | None = None, *, residual: Tensor | None = None
    ) -> Tensor:
        query, key, _ = self._heads(x, mask)
        return attention_probabilities(
            query, key, mask=mask, bias=residual, causal=self.causal, normalization=self.normalization
        )

    def macs(self, num_tokens: int) -> int:
        check_whole(num_tokens=num_tokens)
        return 4 * num_tokens * self.dim**2 + 2 * num_tokens**2 * self.dim

    def _heads(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, each (B, H, N, d)."""
        x, mask = self.checked(x, mask)
        # With chunks, the gradients of three adjacent views are one concatenation instead of a stack and a copy.
        parts = (part.unflatten(2, (self.num_heads, self.head_dim)) for part in self.qkv(x).chunk(3, dim=2))
        query, key, value = (part.transpose(1, 2) for part in parts)
        return query, key, value


class SimplifiedSelfAttention(Mixer):
    """Self-attention with the features as query, key and value.

        out = softmax(scale * F F^T) F

    The printed form has no parameters, no heads and no scale. After a LayerNorm, the diagonal of F F^T is D and the
    other entries are about sqrt(D). For wide tokens the printed form is therefore the identity, and from D = 128 on
    also with 1/sqrt(D). A scale near 1/D flattens the map.

    Args:
        dim, dropout, attention_dropout: as in `SelfAttention`.
        scale: factor on the scores; 1 in the paper.
        output_projection: add a linear layer on the output, which the paper does not have.

    Shape: x (B, N, D) to (B, N, D); `attention_map` (B, 1, N, N).

    Cost: 2 N^2 D multiply-adds, and N D^2 with the output projection.

    Reference: Guo et al., Beyond Self-attention, arXiv 2105.02358, equations 3 and 4, the step between self-attention
    and external attention.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(map="tokens")

    def __init__(
        self,
        dim: int,
        *,
        scale: float = 1.0,
        output_projection: bool = False,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_whole(dim=dim)
        check_numbers(scale=scale)
        check_flags(output_projection=output_projection)
        check_rates(dropout=dropout, attention_dropout=attention_dropout)
        self.dim, self.scale, self.attention_dropout = dim, scale, attention_dropout
        self.proj = nn.Linear(dim, dim, device=device, dtype=dtype) if output_projection else nn.Identity()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x, mask = self.checked(x, mask)
        features = x.unsqueeze(1)
        dropout = self.attention_dropout if self.training else 0.0
        out = attention(features, features, features, mask=mask, scale=self.scale, dropout=dropout)
        return masked_output(self.dropout(self.proj(out.squeeze(1))), mask)

    def attention_map(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x, mask = self.checked(x, mask)
        features = x.unsqueeze(1)
        return attention_probabilities(features, features, mask=mask, scale=self.scale)

    def macs(self, num_tokens: int) -> int:
        check_whole(num_tokens=num_tokens)
        projection = num_tokens * self.dim**2 if isinstance(self.proj, nn.Linear) else 0
        return 2 * num_tokens**2 * self.dim + projection
