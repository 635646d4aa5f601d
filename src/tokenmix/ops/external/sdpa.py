"""External attention through PyTorch's own attention, over S keys with a bias that is the slots' offset."""

import torch
from torch import Tensor
from torch.nn import functional as F

from tokenmix.ops.attention import attention
from tokenmix.ops.normalize import slot_offset


def external_by_sdpa(
    query: Tensor,
    key_memory: Tensor,
    value_memory: Tensor,
    key_bias: Tensor | None,
    value_bias: Tensor | None,
    mask: Tensor | None,
    *,
    double: bool,
) -> Tensor:
    """External attention as attention over the slots.

        out = SDPA(F, M_k, M_v, bias = b_k - L, scale = 1) + b_v

    L is made from logits that are written once; the map after it stays inside the kernel that PyTorch picks, forward.
    For comparison with `tokenmix.kernels`.

    Args:
        query: (B, H, N, d), or other leading axes.
        key_memory: (S, d).
        value_memory: (S, d_v).
        key_bias: (S,) or None.
        value_bias: (d_v,) or None.
        mask: bool, broadcastable to (..., N), True = the token takes part; the others are 0 in the output.
        double: whether the slots are offset by L.
    """
    shift = query.new_zeros(key_memory.shape[0]) if key_bias is None else key_bias
    if double:
        offset = slot_offset(F.linear(query, key_memory, key_bias), mask=mask)
        offset = offset.masked_fill(offset == -torch.inf, 0.0)
        # A softmax does not see what all slots have in common, and half precision rounds a small number less.
        shift = (shift - (offset - offset.mean(-1, keepdim=True))).unsqueeze(-2).to(query.dtype)
    keys, values = (m.expand(*query.shape[:-2], *m.shape) for m in (key_memory, value_memory))
    bias = shift.expand(*query.shape[:-1], key_memory.shape[0])
    out = attention(query, keys, values, bias=bias, scale=1.0)
    if value_bias is not None:
        out = out + value_bias
    if mask is not None:
        return out.masked_fill(~mask.unsqueeze(-1), 0.0)
    return out.clone() if out.dim() == 3 else out  # without an axis of heads PyTorch's attention returns a view
