"""Scaled dot-product attention over tokens, with softmax or double normalisation."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tokenmix.errors import UserError
from tokenmix.ops.checks import check_choice, check_chunk_size, check_flags, check_optional, check_tensors
from tokenmix.ops.normalize import full_precision, slot_offset, widen

AttentionNormalization = Literal["softmax", "double"]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    bias: Tensor | None = None,
    causal: bool = False,
    normalization: AttentionNormalization = "softmax",
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention of N queries to S keys.

        out = Norm(scale * Q K^T + bias) V

    `"softmax"` runs in PyTorch's fused kernels, which never write the N x S map. They have first derivatives in reverse
    mode only: forward mode materializes the map, and second derivatives (`create_graph=True`) need PyTorch's math
    backend, `with torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`. `"double"` is a softmax over the queries, then L1
    over the keys; it materializes the map.

    Args:
        query: Q, (B, H, N, d).
        key: K, (B, H, S, d).
        value: V, (B, H, S, d_v).
        mask: (B, N) bool, True = the token takes part; other rows are 0. Masked tokens must hold finite numbers.
        key_mask: (B, S) bool (default: `mask`). Needed only if the keys are not the tokens.
        bias: added to the scores, broadcasting to (B, H, N, S).
        causal: token i sees tokens 0 to i only; needs as many keys as queries.
        normalization: `"softmax"` over the keys, or `"double"`.
        scale: factor on the scores (default 1/sqrt(d)).
        dropout: rate on the attention map, in training and evaluation alike.

    Returns:
        (B, H, N, d_v). A row without any key is 0.

    Reference: Vaswani et al., arXiv 1706.03762, equation 1; for `"double"`, Guo et al., arXiv 2105.02358, equation 6,
    with keys in place of memory slots.
    """
    check_tensors(query=query, key=key, value=value)
    check_optional(mask=mask, key_mask=key_mask, bias=bias)
    _check_steps(query, key, causal)
    given = query, key, value, mask, key_mask, bias, causal, scale, dropout
    out = None if normalization != "softmax" else _fused(*given)
    return reference(*given, normalization) if out is None else _zero_rows(out, mask, key_mask, causal)


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    bias: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
    normalization: AttentionNormalization = "softmax",
) -> Tensor:
    """out = Norm(scale * Q K^T + bias) V with a materialized map; tests compare the fused kernels with it."""
    weights = attention_probabilities(
        query, key, mask=mask, key_mask=key_mask, bias=bias, causal=causal, normalization=normalization, scale=scale
    )
    out = (F.dropout(weights, dropout) if dropout else weights) @ value
    return _zero_rows(out, mask, key_mask, causal)


def attention_probabilities(
    query: Tensor,
    key: Tensor,
    *,
    mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    bias: Tensor | None = None,
    causal: bool = False,
    normalization: AttentionNormalization = "softmax",
    scale: float | None = None,
) -> Tensor:
    """The map (B, H, N, S) of `attention`, in the query's dtype; rows sum to 1, rows of masked tokens are 0."""
    check_tensors(query=query, key=key)
    check_optional(mask=mask, key_mask=key_mask, bias=bias)
    check_attention_options(normalization, causal)
    _check_steps(query, key, causal)
    with full_precision(query):
        logits = (widen(query) * _scale(query, scale)) @ widen(key).transpose(-1, -2)
    if bias is not None:
        logits = logits + bias
    if normalization == "double":
        tokens = None if mask is None else _never_empty(mask)
        logits = logits - slot_offset(logits, mask=tokens).unsqueeze(-2)
    allowed = _allowed(mask, key_mask, causal, query)
    if allowed is not None:
        logits = logits.masked_fill(~allowed, -torch.inf)
    return _zero_rows(logits.softmax(-1).to(query.dtype), mask, key_mask, causal)


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    key_mask: Tensor | None,
    bias: Tensor | None,
    causal: bool,
    scale: float | None,
    dropout: float,
) -> Tensor | None:
    """`attention` with PyTorch's kernels; None if they cannot compute it (forward mode, a bias under vmap)."""
    width, scale = value.shape[-1], _scale(query, scale)
    only_causal = causal and mask is None and key_mask is None and bias is None
    allowed = None if only_causal else _allowed(mask, key_mask, causal, query)
    if bias is not None:
        allowed = bias if allowed is None else bias.masked_fill(~allowed, -torch.inf)
        allowed = allowed.to(query.dtype)
    # The kernels need values as wide as the queries and, on CUDA, a multiple of 8. Otherwise the call materializes the
    # map: at N 2048, 4 heads, widths 66 and 64, 205 MB instead of 12.6 MB.
    wide = max(query.shape[-1], width) if fused_kernels_enabled() else 0
    wide = -(-wide // 8) * 8 if query.is_cuda else wide
    query, key, value = (_padded(x, wide) for x in (query, key, value))
    try:
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=allowed, dropout_p=dropout, is_causal=only_causal, scale=scale
        )
    except RuntimeError as error:
        # Under vmap, kernel selection does not see that a bias needs gradients.
        if isinstance(error, NotImplementedError) or "with respect to argument 'attn_mask'" in str(error):
            return None
        raise
    if bias is not None and torch.compiler.is_exporting():
        # With a bias, the layout differs between the passes of the ONNX decomposition; the copy fixes the layout.
        out = out.clone(memory_format=torch.contiguous_format)
    return out[..., :width]


def check_attention_options(normalization: str, causal: bool) -> None:
    """Raise `UserError` for an unknown normalisation, or for causal double normalisation."""
    check_choice("normalization", normalization, ("softmax", "double"))
    check_flags(causal=causal)
    if normalization == "double" and causal:
        raise UserError(
            "double normalisation cannot be causal: its first softmax runs over all tokens; use "
            "normalization='softmax' or causal=False"
        )


def _check_steps(query: Tensor, key: Tensor, causal: bool) -> None:
    if causal and query.shape[-2] != key.shape[-2]:
        raise UserError(
            f"causal attention has a key for each query, got {key.shape[-2]} keys and {query.shape[-2]} queries; use "
            "causal=False"
        )


def _scale(query: Tensor, scale: float | None) -> float:
    return query.shape[-1] ** -0.5 if scale is None else scale


def _never_empty(mask: Tensor) -> Tensor:
    """The mask, with all positions allowed in samples without any; a softmax over an empty set is NaN."""
    return mask | ~mask.any(-1, keepdim=True)


def _allowed(mask: Tensor | None, key_mask: Tensor | None, causal: bool, query: Tensor) -> Tensor | None:
    """Allowed keys, broadcasting to (B, H, N, S), or None; empty rows are opened here and zeroed in the output."""
    keys = mask if key_mask is None else key_mask
    if not causal:
        return None if keys is None else _never_empty(keys)[:, None, None, :]
    step = torch.arange(query.shape[-2], device=query.device)
    past = step[:, None] >= step
    if keys is None:
        return past
    # With a mask alone, only rows of masked tokens can be empty.
    opened = step[:, None] == step if key_mask is None else ~_some_key(key_mask, causal)[:, None, :, None]
    return past & keys[:, None, None, :] | opened


def _some_key(key_mask: Tensor, causal: bool) -> Tensor:
    """Whether a query has a key: (B, 1), or (B, N) if causal."""
    return key_mask.cumsum(-1) > 0 if causal else key_mask.any(-1, keepdim=True)


def _zero_rows(x: Tensor, mask: Tensor | None, key_mask: Tensor | None, causal: bool) -> Tensor:
    """Zero the rows of x (B, H, N, ...) of tokens that are masked or have no key."""
    rows = mask
    if key_mask is not None:
        some_key = _some_key(key_mask, causal)
        rows = some_key if mask is None else mask & some_key
    return x if rows is None else x.masked_fill(~rows[:, None, :, None], 0.0)


def _padded(x: Tensor, width: int) -> Tensor:
    """Zero-pad x to a head width and make the features contiguous, as the fused kernels require."""
    wide = F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x
    return wide if wide.stride(-1) == 1 else wide.contiguous()


def fused_kernels_enabled() -> bool:
    """Whether PyTorch may use fused attention kernels."""
    # The same switches apply to CPU and CUDA. The compiler cannot trace them, and padding never changes a result.
    # Marking the function as constant would import the compiler and double the import time of a layer.
    if torch.compiler.is_compiling():
        return True
    return torch.backends.cuda.flash_sdp_enabled() or torch.backends.cuda.mem_efficient_sdp_enabled()


def double_attention(
    query: Tensor, key: Tensor, value: Tensor, *, chunk_size: int, mask: Tensor | None = None
) -> Tensor:
    """`attention(normalization="double")` of tokens to each other, without O(N^2) memory.

        L_j = logsumexp_i a_ij,   out_i = sum_j softmax_j(a_ij - L_j) v_j,   a = Q K^T

    L is computed for `chunk_size` keys at a time, and again in the backward pass. L becomes one more feature of the
    keys, with a 1 in the queries. The rest is ordinary attention in fused kernels. Half precision is computed in
    float32.

    Shape: Q and K (B, H, N, d), V (B, H, N, d_v), mask (B, N) bool, True = the token takes part, other rows are 0; to
    (B, H, N, d_v) in the dtype of the query.

    Reference: Guo et al., arXiv 2012.09688 and 2105.02358, for the normalisation.
    """
    check_chunk_size(chunk_size)
    query_, key_, value_ = (widen(x) for x in (query, key, value))
    with full_precision(query):
        offsets = [_offset_again(query_, part, mask) for part in key_.split(chunk_size, dim=2)]
        offset = torch.cat(offsets, -1).unsqueeze(-1)
        ones = torch.ones_like(query_[..., :1])
        out = attention(torch.cat([query_, ones], -1), torch.cat([key_, -offset], -1), value_, mask=mask, scale=1.0)
    return out.to(query.dtype)


def _offset_again(query: Tensor, keys: Tensor, mask: Tensor | None) -> Tensor:
    """L of some keys, recomputed in the backward pass. The transforms of torch.func keep the logits instead."""

    def offset(query: Tensor, keys: Tensor, mask: Tensor | None) -> Tensor:
        found = slot_offset(query @ keys.transpose(-1, -2), mask=mask)
        # Samples without any token; their rows are zeroed later.
        return found.masked_fill(found == -torch.inf, 0.0)

    if not (torch.is_grad_enabled() and (query.requires_grad or keys.requires_grad)):
        return offset(query, keys, mask)
    try:
        return checkpoint(offset, query, keys, mask, use_reentrant=False)  # type: ignore[return-value]
    except RuntimeError as error:
        if torch.compiler.is_compiling() or "saved tensor hooks" not in str(error):
            raise
        return offset(query, keys, mask)
