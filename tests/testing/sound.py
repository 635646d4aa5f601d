"""Two layers without a bug, every step written out so that one of them can be broken."""

from typing import Any

import torch
from torch import Tensor, nn

from tokenmix.layers.base import Capabilities, Mixer, zero_masked


class Sound(Mixer):
    """Multi-head self-attention with all that the contract asks for."""

    capabilities = Capabilities(causal=True, map="tokens")

    def __init__(
        self,
        dim: int,
        *,
        num_heads: int = 4,
        causal: bool = False,
        qkv_bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.num_heads, self.causal = dim, num_heads, causal
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias, device=device, dtype=dtype)
        self.out = nn.Linear(dim, dim, device=device, dtype=dtype)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x, mask = self.checked(x, mask)
        query, key, value = self.split(x)
        mixed = self.weigh(self.logits(query, key), mask) @ value
        return zero_masked(self.out(mixed.transpose(1, 2).flatten(2)), mask)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return query, key, value

    def logits(self, query: Tensor, key: Tensor) -> Tensor:
        scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
        return self.triangle(scores) if self.causal else scores

    def triangle(self, scores: Tensor) -> Tensor:
        return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        if mask is None:
            return self.normalize(scores)
        # Safe for a row without any token: fill with a finite number, set to 0 afterwards.
        pairs = mask[:, None, :, None] & mask[:, None, None, :]
        lowest = torch.finfo(scores.dtype).min
        return self.normalize(scores.masked_fill(~pairs, lowest)).masked_fill(~pairs, 0.0)

    def normalize(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1)

    def attention_map(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x, mask = self.checked(x, mask)
        query, key, _ = self.split(x)
        return self.weigh(self.logits(query, key), mask)

    def macs(self, num_tokens: int) -> int:
        return 4 * num_tokens * self.dim**2 + 2 * num_tokens**2 * self.dim


class SoundMemory(nn.Module):
    """External attention as a stranger would write it, without `capabilities`; correct."""

    def __init__(self, d_model: int, num_slots: int = 12) -> None:
        super().__init__()
        self.keys = nn.Linear(d_model, num_slots, bias=False)
        self.values = nn.Linear(num_slots, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.values(self.attention_map(x))

    def attention_map(self, x: Tensor) -> Tensor:
        logits = self.keys(x)
        return (logits.float() - logits.float().logsumexp(-2, keepdim=True)).softmax(-1).to(x.dtype)


class SoundWithoutMap(Sound):
    """The same, stating that it shows no map."""

    capabilities = Capabilities(causal=True, map=None)
    attention_map = Mixer.attention_map
