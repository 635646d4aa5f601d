"""Attention linear in the number of tokens: ReLU features, and bases fitted by expectation-maximisation."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenmix.layers.base import Capabilities, Device, Mixer, masked_output
from tokenmix.ops.checks import check_flags, check_heads, check_numbers, check_rates, check_whole
from tokenmix.ops.normalize import full_precision, widen

EPSILON = 1e-15


class LinearAttention(Mixer):
    """Attention with the kernel relu(q) relu(k)^T, linear in the number of tokens.

        out_i = sum_j relu(q_i) . relu(k_j) v_j / (sum_j relu(q_i) . relu(k_j) + eps)
              = relu(q_i) (relu(K)^T V) / (relu(q_i) . relu(K)^T 1 + eps)

    The second form needs one d x d matrix per head for any N. Half-precision inputs are summed in float32.

    Args:
        dim, num_heads, qkv_bias, dropout: as in `SelfAttention`.

    Shape: x (B, N, D) to (B, N, D); `attention_map` (B, H, N, N), not computed by `forward`.

    Cost: 4 N D^2 + 2 N D (d + 1) multiply-adds with heads of width d.

    Reference: Katharopoulos et al., Transformers are RNNs, arXiv 2006.16236; ReLU kernel without a local window: Xie et
    al., Sana, arXiv 2410.10629.
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
        x, mask = self.checked(x, mask)
        query, key, value = self._features(x, mask)
        with full_precision(x):
            summary = widen(key).transpose(-2, -1) @ F.pad(widen(value), (0, 1), value=1.0)  # (B, H, d, d + 1)
            sums = widen(query) @ summary
        mixed = (sums[..., :-1] / (sums[..., -1:] + EPSILON)).to(value.dtype)
        return masked_output(self.dropout(self.proj(mixed.transpose(1, 2).flatten(2))), mask)

    def attention_map(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The attention weights (B, H, N, N) equivalent to the sums; a row without a positive product is 0."""
        x, mask = self.checked(x, mask)
        query, key, _ = self._features(x, mask)
        with full_precision(x):
            weights = widen(query) @ widen(key).transpose(-2, -1)
        weights = (weights / (weights.sum(-1, keepdim=True) + EPSILON)).to(query.dtype)
        return weights if mask is None else weights.masked_fill(~mask[:, None, :, None], 0.0)

    def _features(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """relu(q), relu(k) and v, each (B, H, N, d); masked keys are 0."""
        query, key, value = (
            part.unflatten(2, (self.num_heads, self.head_dim)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=2)
        )
        key = F.relu(key)
        return F.relu(query), key if mask is None else key.masked_fill(~mask[:, None, :, None], 0.0), value

    def macs(self, num_tokens: int) -> int:
        check_whole(num_tokens=num_tokens)
        summary = num_tokens * self.dim * (2 * self.head_dim + 2)
        return 4 * num_tokens * self.dim**2 + summary


class EMAttention(Mixer):
    """Attention over S bases that are fitted to each sample by expectation-maximisation.

        E step: Z  = softmax_s (F mu^T / tau)                          (N x S)
        M step: mu = l2(sum_i Z_is F_i / sum_i Z_is)                   (S x d)
        out        = Z mu                                              after T steps of both

    The bases start from learned values and adapt to the tokens of each sample; external attention uses the same memory
    for every sample. Cost is linear in N. Each head has its own bases; the paper has one head. The paper updates the
    initial bases by a moving average, without gradients through the steps. Here the bases are parameters, and gradients
    pass through the steps.

    Args:
        dim, num_heads, dropout: as in `SelfAttention`.
        num_slots: S, bases per head.
        num_steps: T, expectation-maximisation steps.
        temperature: tau; 1 in the paper.

    Shape: x (B, N, D) to (B, N, D); `attention_map` Z (B, H, N, S).

    Cost: 2 N D^2 + (2 T + 1) N S D multiply-adds.

    Reference: Li et al., Expectation-Maximization Attention Networks, arXiv 1907.13426.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(linear=True, map="slots")

    def __init__(
        self,
        dim: int,
        *,
        num_heads: int = 8,
        num_slots: int = 64,
        num_steps: int = 3,
        temperature: float = 1.0,
        dropout: float = 0.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_whole(num_slots=num_slots, num_steps=num_steps)
        check_numbers(1e-6, temperature=temperature)
        check_rates(dropout=dropout)
        self.dim, self.num_heads, self.head_dim = dim, num_heads, check_heads(dim, num_heads)
        self.num_slots, self.num_steps, self.temperature = num_slots, num_steps, temperature
        self.query = nn.Linear(dim, dim, device=device, dtype=dtype)
        self.bases = nn.Parameter(torch.empty(num_heads, num_slots, self.head_dim, device=device, dtype=dtype))
        self.proj = nn.Linear(dim, dim, device=device, dtype=dtype)
        self.dropout = nn.Dropout(dropout)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the initial bases: random unit vectors, as in the paper."""
        self.bases.normal_()
        self.bases.copy_(F.normalize(self.bases, dim=-1))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x, mask = self.checked(x, mask)
        weights, bases = self._fit(x, mask)
        return masked_output(self.dropout(self.proj((weights @ bases).transpose(1, 2).flatten(2))), mask)

    def attention_map(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Z (B, H, N, S) of the last step; rows sum to 1, rows of masked tokens are 0."""
        x, mask = self.checked(x, mask)
        return self._fit(x, mask)[0]

    def _fit(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Z (B, H, N, S) and mu (B, H, S, d) after all steps."""
        features = self.query(x).unflatten(2, (self.num_heads, self.head_dim)).transpose(1, 2)
        scaled = features / self.temperature
        bases = self.bases.to(features.dtype)  # (H, S, d) for all samples, (B, H, S, d) after the first step
        weights = features.new_zeros(())
        for _ in range(self.num_steps):
            logits = scaled @ bases.transpose(-2, -1)
            weights = widen(logits).softmax(-1).to(features.dtype)
            if mask is not None:
                weights = weights.masked_fill(~mask[:, None, :, None], 0.0)
            with full_precision(x):  # A sum over many tokens exceeds the range of float16.
                sums = widen(weights).transpose(-2, -1) @ widen(features)
            # The normalised sum equals the normalised mean. The norm of F.normalize has no second derivative at 0.
            bases = (sums * sums.square().sum(-1, keepdim=True).clamp_min(1e-12).rsqrt()).to(features.dtype)
        return weights, bases

    def macs(self, num_tokens: int) -> int:
        check_whole(num_tokens=num_tokens)
        return num_tokens * self.dim * (2 * self.dim + (2 * self.num_steps + 1) * self.num_slots)
