"""External attention in chunks of tokens, forward and backward, with working memory independent of N.

Per Sinkhorn step k = 1..K, with r^0 = 0 and P the map:

    L^k_j = logsumexp_i (a_ij - r^(k-1)_i)      one number per slot, merged over chunks
    r^k_i = logsumexp_j (a_ij - L^k_j)          one number per token, made again in each chunk
    P_ij  = exp(a_ij - L^K_j - r^K_i)

and back, with g^k the gradient of L^k, C^k_ij = exp(a_ij - r^(k-1)_i - L^k_j) and R^k_ij = exp(a_ij - L^k_j - r^k_i):

    u^K = P * (dP - rowsum(dP * P))             what reaches a through a - L^K
    u^k = -R^k * rowsum(g^(k+1) * C^(k+1))      what reaches a through r^k
    g^k = -sum_i u^k_i
    da  = sum_k (u^k + g^k * C^k)

So K passes over the tokens collect the sums over i, and one more emits. K = 0 is the plain softmax over slots.

These are registered operators and not an `autograd.Function`, so that `torch.compile` and `torch.export` keep the loop
over chunks as one node, for any N. They have a first derivative only.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["stream_external"]


@dataclass(frozen=True)
class _Chunk:
    """Some tokens: their place in the sequence, their wide logits, and which of them take part (..., n, 1)."""

    place: slice
    logits: Tensor
    mask: Tensor | None

    def keep(self, values: Tensor, filler: float = 0.0) -> Tensor:
        return values if self.mask is None else values.masked_fill(~self.mask, filler)

    def rows(self, offset: Tensor) -> Tensor:
        """r^k of the tokens, (..., n, 1), from L^k."""
        return torch.logsumexp(self.logits - offset, dim=-1, keepdim=True)

    def shares(self, offset: Tensor) -> Tensor:
        """R^k of the tokens, from L^k."""
        return self.keep(torch.softmax(self.logits - offset, dim=-1))

    def columns(self, before: Tensor | None, offset: Tensor) -> Tensor:
        """C^k of the tokens, from L^(k-1) and L^k."""
        rows = 0.0 if before is None else self.rows(before)
        return self.keep(torch.exp(self.logits - rows - offset))


@dataclass(frozen=True)
class _Chunks:
    """The tokens in chunks. `mask` is (..., N), broadcastable to the query's tokens."""

    query: Tensor
    key_memory: Tensor
    key_bias: Tensor | None
    mask: Tensor | None
    size: int

    @property
    def wide(self) -> torch.dtype:
        return torch.promote_types(self.query.dtype, torch.float32)

    def __iter__(self) -> Iterator[_Chunk]:
        num_tokens = self.query.shape[-2]
        for start in range(0, num_tokens, self.size):
            place = slice(start, min(start + self.size, num_tokens))
            logits = F.linear(self.query[..., place, :], self.key_memory, self.key_bias).to(self.wide)
            mask = None if self.mask is None else self.mask[..., place].unsqueeze(-1)
            yield _Chunk(place, logits, mask)

    def slots(self, value: float) -> Tensor:
        """(..., 1, S), one number per slot."""
        shape = (*self.query.shape[:-2], 1, self.key_memory.shape[0])
        return self.query.new_full(shape, value, dtype=self.wide)

    def offsets(self, num_steps: int) -> list[Tensor]:
        """L^1 .. L^K, one pass over the tokens for each."""
        offsets: list[Tensor] = []
        for _ in range(num_steps):
            total = self.slots(-torch.inf)
            for chunk in self:
                logits = chunk.logits - chunk.rows(offsets[-1]) if offsets else chunk.logits
                part = torch.logsumexp(chunk.keep(logits, -torch.inf), dim=-2, keepdim=True)
                total = torch.logaddexp(total, part)
            # Where no token takes part any finite number will do.
            offsets.append(total.masked_fill(torch.isneginf(total), 0.0))
        return offsets


@dataclass(frozen=True)
class _Backward:
    """The gradient of a chunk's logits, given the sums over tokens so far: sums[k] is g^(k+1)."""

    chunks: _Chunks
    value_memory: Tensor
    grad: Tensor
    offsets: list[Tensor]

    def through_map(self, chunk: _Chunk) -> tuple[Tensor, Tensor, Tensor]:
        """P, u^K and the output's gradient where it counts."""
        shares = chunk.shares(self.offsets[-1] if self.offsets else self.chunks.slots(0.0))
        grad = chunk.keep(self.grad[..., chunk.place, :])
        grad_shares = (grad @ self.value_memory.mT).to(shares.dtype)
        weighted = grad_shares * shares
        return shares, weighted - shares * weighted.sum(-1, keepdim=True), grad

    def columns(self, chunk: _Chunk, k: int) -> Tensor:
        return chunk.columns(self.offsets[k - 1] if k else None, self.offsets[k])

    def through_rows(self, chunk: _Chunk, k: int, sums: dict[int, Tensor]) -> Tensor:
        grad_rows = (sums[k + 1] * self.columns(chunk, k + 1)).sum(-1, keepdim=True)
        return -chunk.shares(self.offsets[k]) * grad_rows

    def sums(self) -> dict[int, Tensor]:
        """g of every step, the last step first, one pass over the tokens for each."""
        sums: dict[int, Tensor] = {}
        last = len(self.offsets) - 1
        for k in range(last, -1, -1):
            total = self.chunks.slots(0.0)
            for chunk in self.chunks:
                up = self.through_map(chunk)[1] if k == last else self.through_rows(chunk, k, sums)
                total -= up.sum(-2, keepdim=True)
            sums[k] = total
        return sums

    def logits(self, chunk: _Chunk, through_map: Tensor, sums: dict[int, Tensor]) -> Tensor:
        """da of the chunk."""
        grad = through_map
        for k in range(len(self.offsets)):
            grad = grad + sums[k] * self.columns(chunk, k)
            if k + 1 < len(self.offsets):
                grad = grad + self.through_rows(chunk, k, sums)
        return grad


@torch.library.custom_op("tokenmix::stream_external", mutates_args=())
def stream_external(
    query: Tensor,
    key_memory: Tensor,
    value_memory: Tensor,
    key_bias: Tensor | None,
    value_bias: Tensor | None,
    mask: Tensor | None,
    num_steps: int,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    """External attention by chunks: the output (..., N, d_v) and the offsets L^1 .. L^K, (K, ..., 1, S).

    Args:
        query: (..., N, d).
        key_memory: (S, d).
        value_memory: (S, d_v).
        key_bias: (S,) or None.
        value_bias: (d_v,) or None.
        mask: bool, broadcastable to the tokens (..., N), or None.
        num_steps: Sinkhorn steps K; 0 for the plain softmax over slots.
        chunk_size: tokens in a chunk.
    """
    with torch.autocast(query.device.type, enabled=False):
        chunks = _Chunks(query, key_memory, key_bias, mask, chunk_size)
        offsets = chunks.offsets(num_steps)
        shift = offsets[-1] if offsets else chunks.slots(0.0)
        out = query.new_empty((*query.shape[:-1], value_memory.shape[1]))
        for chunk in chunks:
            shares = chunk.shares(shift).to(query.dtype)
            out[..., chunk.place, :] = chunk.keep(F.linear(shares, value_memory.mT, value_bias))
        return out, torch.stack(offsets) if offsets else chunks.slots(0.0).unsqueeze(0)[:0].clone()


@torch.library.custom_op("tokenmix::stream_external_backward", mutates_args=())
def _stream_backward(
    grad: Tensor,
    query: Tensor,
    key_memory: Tensor,
    value_memory: Tensor,
    key_bias: Tensor | None,
    mask: Tensor | None,
    offsets: Tensor,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, both memories and both biases (also where there is no bias: they are sums that are there)."""
    with torch.autocast(query.device.type, enabled=False):
        chunks = _Chunks(query, key_memory, key_bias, mask, chunk_size)
        backward = _Backward(chunks, value_memory, grad, list(offsets))
        sums = backward.sums()
        grad_query = torch.empty_like(query)
        slots, wide = key_memory.shape[0], chunks.wide
        grad_keys, grad_values = (memory.new_zeros(memory.shape, dtype=wide) for memory in (key_memory, value_memory))
        grad_key_bias = key_memory.new_zeros(slots, dtype=wide)
        grad_value_bias = value_memory.new_zeros(value_memory.shape[1], dtype=wide)
        for chunk in chunks:
            shares, through_map, grad_out = backward.through_map(chunk)
            grad_logits = backward.logits(chunk, through_map, sums)
            narrow = grad_logits.to(query.dtype)
            grad_query[..., chunk.place, :] = narrow @ key_memory
            grad_keys += _over_tokens(narrow, query[..., chunk.place, :])
            grad_values += _over_tokens(shares.to(query.dtype), grad_out)
            grad_key_bias += grad_logits.reshape(-1, slots).sum(0)
            grad_value_bias += grad_out.reshape(-1, grad_out.shape[-1]).sum(0, dtype=wide)
        parameters = (grad_keys, grad_values, grad_key_bias, grad_value_bias)
        return (grad_query, *(gradient.to(query.dtype) for gradient in parameters))  # pyright: ignore[reportReturnType]


def _over_tokens(left: Tensor, right: Tensor) -> Tensor:
    """left^T right, summed over all tokens of all samples and heads."""
    return left.reshape(-1, left.shape[-1]).mT @ right.reshape(-1, right.shape[-1])


@stream_external.register_fake
def _(query: Tensor, key_memory: Tensor, value_memory: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    num_steps = rest[3]
    wide = torch.promote_types(query.dtype, torch.float32)
    offsets = query.new_empty((num_steps, *query.shape[:-2], 1, key_memory.shape[0]), dtype=wide)
    return query.new_empty((*query.shape[:-1], value_memory.shape[1])), offsets


@_stream_backward.register_fake
def _(grad: Tensor, query: Tensor, key_memory: Tensor, value_memory: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    biases = key_memory.new_empty(key_memory.shape[0]), value_memory.new_empty(value_memory.shape[1])
    return (
        torch.empty_like(query),
        key_memory.new_empty(key_memory.shape),
        value_memory.new_empty(value_memory.shape),
        *biases,
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key_memory, value_memory, key_bias, value_bias, mask, _, ctx.chunk_size = inputs
    ctx.biased = key_bias is not None, value_bias is not None
    ctx.save_for_backward(query, key_memory, value_memory, key_bias, mask, output[1])


def _differentiate(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    grads = _stream_backward(grad, *ctx.saved_tensors, ctx.chunk_size)
    key_bias, value_bias = (g if there else None for g, there in zip(grads[3:], ctx.biased, strict=True))
    return *grads[:3], key_bias, value_bias, None, None, None


stream_external.register_autograd(_differentiate, setup_context=_save)
