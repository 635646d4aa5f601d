"""External attention by groups of heads, whose map stays in the caches and is made again for the gradient.

With L^1 the offset of each slot, P the map, C_ij = exp(a_ij - L_j), and dP the gradient of P:

    u  = P * (dP - rowsum(dP * P))
    da = u - C * colsum(u)                      da = u for the plain softmax over slots

Forward mode, vmap and a derivative of the derivative use the reference instead.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tokenmix.ops.external.modes import empty_like_heads, of_any_mode, written_gradients

TILE_ENTRIES = 2**20
"""Entries of the map that are worked on at a time: 4 MiB in float32."""


def tiled_external_attention(
    query: Tensor,
    key_memory: Tensor,
    value_memory: Tensor,
    key_bias: Tensor | None,
    value_bias: Tensor | None,
    mask: Tensor | None,
    *,
    double: bool,
) -> Tensor:
    """External attention by groups of heads, (..., N, d_v), laid out as the query is.

    Args:
        query: (..., N, d).
        key_memory: (S, d).
        value_memory: (S, d_v).
        key_bias: (S,) or None.
        value_bias: (d_v,) or None.
        mask: bool, broadcastable to the tokens (..., N), or None.
        double: one Sinkhorn step of the double normalisation; else the softmax over slots.
    """
    leading = query.shape[:-2]
    heads = query.reshape(-1, *query.shape[-3:]) if query.dim() > 4 else query[(None,) * (4 - query.dim())]
    mask = None if mask is None else mask.expand(query.shape[:-1]).reshape(heads.shape[:-1])
    tiles = _Tiles if torch.compiler.is_compiling() else _TilesOfAnyMode
    out = tiles.apply(heads, key_memory, value_memory, key_bias, value_bias, mask, double)[0]
    # A tensor of its own, never a view.
    return out if query.dim() == 4 else out.reshape(*leading, *out.shape[-2:]).clone()


class _Tiles(torch.autograd.Function):
    """The output (B, H, N, d_v) and the offsets L (B, H, 1, S) of a query (B, H, N, d)."""

    @staticmethod
    def forward(
        query: Tensor,
        key_memory: Tensor,
        value_memory: Tensor,
        key_bias: Tensor | None,
        value_bias: Tensor | None,
        mask: Tensor | None,
        double: bool,
    ) -> tuple[Tensor, Tensor]:
        out, slots = empty_like_heads(query, value_memory.shape[1]), key_memory.shape[0]
        wide = torch.promote_types(query.dtype, torch.float32)
        offsets = query.new_zeros((*query.shape[:2], 1, slots), dtype=wide)
        for group in _groups(query, slots):
            logits = F.linear(query[group], key_memory, key_bias).to(wide)
            left_out = None if mask is None else ~mask[group].unsqueeze(-1)
            if double:
                if left_out is not None:
                    logits.masked_fill_(left_out, -torch.inf)
                offset = torch.logsumexp(logits, dim=-2, keepdim=True)
                # A slot that no token reaches: any finite number will do.
                offsets[group] = offset.masked_fill_(offset == -torch.inf, 0.0)
                logits.sub_(offset)
            weights = _softmax_(logits)
            if left_out is not None:
                weights.masked_fill_(left_out, 0.0)
            mixed = F.linear(weights.to(query.dtype), value_memory.mT, value_bias)
            out[group] = mixed if left_out is None else mixed.masked_fill_(left_out, 0.0)
        return out, offsets

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *tensors, double = inputs
        ctx.num_steps = int(double)
        ctx.save_for_backward(*tensors, output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        saved = ctx.saved_tensors  # Once only: torch.utils.checkpoint refuses a second reading.
        query, key_memory, value_memory, key_bias, _value_bias, mask, offsets = saved
        if torch.is_grad_enabled():
            return *written_gradients(grad, saved, ctx.num_steps), None, None
        grad_query, wide = empty_like_heads(query, query.shape[-1]), offsets.dtype
        sums: list[Any] = [None if t is None else t.new_zeros(t.shape, dtype=wide) for t in saved[1:5]]
        grad_keys, grad_values, grad_key_bias, grad_value_bias = sums
        for group in _groups(query, key_memory.shape[0]):
            some, upstream = query[group].contiguous(), grad[group].contiguous()
            columns = F.linear(some, key_memory, key_bias).to(wide).sub_(offsets[group])
            weights = torch.softmax(columns, dim=-1)
            if mask is not None:
                left_out = ~mask[group].unsqueeze(-1)
                upstream = upstream.masked_fill(left_out, 0.0)
                weights.masked_fill_(left_out, 0.0)
                columns.masked_fill_(left_out, -torch.inf)
            through = F.linear(upstream, value_memory).to(wide).mul_(weights)
            through.addcmul_(weights, through.sum(-1, keepdim=True), value=-1.0)
            grad_values += _product(weights.to(query.dtype), upstream)
            if grad_value_bias is not None:
                grad_value_bias += upstream.sum((0, 1, 2), dtype=wide)
            if ctx.num_steps:
                through.addcmul_(columns.exp_(), through.sum(-2, keepdim=True), value=-1.0)
            if grad_key_bias is not None:
                grad_key_bias += through.sum((0, 1, 2))
            grad_logits = through.to(query.dtype)
            grad_keys += _product(grad_logits, some)
            grad_query[group] = grad_logits @ key_memory
        return grad_query, *(None if total is None else total.to(query.dtype) for total in sums), None, None


_TilesOfAnyMode = of_any_mode(_Tiles)


def _groups(query: Tensor, slots: int) -> Iterator[tuple[slice, slice]]:
    """Some heads, or all heads of some samples, whose map has about TILE_ENTRIES entries."""
    num_samples, num_heads, num_tokens = query.shape[:3]
    together = max(1, TILE_ENTRIES // max(1, num_tokens * slots))
    samples = max(1, together // max(1, num_heads))
    # Groups as even as can be, for which they may be a little larger.
    heads = max(1, math.ceil(num_heads / math.ceil(max(1, num_heads) / (1.1 * together))))
    for sample in range(0, num_samples, samples):
        for head in range(0, num_heads, heads):
            yield slice(sample, sample + samples), slice(head, head + heads)


def _softmax_(logits: Tensor) -> Tensor:
    return torch.softmax(logits, dim=-1, out=logits)  # pyrefly: ignore[no-matching-overload]


def _product(left: Tensor, right: Tensor) -> Tensor:
    """The sum over heads and tokens (b, g, n, a)^T (b, g, n, c), (a, c)."""
    return left.flatten(0, 2).mT @ right.flatten(0, 2)
