"""Doubly normalised attention between tokens without its N x N map."""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tokenmix.ops.attention import attention
from tokenmix.ops.checks import check_chunk_size
from tokenmix.ops.normalize import HALF_TYPES, slot_offset


def double_attention(
    query: Tensor, key: Tensor, value: Tensor, *, chunk_size: int, mask: Tensor | None = None, scale: float = 1.0
) -> Tensor:
    """`attention(normalization="double")` of tokens to each other in memory that does not grow with N^2.

        L_j = logsumexp_i a_ij,   out_i = sum_j softmax_j(a_ij - L_j) v_j,   a = scale Q K^T

    L is taken over `chunk_size` keys at a time, and again in the backward pass. With it as one more feature of the
    keys, against a 1 in the queries, the rest is ordinary attention, for which fused kernels exist.

    Paper: the normalisation is that of Guo et al., arXiv 2012.09688 and 2105.02358.

    Args:
        query: Q, (B, H, N, d).
        key: K, (B, H, N, d).
        value: V, (B, H, N, d_v).
        chunk_size: keys whose N logits are held at a time.
        mask: (B, N) bool, True = the token takes part; the row of any other token is 0.
        scale: of the logits.

    Returns:
        (B, H, N, d_v) in the type of the query; half precision is computed in float32.

    Raises:
        UserError: chunk_size below 1.
    """
    check_chunk_size(chunk_size)
    wide = [x.float() if x.dtype in HALF_TYPES else x for x in (query, key, value)]
    query_, key_, value_ = wide[0] * scale, wide[1], wide[2]
    with torch.autocast(query.device.type, enabled=False):
        offsets = [_offset_again(query_, part, mask) for part in key_.split(chunk_size, dim=2)]
        offset = torch.cat(offsets, -1).unsqueeze(-1)
        ones = torch.ones_like(query_[..., :1])
        out = attention(torch.cat([query_, ones], -1), torch.cat([key_, -offset], -1), value_, mask=mask, scale=1.0)
    return out.to(query.dtype)


def _offset_again(query: Tensor, keys: Tensor, mask: Tensor | None) -> Tensor:
    """`_offset`, computed again in the backward pass; the transforms of torch.func cannot, and keep the logits."""
    if not (torch.is_grad_enabled() and (query.requires_grad or keys.requires_grad)):
        return _offset(query, keys, mask)
    try:
        return checkpoint(_offset, query, keys, mask, use_reentrant=False)  # type: ignore[return-value]
    except RuntimeError as error:
        if torch.compiler.is_compiling() or "saved tensor hooks" not in str(error):
            raise
        return _offset(query, keys, mask)


def _offset(query: Tensor, keys: Tensor, mask: Tensor | None) -> Tensor:
    offset = slot_offset(query @ keys.transpose(-1, -2), mask=mask)
    # Of a sample without any token, whose rows are set to 0 afterwards.
    return offset.masked_fill(offset == -torch.inf, 0.0)
