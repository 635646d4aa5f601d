"""External attention, the equation itself: what a reader compares with the paper, and every backend is tested against.

A   = Norm(F M_k^T + b_k)          (N x S)
out = A M_v + b_v                  (N x d_v)
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tokenmix.ops.normalize import broadcast_mask, double_normalize

Normalization = Literal["double", "softmax", "sigmoid", "l2", "entmax15"]


class Factors(NamedTuple):
    """The tensors of `external_attention`, the mask one that broadcasts against (..., N)."""

    query: Tensor
    key_memory: Tensor
    value_memory: Tensor
    key_bias: Tensor | None = None
    value_bias: Tensor | None = None
    mask: Tensor | None = None


def reference(factors: Factors, normalization: Normalization = "double", num_steps: int = 1) -> Tensor:
    """The equation with its map materialized, in any dtype; arguments are those of `external_attention`."""
    query, _, value_memory, _, value_bias, mask = factors
    out = F.linear(reference_map(factors, normalization, num_steps), value_memory.t(), value_bias)
    return out if mask is None else out.masked_fill(~broadcast_mask(mask, query).unsqueeze(-1), 0.0)


def reference_map(factors: Factors, normalization: Normalization = "double", num_steps: int = 1) -> Tensor:
    """A (..., N, S): double normalisation over tokens and slots, a form of it, or a softmax over the slots only."""
    query, key_memory, _, key_bias, _, mask = factors
    if normalization == "l2":
        query, key_memory = cosine(query, key_memory)
    logits = F.linear(query, key_memory, key_bias)
    if normalization == "sigmoid":
        logits = F.logsigmoid(logits)
    if normalization != "softmax":
        return double_normalize(logits, mask=mask, num_steps=num_steps, sparse=normalization == "entmax15")
    wide = torch.promote_types(logits.dtype, torch.float32)
    attention = torch.softmax(logits, dim=-1, dtype=wide).to(logits.dtype)
    return attention if mask is None else attention.masked_fill(~broadcast_mask(mask, logits).unsqueeze(-1), 0.0)


def cosine(query: Tensor, key_memory: Tensor) -> tuple[Tensor, Tensor]:
    """Query and memory whose products are sqrt(d) times the cosine of the angle between them."""
    width = query.shape[-1]
    return F.rms_norm(query, (width,), eps=1e-6), F.rms_norm(key_memory, (width,), eps=1e-6) / width**0.5
