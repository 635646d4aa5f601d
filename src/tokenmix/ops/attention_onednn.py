"""Softmax attention whose products run on oneDNN: float32 on CPUs with AVX-512, forward and backward.

Where MKL has half of oneDNN's speed, heads with few tokens are worked on some at a time, their map written into one
buffer that stays in the cache:

    P = softmax(scale Q K^T),   out = P V
    dV = P^T dO,   dS = P * (dO V^T - rowsum(P * dO V^T)),   dQ = scale dS K,   dK = scale dS^T Q

where the backward pass makes P again. Heads with more tokens go to PyTorch's own fused kernel, whose products take the
same library. These are registered operators, so that `torch.compile` keeps them as one node. A derivative of the
derivative goes through the written map.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from tokenmix.ops.cpu import MKL_IS_HALF
from tokenmix.ops.onednn import is_followed, onednn_products, takes_onednn

__all__ = ["attention_by_onednn", "rows_of", "serves"]

# Measured on 2 cores of an AMD EPYC (LOG.md): below so many entries in all maps, setting up costs what is gained;
LEAST_ENTRIES = 2**16
# above so many in the map of a head, the fused kernel is as fast forward and faster backward;
MOST_WRITTEN = 2**18
# and so many are worked on at a time.
TILE_ENTRIES = 2**20
# Measured on a Zen 4: with fewer entries in the map of a head, PyTorch's fused kernel with its own library takes 0.5 to
# 1.0 of the time, with more 1.02 to 1.1. Where MKL has half of oneDNN's speed, it was behind at every number.
LEAST_IN_A_HEAD = 0 if MKL_IS_HALF else 2**20


def serves(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> bool:
    """Whether `attention_by_onednn` is to be taken: it can be, the maps are large enough, and fused kernels are on.

    Not with a bias of the scores that learns.
    """
    extra = () if bias is None else (bias,)
    if not takes_onednn(query, key, value, *extra) or query.shape[-1] == 0:
        return False
    if bias is not None and (bias.dim() != 4 or (bias.requires_grad and torch.is_grad_enabled())):
        return False
    in_a_head = query.shape[-2] * key.shape[-2]
    large = in_a_head >= LEAST_IN_A_HEAD and query.shape[:2].numel() * in_a_head >= LEAST_ENTRIES
    return large and (torch.compiler.is_compiling() or torch.backends.cuda.flash_sdp_enabled())


def attention_by_onednn(
    query: Tensor, key: Tensor, value: Tensor, limits: Tensor | None, causal: bool, scale: float
) -> Tensor:
    """softmax(scale Q K^T) V, (B, H, N, d_v), laid out as (B, N, H, d_v).

    Args:
        query: Q, (B, H, N, d).
        key: K, (B, H, S, d).
        value: V, (B, H, S, d_v).
        limits: (B or 1, H or 1, N or 1, S); bool, True = the key is seen, or numbers to add to the scores, which get no
            gradient. No row without a key.
        causal: token i sees keys 0 to i; not together with `limits`.
        scale: of the scores.
    """
    attend = _operator if is_followed(query, key, value) else _attend
    return attend(query, key, value, limits, causal, scale)[0]


def _attend(
    query: Tensor, key: Tensor, value: Tensor, limits: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """The result, and what the backward pass of the fused kernel needs."""
    with onednn_products():
        if _is_written(query, key):
            return _written(query, key, value, limits, causal, scale), query.new_empty(0)
        width = value.shape[-1]
        out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *_equal_widths(query, key, value), 0.0, causal, attn_mask=_addend(limits, query), scale=scale
        )
        return _laid_out(out[..., :width]), sums


_operator = torch.library.custom_op("tokenmix::attention", _attend, mutates_args=())


@torch.library.custom_op("tokenmix::attention_backward", mutates_args=())
def _gradients(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    limits: Tensor | None,
    out: Tensor,
    sums: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, each laid out as (B, N, H, d)."""
    with onednn_products():
        if _is_written(query, key):
            return _written_gradients(grad, query, key, value, limits, causal, scale)
        wide = _equal_widths(query, key, value)
        grad, out = (rows_of(x, wide[2].shape[-1]) for x in (grad, out))
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, *wide, out, sums, 0.0, causal, attn_mask=_addend(limits, query), scale=scale
        )
        return tuple(_laid_out(g[..., : x.shape[-1]]) for g, x in zip(found, (query, key, value), strict=True))  # pyright: ignore[reportReturnType]


def _is_written(query: Tensor, key: Tensor) -> bool:
    return query.shape[-2] * key.shape[-2] <= MOST_WRITTEN


def _written(query: Tensor, key: Tensor, value: Tensor, limits: Tensor | None, causal: bool, scale: float) -> Tensor:
    queries, keys, values = (x.flatten(0, 1) for x in (query, key, value))
    out = values.new_empty(*queries.shape[:-1], values.shape[-1])
    for tile, scores, part in _tiles(query, key, limits, causal):
        torch.bmm(_softmax_of(scores, queries[tile], keys[tile], part, scale), values[tile], out=out[tile])
    return _laid_out(out.view(*query.shape[:-1], -1))


def _written_gradients(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, limits: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    grads, queries, keys, values = (x.flatten(0, 1) for x in (grad, query, key, value))
    to_queries, to_keys, to_values = (x.new_empty(x.shape) for x in (queries, keys, values))
    for tile, scores, part in _tiles(query, key, limits, causal):
        shares = _softmax_of(scores, queries[tile], keys[tile], part, scale)
        torch.bmm(shares.mT, grads[tile], out=to_values[tile])
        back = torch.bmm(grads[tile], values[tile].mT)
        back = torch._softmax_backward_data(back, shares, -1, torch.float32).mul_(scale)
        torch.bmm(back, keys[tile], out=to_queries[tile])
        torch.bmm(back.mT, queries[tile], out=to_keys[tile])
    pairs = (to_queries, query), (to_keys, key), (to_values, value)
    return tuple(_laid_out(found.view(x.shape)) for found, x in pairs)  # pyright: ignore[reportReturnType]


def _tiles(
    query: Tensor, key: Tensor, limits: Tensor | None, causal: bool
) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """Some heads of (B H), a buffer for their map, and their limits (g or 1, N or 1, S)."""
    (batch, heads, rows), columns = query.shape[:3], key.shape[2]
    if causal:
        limits = torch.ones(1, 1, rows, columns, dtype=torch.bool).tril_()
    together = min(batch * heads, max(1, TILE_ENTRIES // (rows * columns)))
    buffer = query.new_empty(together, rows, columns)
    for start in range(0, batch * heads, together):
        tile = slice(start, min(start + together, batch * heads))
        part = None if limits is None else _limits_of(limits, tile, heads)
        yield tile, buffer[: tile.stop - tile.start], part


def _limits_of(limits: Tensor, tile: slice, heads: int) -> Tensor:
    if limits.shape[:2] == (1, 1):
        return limits[0]
    each = torch.arange(tile.start, tile.stop)
    zeros = torch.zeros_like(each)
    return limits[each // heads if len(limits) > 1 else zeros, each % heads if limits.shape[1] > 1 else zeros]


def _softmax_of(scores: Tensor, queries: Tensor, keys: Tensor, limits: Tensor | None, scale: float) -> Tensor:
    """The map, in the place of `scores`, whose numbers before do not matter."""
    if limits is not None and limits.is_floating_point():
        torch.baddbmm(limits.expand_as(scores), queries, keys.mT, alpha=scale, out=scores)
    else:
        torch.baddbmm(scores, queries, keys.mT, beta=0.0, alpha=scale, out=scores)
        if limits is not None:
            scores.masked_fill_(~limits, -torch.inf)
    return torch.softmax(scores, dim=-1, out=scores)


def rows_of(x: Tensor, width: int) -> Tensor:
    """x padded with zeros to a width, each head's numbers side by side: else fused kernels refuse it."""
    wide = F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x
    return wide if wide.stride(-1) == 1 else wide.contiguous()


def _equal_widths(*heads: Tensor) -> tuple[Tensor, ...]:
    width = max(x.shape[-1] for x in heads)
    return tuple(rows_of(x, width) for x in heads)


def _laid_out(x: Tensor) -> Tensor:
    """(B, H, N, d), in memory as (B, N, H, d): what a projection gives and takes."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _addend(limits: Tensor | None, query: Tensor) -> Tensor | None:
    if limits is None or limits.is_floating_point():
        return limits
    return query.new_zeros(limits.shape).masked_fill_(~limits, -torch.inf)


def _empty(x: Tensor, width: int) -> Tensor:
    batch, heads, num_tokens, _ = x.shape
    return x.new_empty(batch, num_tokens, heads, width).transpose(1, 2)


@_operator.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, heads, num_tokens = query.shape[:3]
    if _is_written(query, key):
        return _empty(query, value.shape[-1]), query.new_empty(0)
    return _empty(query, value.shape[-1]), query.new_empty(batch, num_tokens, heads).transpose(1, 2)


@_gradients.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(_empty(x, x.shape[-1]) for x in (query, key, value))


@register_flop_formula(torch.ops.tokenmix.attention)
def _(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    batch, heads, num_tokens, width = query
    return 2 * batch * heads * num_tokens * key[2] * (width + value[3])


@register_flop_formula(torch.ops.tokenmix.attention_backward)
def _(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    batch, heads, num_tokens, width = query
    return 2 * batch * heads * num_tokens * key[2] * (3 * width + 2 * value[3])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.causal, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    query, key, value, limits, out, sums = ctx.saved_tensors
    if torch.is_grad_enabled():
        found = _differentiable_gradients(grad, query, key, value, limits, ctx.causal, ctx.scale)
    else:
        found = _gradients(grad, query, key, value, limits, out, sums, ctx.causal, ctx.scale)
    return *found, None, None, None


def _differentiable_gradients(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, limits: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients as expressions that can be differentiated again."""
    scores = query @ key.mT * scale
    if causal:
        limits = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if limits is not None:
        scores = scores + limits if limits.is_floating_point() else scores.masked_fill(~limits, -torch.inf)
    shares = torch.softmax(scores, dim=-1)
    back = grad @ value.mT
    back = shares * (back - (shares * back).sum(-1, keepdim=True)) * scale
    return back @ key, back.mT @ query, shares.mT @ grad


_operator.register_autograd(_backward, setup_context=_keep)
