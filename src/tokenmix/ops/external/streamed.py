"""External attention by chunks of tokens: working memory does not grow with N, forward or backward.

    L^k_j = logsumexp_i (a_ij - r^(k-1)_i)      one number per slot, merged over chunks and processes
    r^k_i = logsumexp_j (a_ij - L^k_j)          one number per token, made again in each chunk
    P_ij  = exp(a_ij - L^K_j - r^K_i)

K passes over the tokens collect L^1 .. L^K, and one more emits. The gradient takes the same passes in reverse, each
of which makes its chunk's logits again.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tokenmix.kernels.support import autocast_inputs
from tokenmix.ops.external.modes import empty_like_heads, of_any_mode, written_gradients
from tokenmix.ops.normalize import slot_offset

Merge = Callable[[Tensor], Tensor]


def streamed_external_attention(
    query: Tensor,
    key_memory: Tensor,
    value_memory: Tensor,
    key_bias: Tensor | None,
    value_bias: Tensor | None,
    mask: Tensor | None,
    *,
    num_steps: int,
    chunk_size: int | None,
    merge: Merge | None = None,
    total: Merge | None = None,
) -> Tensor:
    """External attention by chunks of tokens, (..., N, d_v).

    Args:
        query: (..., N, d), 0 where no token takes part.
        key_memory: (S, d).
        value_memory: (S, d_v).
        key_bias: (S,) or None.
        value_bias: (d_v,) or None.
        mask: bool, broadcastable to the tokens (..., N), or None.
        num_steps: Sinkhorn steps K; 0 for the plain softmax over slots.
        chunk_size: tokens in a chunk; None for all.
        merge: L of all processes from this one's; None for tokens that are all here.
        total: the sum over all processes of the gradient of L; given with `merge`, and then there is a first
            derivative in reverse mode only.
    """
    mask = None if mask is None else mask.expand(query.shape[:-1])
    streams = _Streams if torch.compiler.is_compiling() or merge is not None else _StreamsOfAnyMode
    size = max(1, query.shape[-2] if chunk_size is None else chunk_size)
    given = autocast_inputs(query, key_memory, value_memory, key_bias, value_bias)
    return streams.apply(*given, mask, num_steps, size, merge, total)[0]


class _Streams(torch.autograd.Function):
    """The output (..., N, d_v) and the offsets L^1 .. L^K, (K, ..., 1, S)."""

    @staticmethod
    def forward(
        query: Tensor,
        key_memory: Tensor,
        value_memory: Tensor,
        key_bias: Tensor | None,
        value_bias: Tensor | None,
        mask: Tensor | None,
        num_steps: int,
        size: int,
        merge: Merge | None,
        total: Merge | None,
    ) -> tuple[Tensor, Tensor]:
        num_tokens, slots = query.shape[-2], key_memory.shape[0]
        wide = torch.promote_types(query.dtype, torch.float32)
        offsets = query.new_zeros((num_steps, *query.shape[:-2], 1, slots), dtype=wide)
        for k in range(num_steps):
            here = query.new_full((*query.shape[:-2], slots), -torch.inf, dtype=wide)
            for start in range(0, num_tokens, size):
                logits = F.linear(query[..., start : start + size, :], key_memory, key_bias).to(wide)
                if k:
                    logits -= torch.logsumexp(logits - offsets[k - 1], dim=-1, keepdim=True)
                some = None if mask is None else mask[..., start : start + size]
                here = torch.logaddexp(here, slot_offset(logits, mask=some))
            # Where no token takes part any finite number will do.
            here = here.masked_fill(here == -torch.inf, 0.0) if merge is None else merge(here)
            offsets[k] = here.unsqueeze(-2)
        out = empty_like_heads(query, value_memory.shape[1])
        for start in range(0, num_tokens, size):
            part = slice(start, start + size)
            logits = F.linear(query[..., part, :], key_memory, key_bias).to(wide)
            weights = torch.softmax(logits - offsets[-1] if num_steps else logits, dim=-1).to(query.dtype)
            mixed = F.linear(weights, value_memory.mT, value_bias)
            out[..., part, :] = mixed if mask is None else mixed.masked_fill(~mask[..., part].unsqueeze(-1), 0.0)
        return out, offsets

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *tensors, ctx.num_steps, ctx.size, ctx.merge, ctx.total = inputs
        ctx.save_for_backward(*tensors, output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        saved = ctx.saved_tensors  # Once only: torch.utils.checkpoint refuses a second reading.
        query, key_memory, value_memory, key_bias, _value_bias, mask, offsets = saved
        if torch.is_grad_enabled():
            if ctx.merge is not None:
                raise RuntimeError("external attention over several processes has a first derivative only")
            return *written_gradients(grad, saved, ctx.num_steps), *[None] * 5
        wide, last = offsets.dtype, ctx.num_steps - 1
        grad_query = empty_like_heads(query, query.shape[-1])
        sums: list[Any] = [None if t is None else t.new_zeros(t.shape, dtype=wide) for t in saved[1:5]]
        grad_keys, grad_values, grad_key_bias, grad_value_bias = sums
        grad_before: Any = None
        grad_offset: Any = None
        # The pass that emitted, then those that collected, the last one first.
        for k in range(last + 1, -1 if ctx.num_steps else last, -1):
            if grad_before is not None:
                grad_offset = grad_before if ctx.total is None else ctx.total(grad_before)
            before = k - 1  # The offsets that this pass read: none for the first.
            grad_before = query.new_zeros((*query.shape[:-2], 1, key_memory.shape[0]), dtype=wide)
            for start in range(0, query.shape[-2], ctx.size):
                part = slice(start, start + ctx.size)
                some = query[..., part, :]
                left_out = None if mask is None else ~mask[..., part].unsqueeze(-1)
                logits = F.linear(some, key_memory, key_bias).to(wide)
                shifted = logits if before < 0 else logits - offsets[before]
                if k == last + 1:
                    weights, upstream = torch.softmax(shifted, dim=-1), grad[..., part, :]
                    if left_out is not None:
                        weights, upstream = weights.masked_fill_(left_out, 0.0), upstream.masked_fill(left_out, 0.0)
                    through = F.linear(upstream, value_memory).to(wide) * weights
                    through.addcmul_(weights, through.sum(-1, keepdim=True), value=-1.0)
                    grad_values += weights.to(query.dtype).flatten(0, -2).mT @ upstream.flatten(0, -2)
                    if grad_value_bias is not None:
                        grad_value_bias += upstream.flatten(0, -2).sum(0, dtype=wide)
                    grad_before -= through.sum(-2, keepdim=True)
                    grad_logits = through
                else:
                    rows = 0.0 if before < 0 else torch.logsumexp(shifted, dim=-1, keepdim=True)
                    columns = logits - rows - offsets[k]
                    if left_out is not None:
                        columns = columns.masked_fill_(left_out, -torch.inf)
                    grad_logits = columns.exp_().mul_(grad_offset)
                    if before >= 0:
                        through = torch.softmax(shifted, dim=-1) * -grad_logits.sum(-1, keepdim=True)
                        grad_before -= through.sum(-2, keepdim=True)
                        grad_logits += through
                if grad_key_bias is not None:
                    grad_key_bias += grad_logits.flatten(0, -2).sum(0)
                narrow = grad_logits.to(query.dtype)
                grad_keys += narrow.flatten(0, -2).mT @ some.flatten(0, -2)
                if k == last + 1:
                    grad_query[..., part, :] = narrow @ key_memory
                else:
                    grad_query[..., part, :] += narrow @ key_memory
        return grad_query, *(None if each is None else each.to(query.dtype) for each in sums), *[None] * 5


_StreamsOfAnyMode = of_any_mode(_Streams)
