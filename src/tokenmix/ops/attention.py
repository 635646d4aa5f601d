"""Scaled dot-product attention over tokens, with softmax or double normalisation of its N x N map, or without a map."""

from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tokenmix.errors import UserError
from tokenmix.ops.checks import check_choice, check_chunk_size, check_flags
from tokenmix.ops.normalize import HALF_TYPES, slot_offset

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

    With `"softmax"` it runs in PyTorch's fused kernels, which never write the N x S map. They have first derivatives in
    reverse mode only: in forward mode, and for a gradient that is to be differentiated again (`create_graph=True`,
    torch.func's derivatives), the map is materialized. `"double"` is a softmax over the queries and then L1 over the
    keys; it materializes the map.

    Papers: Vaswani et al., arXiv 1706.03762, equation 1; for `"double"`, Guo et al., arXiv 2105.02358, equation 6, with
    keys in place of memory slots.

    Args:
        query: Q, (B, H, N, d).
        key: K, (B, H, S, d).
        value: V, (B, H, S, d_v).
        mask: (B, N) bool, True = the token takes part; the row of any other token is 0. Others must hold finite
            numbers: the layers set them to 0.
        key_mask: (B, S) bool; `mask` if not given. Needed only where the keys are not the tokens themselves.
        bias: added to the scores, broadcasting to (B, H, N, S).
        causal: token i sees tokens 0 to i only.
        normalization: `"softmax"` over the keys, or `"double"`.
        scale: 1/sqrt(d) if not given.
        dropout: probability that an entry of the map is dropped; the caller switches it off for evaluation.

    Returns:
        (B, H, N, d_v). A row without any key is 0.
    """
    given = query, key, value, mask, key_mask, bias, causal, scale
    out = None if normalization != "softmax" else _fused(*given, dropout)
    if out is None:
        return reference(*given, dropout, normalization)
    in_graph = torch.compiler.is_compiling() or torch.jit.is_tracing()
    # With dropout the entries that a kernel dropped are not known.
    if not in_graph and dropout == 0.0 and torch.is_grad_enabled() and out.requires_grad:
        out = _DifferentiableTwice.apply(out, *given)
    return _zero_rows(out, mask, key_mask)


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
    """The equation of `attention` with its map materialized, which the fused kernels are tested against.

    out = Norm(scale * Q K^T + bias) V
    """
    weights = attention_probabilities(
        query, key, mask=mask, key_mask=key_mask, bias=bias, causal=causal, normalization=normalization, scale=scale
    )
    out = (F.dropout(weights, dropout) if dropout else weights) @ value
    return _zero_rows(out, mask, key_mask)


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
    """The attention map (B, H, N, S) that `attention` uses on the same arguments, in the query's dtype.

    Rows of tokens that take no part are 0, all others sum to 1.
    """
    check_attention_options(normalization, causal)
    half = query.dtype in HALF_TYPES
    wide_query, wide_key = (query.float(), key.float()) if half else (query, key)
    logits = (wide_query * _scale(query, scale)) @ wide_key.transpose(-1, -2)
    if bias is not None:
        logits = logits + bias
    if normalization == "double":
        tokens = None if mask is None else _never_empty(mask)
        logits = logits - slot_offset(logits, mask=tokens).unsqueeze(-2)
    allowed = _allowed(mask if key_mask is None else key_mask, causal, query)
    if allowed is not None:
        logits = logits.masked_fill(~allowed, -torch.inf)
    return _zero_rows(logits.softmax(-1).to(query.dtype), mask, key_mask)


Given = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


class _Context(Protocol):
    saved_tensors: Given
    causal: bool
    scale: float | None

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...


class _DifferentiableTwice(torch.autograd.Function):
    """The identity on what a fused kernel gave, whose gradient cannot be differentiated.

    A gradient that autograd records is the reference's, past the kernel; any other continues to the kernel's own.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(out: Tensor, *_: object) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def setup_context(ctx: _Context, inputs: tuple[Tensor, *Given, bool, float | None], output: Tensor) -> None:
        _, *tensors, ctx.causal, ctx.scale = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: _Context, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return grad_outputs[0], *[None] * 8
        query, key, value, mask, key_mask, bias = ctx.saved_tensors

        def written(query: Tensor, key: Tensor, value: Tensor, *bias: Tensor) -> Tensor:
            # In the query's type: under autocast the kernel has cast what it got.
            key, value = key.to(query.dtype), value.to(query.dtype)
            return reference(query, key, value, mask, key_mask, bias[0] if bias else None, ctx.causal, ctx.scale)

        there = (query, key, value) if bias is None else (query, key, value, bias)
        found = torch.func.vjp(written, *there)[1](grad_outputs[0].to(query.dtype))
        return None, *found[:3], None, None, found[3] if bias is not None else None, None, None

    @staticmethod
    def jvp(ctx: _Context, *grad_inputs: Tensor) -> Tensor:
        return grad_inputs[0].view_as(grad_inputs[0])


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
    """`attention` by PyTorch's kernels; None where they have no rule: in forward mode, and for a bias under vmap."""
    width, scale = value.shape[-1], _scale(query, scale)
    key_mask = mask if key_mask is None else key_mask
    only_causal = causal and key_mask is None and bias is None
    allowed = None if only_causal else _allowed(key_mask, causal, query)
    if bias is not None:
        allowed = bias if allowed is None else bias.masked_fill(~allowed, -torch.inf)
        allowed = allowed.to(query.dtype)
    # The kernels take no heads whose value has another width than the query, on CUDA none but multiples of 8: the call
    # then materializes the map, measured at N 2048, 4 heads, 66 against 64, in 205 MB instead of 12.6.
    wide = max(query.shape[-1], width) if fused_kernels_enabled() else 0
    wide = -(-wide // 8) * 8 if query.is_cuda else wide
    query, key, value = (_padded(x, wide) for x in (query, key, value))
    try:
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=allowed, dropout_p=dropout, is_causal=only_causal, scale=scale
        )
    except RuntimeError as error:
        # Under vmap the choice of a kernel does not see that a bias needs gradients.
        if isinstance(error, NotImplementedError) or "with respect to argument 'attn_mask'" in str(error):
            return None
        raise
    if bias is not None and torch.compiler.is_exporting():
        # With a bias the result's layout differs between the passes of a decomposition for ONNX: this settles it.
        out = out.clone(memory_format=torch.contiguous_format)
    return out[..., :width]


def check_attention_options(normalization: str, causal: bool) -> None:
    """Raise `UserError` for an unknown normalisation, or a causal double one."""
    check_choice("normalization", normalization, ("softmax", "double"))
    check_flags(causal=causal)
    if normalization == "double" and causal:
        raise UserError(
            "double normalisation cannot be causal: its first softmax runs over all tokens; use "
            "normalization='softmax' or causal=False"
        )


def _scale(query: Tensor, scale: float | None) -> float:
    return query.shape[-1] ** -0.5 if scale is None else scale


def _never_empty(mask: Tensor) -> Tensor:
    """The mask, with all positions allowed where a sample has none: a softmax over nothing is never asked for."""
    return mask | ~mask.any(-1, keepdim=True)


def _allowed(key_mask: Tensor | None, causal: bool, query: Tensor) -> Tensor | None:
    """Which key each query may see, broadcasting to (B, H, N, S), without an empty row; the rows that should have been
    empty are set to 0 in the result. So no kernel has to be trusted with a fully masked row."""
    if not causal:
        return None if key_mask is None else _never_empty(key_mask)[:, None, None, :]
    step = torch.arange(query.shape[-2], device=query.device)
    past = step[:, None] >= step
    if key_mask is None:
        return past
    return past & key_mask[:, None, None, :] | (step[:, None] == step)


def _zero_rows(x: Tensor, mask: Tensor | None, key_mask: Tensor | None) -> Tensor:
    """x (B, H, N, ...) with 0 in the rows of tokens that take no part or have nothing to look at."""
    rows = mask
    if key_mask is not None:
        some_key = key_mask.any(-1, keepdim=True)
        rows = some_key if mask is None else mask & some_key
    return x if rows is None else x.masked_fill(~rows[:, None, :, None], 0.0)


def _padded(x: Tensor, width: int) -> Tensor:
    """x with zeros up to a head width, each head's features contiguous: else the fused kernels refuse it."""
    wide = F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x
    return wide if wide.stride(-1) == 1 else wide.contiguous()


def fused_kernels_enabled() -> bool:
    """Whether PyTorch may take fused attention kernels."""
    # The same switches govern CPU and CUDA. The compiler cannot trace them, and padding never changes a result; to mark
    # this as a constant for it would import the compiler, which doubles the time that importing a layer takes.
    if torch.compiler.is_compiling():
        return True
    return torch.backends.cuda.flash_sdp_enabled() or torch.backends.cuda.mem_efficient_sdp_enabled()


def double_attention(
    query: Tensor, key: Tensor, value: Tensor, *, chunk_size: int, mask: Tensor | None = None
) -> Tensor:
    """`attention(normalization="double")` of tokens to each other in memory that does not grow with N^2.

        L_j = logsumexp_i a_ij,   out_i = sum_j softmax_j(a_ij - L_j) v_j,   a = Q K^T

    L is taken over `chunk_size` keys at a time, and again in the backward pass. With it as one more feature of the
    keys, against a 1 in the queries, the rest is ordinary attention, for which fused kernels exist.

    Paper: the normalisation is that of Guo et al., arXiv 2012.09688 and 2105.02358.

    Args:
        query: Q, (B, H, N, d).
        key: K, (B, H, N, d).
        value: V, (B, H, N, d_v).
        chunk_size: keys whose N logits are held at a time.
        mask: (B, N) bool, True = the token takes part; the row of any other token is 0.

    Returns:
        (B, H, N, d_v) in the type of the query; half precision is computed in float32.
    """
    check_chunk_size(chunk_size)
    wide = [x.float() if x.dtype in HALF_TYPES else x for x in (query, key, value)]
    query_, key_, value_ = wide
    with torch.autocast(query.device.type, enabled=False):
        offsets = [_offset_again(query_, part, mask) for part in key_.split(chunk_size, dim=2)]
        offset = torch.cat(offsets, -1).unsqueeze(-1)
        ones = torch.ones_like(query_[..., :1])
        out = attention(torch.cat([query_, ones], -1), torch.cat([key_, -offset], -1), value_, mask=mask, scale=1.0)
    return out.to(query.dtype)


def _offset_again(query: Tensor, keys: Tensor, mask: Tensor | None) -> Tensor:
    """L of some keys, computed again in the backward pass; the transforms of torch.func cannot, and keep the logits."""

    def offset(query: Tensor, keys: Tensor, mask: Tensor | None) -> Tensor:
        found = slot_offset(query @ keys.transpose(-1, -2), mask=mask)
        # Of a sample without any token, whose rows are set to 0 afterwards.
        return found.masked_fill(found == -torch.inf, 0.0)

    if not (torch.is_grad_enabled() and (query.requires_grad or keys.requires_grad)):
        return offset(query, keys, mask)
    try:
        return checkpoint(offset, query, keys, mask, use_reentrant=False)  # type: ignore[return-value]
    except RuntimeError as error:
        if torch.compiler.is_compiling() or "saved tensor hooks" not in str(error):
            raise
        return offset(query, keys, mask)
