"""Self-attention without projections."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from tokenmix.layers.base import Capabilities, Device, Mixer, finish
from tokenmix.ops.attention import attention, attention_probabilities
from tokenmix.ops.checks import check_flags, check_numbers, check_rates, check_whole


class SimplifiedSelfAttention(Mixer):
    """Self-attention in which the features are query, key and value at once.

        out = softmax(scale * F F^T) F

    As printed it has no parameters, no heads and no scale. After a LayerNorm the diagonal of F F^T is D and the rest
    about sqrt(D), so for wide tokens the printed form is the identity, and from D = 128 on it still is with 1/sqrt(D);
    a scale near 1/D flattens the map.

    Paper: Guo et al., Beyond Self-attention: External Attention using Two Linear Layers, arXiv 2105.02358, equations 3
    and 4, the step between self-attention and external attention.

    Args:
        dim: width D.
        scale: of the scores; the paper has 1.
        output_projection: a linear layer on the output, which the paper does not have.
        dropout: on the output.
        attention_dropout: on the map.

    Shape:
        x (B, N, D) to (B, N, D); `attention_map` (B, 1, N, N).

    Cost: 2 N^2 D multiply-adds, and N D^2 with the output projection.
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
        """Mix the tokens of x. `mask` is (B, N) bool, True = the token takes part."""
        x, mask = self.checked(x, mask)
        features = x.unsqueeze(1)
        dropout = self.attention_dropout if self.training else 0.0
        out = attention(features, features, features, mask=mask, scale=self.scale, dropout=dropout)
        return finish(self.dropout(self.proj(out.squeeze(1))), mask)

    def attention_map(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The map (B, 1, N, N): rows are queries and sum to 1, those of masked tokens are 0."""
        x, mask = self.checked(x, mask)
        features = x.unsqueeze(1)
        return attention_probabilities(features, features, mask=mask, scale=self.scale)

    def macs(self, num_tokens: int) -> int:
        """2 N^2 D, and N D^2 for the output projection."""
        check_whole(num_tokens=num_tokens)
        projection = num_tokens * self.dim**2 if isinstance(self.proj, nn.Linear) else 0
        return 2 * num_tokens**2 * self.dim + projection
