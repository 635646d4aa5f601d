"""External attention by tiles of heads and tokens, forward and backward: the map never exists as a whole.

The heads are taken in groups whose slot map stays in the caches, the tokens of a head all at once or in chunks;
with chunks, working memory is independent of N. Nothing of the size of the map is kept for the backward pass, which
makes each tile's map again. Equations: `tokenmix.ops.external.tiles`.

The loop over tiles is a registered operator, which `torch.compile` keeps as one node, for any N, and on which counters
see both products. An `autograd.Function` around it adds the rules that an operator cannot have: the forward-mode
derivative, vmap and a derivative of the derivative, which differentiate the reference instead.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from tokenmix.ops.external.reference import reference
from tokenmix.ops.external.tiles import Heads, HeadsBackward

TILE_ENTRIES = 2**20
"""Entries of the map that are worked on at a time: 4 MiB in float32. Smaller tiles, which the second caches hold,
lose more to products of fewer rows than they gain (dev/LOG.md)."""


def stream_external(*args: Any) -> Tensor:
    """External attention by tiles, (..., N, d_v); arguments are those of `_stream`."""
    return (_operator(*args) if torch.compiler.is_compiling() else _Tiles.apply(*args))[0]


def _stream(
    query: Tensor,
    key_memory: Tensor,
    value_memory: Tensor,
    key_bias: Tensor | None,
    value_bias: Tensor | None,
    mask: Tensor | None,
    num_steps: int,
    chunk_size: int | None,
) -> tuple[Tensor, Tensor]:
    """The output, and the offsets L^1 .. L^K, (K, ..., 1, S).

    The output is laid out as the query is: heads cut out of (B, N, H d) come back that way.

    Args:
        query: (..., N, d).
        key_memory: (S, d).
        value_memory: (S, d_v).
        key_bias: (S,) or None.
        value_bias: (d_v,) or None.
        mask: bool, broadcastable to the tokens (..., N), or None.
        num_steps: Sinkhorn steps K; 0 for the plain softmax over slots.
        chunk_size: tokens in a tile; None for all.
    """
    with torch.autocast(query.device.type, enabled=False):
        out = _new_output(query, value_memory.shape[1])
        offsets = _new_offsets(query, key_memory.shape[0], num_steps)
        outs, flat_offsets = _by_heads(out, query), _by_heads(offsets, query)
        for group, heads in _groups(query, key_memory, key_bias, mask, chunk_size):
            _mix(heads, num_steps, value_memory, value_bias, flat_offsets[:, *group], outs[group])
        return out, offsets


_operator = torch.library.custom_op("tokenmix::stream_external", _stream, mutates_args=())


@torch.library.custom_op("tokenmix::stream_external_backward", mutates_args=())
def _stream_backward(
    grad: Tensor,
    query: Tensor,
    key_memory: Tensor,
    value_memory: Tensor,
    key_bias: Tensor | None,
    value_bias: Tensor | None,
    mask: Tensor | None,
    offsets: Tensor,
    chunk_size: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, both memories and both biases (0 for a bias that is not there)."""
    with torch.autocast(query.device.type, enabled=False):
        grad_query = _new_output(query, query.shape[-1])
        sums = _Sums(key_memory, value_memory, key_bias is not None, value_bias is not None)
        grads, grad_queries, flat_offsets = (_by_heads(t, query) for t in (grad, grad_query, offsets))
        for group, heads in _groups(query, key_memory, key_bias, mask, chunk_size):
            backward = HeadsBackward(heads, value_memory, grads[group], [each[group] for each in flat_offsets])
            _mix_backward(backward, grad_queries[group], sums)
        return (grad_query, *(total.to(query.dtype) for total in sums.totals()))  # pyrefly: ignore[bad-return]


def _mix(
    heads: Heads, num_steps: int, value_memory: Tensor, value_bias: Tensor | None, offsets: Tensor, out: Tensor
) -> None:
    """Fill in `offsets` (K, b, g, 1, S) and `out` (b, g, N, d_v) of some heads.

    A function of its own, so that the map is free when the next heads' is made, in the same memory.
    """
    for place, shares in _maps(heads, num_steps, offsets):
        there = out[:, :, place]
        heads.project_into(there, shares.to(out.dtype), value_memory.mT, value_bias)
        if heads.mask is not None:
            there.masked_fill_(~heads.mask[:, :, place].unsqueeze(-1), 0.0)


def _maps(heads: Heads, num_steps: int, offsets: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Where some tokens are and their map; `offsets` (K, b, g, 1, S) are filled in."""
    found = heads.only_step() if num_steps == 1 else None
    if found is not None:
        shares, offsets[0] = found
        yield slice(0, heads.num_tokens), shares
        return
    each = heads.offsets(num_steps)
    for k, offset in enumerate(each):
        offsets[k] = offset
    for tile in heads:
        yield tile.place, tile.last_shares(each[-1] if each else None)


class _Sums:
    """Gradients of the memories and biases, summed over tiles in the wide type."""

    def __init__(self, key_memory: Tensor, value_memory: Tensor, key_biased: bool, value_biased: bool) -> None:
        wide = torch.promote_types(key_memory.dtype, torch.float32)
        self.keys, self.values = (m.new_zeros(m.shape, dtype=wide) for m in (key_memory, value_memory))
        self.key_bias = key_memory.new_zeros(key_memory.shape[0], dtype=wide)
        self.value_bias = value_memory.new_zeros(value_memory.shape[1], dtype=wide)
        self.biased = key_biased, value_biased

    def add(self, heads: Heads, place: slice, grad_logits: Tensor, shares: Tensor, grad_out: Tensor) -> None:
        """What a tile adds: (b, g, n, S), the same, (b, g, n, d_v)."""
        self.keys += heads.product(grad_logits, heads.query[:, :, place])
        self.values += heads.product(shares, grad_out)
        if self.biased[0]:
            self.key_bias += grad_logits.sum((0, 1, 2), dtype=self.key_bias.dtype)
        if self.biased[1]:
            self.value_bias += grad_out.sum((0, 1, 2), dtype=self.value_bias.dtype)

    def totals(self) -> tuple[Tensor, ...]:
        return self.keys, self.values, self.key_bias, self.value_bias


def _mix_backward(backward: HeadsBackward, grad_query: Tensor, sums: _Sums) -> None:
    """Fill in `grad_query` (b, g, N, d) of some heads, and add to `sums`."""
    heads, over_tokens = backward.heads, backward.sums()
    for tile in heads:
        grad_logits = backward.logits(tile, over_tokens).to(grad_query.dtype)
        heads.project_into(grad_query[:, :, tile.place], grad_logits, heads.key_memory.mT)
        _, shares, _, grad_out = backward.map_gradient(tile)
        sums.add(heads, tile.place, grad_logits, shares.to(grad_query.dtype), grad_out)


class _Group(NamedTuple):
    """Which heads, in (B, H, ...)."""

    samples: slice
    heads: slice


def _groups(
    query: Tensor, key_memory: Tensor, key_bias: Tensor | None, mask: Tensor | None, chunk_size: int | None
) -> Iterator[tuple[_Group, Heads]]:
    """The heads in groups whose tiles have about TILE_ENTRIES entries: some heads, or all heads of some samples."""
    size = query.shape[-2] if chunk_size is None else min(chunk_size, query.shape[-2])
    queries, interleaved = _by_heads(query, query), _interleaved(query)
    masks = None if mask is None else _by_heads(mask.expand(query.shape[:-1]).unsqueeze(-1), query).squeeze(-1)
    num_samples, num_heads = queries.shape[:2]
    together = max(1, TILE_ENTRIES // max(1, size * key_memory.shape[0]))
    samples = max(1, together // max(1, num_heads))
    # Groups as even as can be, for which they may be a little larger.
    heads = max(1, math.ceil(num_heads / math.ceil(max(1, num_heads) / (1.1 * together))))
    for sample in range(0, num_samples, samples):
        for head in range(0, num_heads, heads):
            group = _Group(slice(sample, sample + samples), slice(head, head + heads))
            some = None if masks is None else masks[group]
            yield group, Heads(queries[group], key_memory, key_bias, some, size, interleaved)


def _interleaved(query: Tensor) -> bool:
    """Heads cut out of (B, N, H d): the samples and heads of such a view are no single axis."""
    return query.dim() == 4 and not query.is_contiguous() and query.transpose(1, 2).is_contiguous()


def _by_heads(tensor: Tensor, query: Tensor) -> Tensor:
    """`tensor` ([K,] ..., a, b) as ([K,] B, H, a, b): samples in H as well, unless the heads are interleaved."""
    extra = tensor.shape[: tensor.dim() - query.dim()]
    if _interleaved(query):
        return tensor
    return tensor.reshape(*extra, 1, math.prod(query.shape[:-2]), *tensor.shape[-2:])


def _new_output(query: Tensor, width: int) -> Tensor:
    """(..., N, width), laid out as the query."""
    if _interleaved(query):
        batch, heads, num_tokens, _ = query.shape
        return query.new_empty((batch, num_tokens, heads, width)).transpose(1, 2)
    return query.new_empty((*query.shape[:-1], width))


def _new_offsets(query: Tensor, slots: int, num_steps: int) -> Tensor:
    wide = torch.promote_types(query.dtype, torch.float32)
    return query.new_empty((num_steps, *query.shape[:-2], 1, slots), dtype=wide)


@_operator.register_fake
def _(query: Tensor, key_memory: Tensor, value_memory: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _new_output(query, value_memory.shape[1]), _new_offsets(query, key_memory.shape[0], rest[3])


@_stream_backward.register_fake
def _(grad: Tensor, query: Tensor, key_memory: Tensor, value_memory: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    biases = key_memory.new_empty(key_memory.shape[0]), value_memory.new_empty(value_memory.shape[1])
    memories = key_memory.new_empty(key_memory.shape), value_memory.new_empty(value_memory.shape)
    return (_new_output(query, query.shape[-1]), *memories, *biases)


@register_flop_formula(torch.ops.tokenmix.stream_external)
def _(query: Any, key_memory: Any, value_memory: Any, *rest: Any, **_: Any) -> int:
    """Both products, as the written form counts; logits that are made again are not counted."""
    return 2 * math.prod(query[:-1]) * key_memory[0] * (key_memory[1] + value_memory[1])


@register_flop_formula(torch.ops.tokenmix.stream_external_backward)
def _(grad: Any, query: Any, key_memory: Any, value_memory: Any, *rest: Any, **_: Any) -> int:
    return 4 * math.prod(query[:-1]) * key_memory[0] * (key_memory[1] + value_memory[1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.num_steps, ctx.chunk_size = inputs
    ctx.save_for_backward(*tensors, output[1])


def _differentiate(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, offsets = ctx.saved_tensors
    if torch.is_grad_enabled():
        # Somebody differentiates once more, for which the reference is an expression.
        written, there = _written(tensors, ctx.num_steps)
        found = iter(torch.func.vjp(written, *there)[1](grad))
        return *(next(found) if t is not None else None for t in tensors[:5]), None, None, None
    grads = _stream_backward(grad, *tensors, offsets, ctx.chunk_size)
    biases = (g if there is not None else None for g, there in zip(grads[3:], tensors[3:5], strict=True))
    return *grads[:3], *biases, None, None, None


def _written(tensors: Sequence[Any], num_steps: int) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """The reference as a function of those of its five factors that are there, and these."""

    def run(*there: Tensor) -> Tensor:
        found = iter(there)
        factors: list[Any] = [next(found) if tensor is not None else None for tensor in tensors[:5]]
        query, key_memory, value_memory, key_bias, value_bias = factors
        return reference(
            query,
            key_memory,
            value_memory,
            key_bias=key_bias,
            value_bias=value_bias,
            mask=tensors[5],
            normalization="double" if num_steps else "softmax",
            num_steps=max(1, num_steps),
        )

    return run, [tensor for tensor in tensors[:5] if tensor is not None]


_operator.register_autograd(_differentiate, setup_context=_save)


class _Tiles(torch.autograd.Function):
    """The operator with the rules of forward mode and vmap."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        return _operator(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        _save(ctx, inputs, output)
        ctx.save_for_forward(*inputs[:6])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return _differentiate(ctx, grad_outputs[0], None)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor, None]:
        tensors = ctx.saved_tensors
        written, there = _written(tensors, ctx.num_steps)
        directions = [
            torch.zeros_like(tensor) if tangent is None else tangent
            for tensor, tangent in zip(tensors[:5], tangents[:5], strict=True)
            if tensor is not None
        ]
        # The transpose of the transpose: forward mode has no second level inside a rule of its own.
        out, pull = torch.func.vjp(written, *there)[:2]
        return torch.func.vjp(pull, torch.zeros_like(out))[1](tuple(directions))[0], None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        if in_dims[0] is not None and all(dim is None for dim in in_dims[1:5]):
            mask = args[5] if in_dims[5] is None else args[5].movedim(in_dims[5], 0)
            together = args[0].movedim(in_dims[0], 0), *args[1:5], mask, *args[6:]
            return _Tiles.apply(*together), (0, 1)
        # A memory for each call: one call after the other.
        calls = [
            _Tiles.apply(*(arg if dim is None else arg.select(dim, i) for arg, dim in zip(args, in_dims, strict=True)))
            for i in range(info.batch_size)
        ]
        out, offsets = (torch.stack(each) for each in zip(*calls, strict=True))
        return (out, offsets), (0, 0)
