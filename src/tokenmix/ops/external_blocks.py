"""External attention: the reference equation, and its computation by blocks of the map.

    A   = Norm(F M_k^T + b_k)          (N x S)
    out = A M_v + b_v                  (N x d_v)

Blocks are groups of heads, or chunks of tokens:

    L^k_j = logsumexp_i (a_ij - r^(k-1)_i)      one number per slot, merged over chunks and processes
    r^k_i = logsumexp_j (a_ij - L^k_j)          one number per token, recomputed in each chunk
    P_ij  = exp(a_ij - L^K_j - r^K_i)

K passes over the tokens compute L^1 .. L^K, and one more pass computes the output. The backward pass runs the same
passes in reverse and recomputes the logits of each block. If one block has all tokens and K = 1, both passes are one.
Forward mode, vmap and second derivatives use the reference.
"""

import math
from collections.abc import Callable, Iterator
from types import EllipsisType
from typing import Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenmix.kernels.support import empty_like_heads
from tokenmix.ops.normalize import broadcast_mask, double_normalize, slot_offset

TILE_ENTRIES = 2**20
"""Map entries per group of heads: 4 MiB in float32."""

Merge = Callable[[Tensor], Tensor]
Normalization = Literal["double", "softmax", "sigmoid", "l2", "entmax15"]


class Factors(NamedTuple):
    """Tensor arguments of `external_attention`; the mask broadcasts against (..., N)."""

    query: Tensor
    key_memory: Tensor
    value_memory: Tensor
    key_bias: Tensor | None = None
    value_bias: Tensor | None = None
    mask: Tensor | None = None

    @property
    def learned(self) -> bool:
        """Whether the output has a gradient."""
        return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in self)

    def in_autocast_type(self) -> "Factors":
        """The tensors in autocast's dtype if autocast is on; autocast does not know our operators."""
        kind = self.query.device.type
        # Autocast leaves float64 alone.
        if self.query.dtype == torch.float64 or kind == "meta" or not torch.is_autocast_enabled(kind):
            return self
        dtype = torch.get_autocast_dtype(kind)
        memories = self.key_memory.to(dtype), self.value_memory.to(dtype)
        biases = (bias if bias is None else bias.to(dtype) for bias in (self.key_bias, self.value_bias))
        return Factors(self.query.to(dtype), *memories, *biases, mask=self.mask)


def reference(factors: Factors, normalization: Normalization = "double", num_steps: int = 1) -> Tensor:
    """The equation with a materialized map, in any dtype; arguments as in `external_attention`."""
    query, _, value_memory, _, value_bias, mask = factors
    out = F.linear(reference_map(factors, normalization, num_steps), value_memory.t(), value_bias)
    return out if mask is None else out.masked_fill(~broadcast_mask(mask, query).unsqueeze(-1), 0.0)


def reference_map(factors: Factors, normalization: Normalization = "double", num_steps: int = 1) -> Tensor:
    """The map A (..., N, S), for all normalisations."""
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
    """Scaled query and memory with products sqrt(d) cos(query, memory)."""
    width = query.shape[-1]
    return F.rms_norm(query, (width,), eps=1e-6), F.rms_norm(key_memory, (width,), eps=1e-6) / width**0.5


def external_by_blocks(
    factors: Factors,
    *,
    num_steps: int,
    chunk_size: int | None = None,
    merge: Merge | None = None,
    total: Merge | None = None,
) -> Tensor:
    """External attention (..., N, d_v), with the query's memory layout; the query must be 0 at masked tokens.

    There are K = `num_steps` Sinkhorn steps, 0 for a plain softmax over slots, and `chunk_size` tokens per chunk with
    all heads; None for groups of heads with all tokens. `merge` combines this process's L with the others';
    it requires `total`, which sums the gradient of L over them, in reverse mode for first derivatives only.
    """
    query, mask, leading = factors.query, factors.mask, factors.query.shape[:-2]
    if chunk_size is None and merge is None:
        query = query.reshape(-1, *query.shape[-3:]) if query.dim() > 4 else query[(None,) * (4 - query.dim())]
    mask = None if mask is None else mask.expand(factors.query.shape[:-1]).reshape(query.shape[:-1])
    blocks = _Blocks if torch.compiler.is_compiling() or merge is not None else _BlocksOfAnyMode
    given = factors._replace(query=query, mask=mask).in_autocast_type()
    if torch.compiler.is_compiling() and merge is None and not factors.learned:
        out = _in_compiled_graph(*given, num_steps, chunk_size)
    else:
        out = blocks.apply(*given, num_steps, chunk_size, merge, total)[0]
    # Not a view.
    return out if out.shape[:-2] == leading else out.reshape(*leading, *out.shape[-2:]).clone()


Tensors = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]
Inputs = tuple[*Tensors, int, int | None, Merge | None, Merge | None]
Index = EllipsisType | tuple[slice, slice]


class _Context(Protocol):
    """Saved for backward: the factors, the offsets and the options."""

    saved_tensors: tuple[*Tensors, Tensor]
    num_steps: int
    size: int | None
    merge: Merge | None
    total: Merge | None

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...
    def save_for_forward(self, *tensors: Tensor | None) -> None: ...
    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...


def _logits(query: Tensor, key_memory: Tensor, key_bias: Tensor | None) -> Tensor:
    """Logits as in the backward pass: with strides, half precision would round the product before it adds the bias."""
    return F.linear(query if key_bias is None else query.contiguous(), key_memory, key_bias)


class _Blocks(torch.autograd.Function):
    @staticmethod
    def forward(*inputs: *Inputs) -> tuple[Tensor, Tensor]:
        query, key_memory, value_memory, key_bias, value_bias, mask, num_steps, size, merge, _ = inputs
        out, slots = empty_like_heads(query, value_memory.shape[1]), key_memory.shape[0]
        wide = torch.promote_types(query.dtype, torch.float32)
        offsets = query.new_zeros((num_steps, *query.shape[:-2], 1, slots), dtype=wide)
        for heads, chunks in _blocks(query, slots, size, merge):
            some, there = query[heads], None if mask is None else mask[heads]
            joined = num_steps == 1 and len(chunks) == 1
            whole = Factors(some, key_memory, value_memory, key_bias, value_bias, there)
            if joined and merge is None and _at_once(whole, out[heads], offsets[0][heads]):
                continue
            kept: Tensor | None = None
            for k in range(num_steps):
                here = some.new_full((*some.shape[:-2], slots), -torch.inf, dtype=wide)
                for part in chunks:
                    logits = _logits(some[..., part, :], key_memory, key_bias).to(wide)
                    if k:
                        logits -= torch.logsumexp(logits - offsets[k - 1][heads], dim=-1, keepdim=True)
                    taking_part = None if there is None else there[..., part]
                    here = torch.logaddexp(here, slot_offset(logits, mask=taking_part))
                    kept = logits if joined else None
                # Slots without any token: any finite number is correct.
                here = here.masked_fill(here == -torch.inf, 0.0) if merge is None else merge(here)
                offsets[k][heads] = here.unsqueeze(-2)
            for part in chunks:
                logits = kept
                if logits is None:
                    logits = _logits(some[..., part, :], key_memory, key_bias).to(wide)
                if num_steps:
                    logits.sub_(offsets[-1][heads])
                weights = torch.softmax(logits, dim=-1, out=logits).to(query.dtype)  # pyrefly: ignore[no-matching-overload]
                mixed = F.linear(weights, value_memory.mT, value_bias)
                if there is not None:
                    mixed.masked_fill_(~there[..., part].unsqueeze(-1), 0.0)
                out[heads][..., part, :] = mixed
        return out, offsets

    @staticmethod
    def setup_context(ctx: _Context, inputs: Inputs, output: tuple[Tensor, Tensor]) -> None:
        *tensors, ctx.num_steps, ctx.size, ctx.merge, ctx.total = inputs
        ctx.save_for_backward(*tensors, output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: _Context, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        saved = ctx.saved_tensors  # Read once: torch.utils.checkpoint refuses a second read.
        query, key_memory, value_memory, key_bias, value_bias, mask, offsets = saved
        if torch.is_grad_enabled():
            if ctx.merge is not None:
                raise RuntimeError("external attention over several processes has a first derivative only")
            # Differentiable expressions of the reference, for second derivatives.
            run, there = _written(Factors(*saved[:6]), ctx.num_steps)
            found = iter(torch.func.vjp(run, *there)[1](grad))
            return *(None if tensor is None else next(found) for tensor in saved[:5]), *[None] * 5
        wide, last = offsets.dtype, ctx.num_steps - 1
        grad_query = empty_like_heads(query, query.shape[-1])
        grad_keys, grad_values = (t.new_zeros(t.shape, dtype=wide) for t in (key_memory, value_memory))
        grad_key_bias, grad_value_bias = (
            None if t is None else t.new_zeros(t.shape, dtype=wide) for t in (key_bias, value_bias)
        )
        for heads, chunks in _blocks(query, key_memory.shape[0], ctx.size, ctx.merge):
            joined = ctx.num_steps == 1 and len(chunks) == 1 and ctx.merge is None
            grad_before = query.new_zeros((*query[heads].shape[:-2], 1, key_memory.shape[0]), dtype=wide)
            grad_offset = grad_before
            # The output pass first, then the passes that computed offsets, in reverse.
            for k in range(last + 1, last if joined or not ctx.num_steps else -1, -1):
                if k <= last:
                    grad_offset = grad_before if ctx.total is None else ctx.total(grad_before)
                    grad_before = torch.zeros_like(grad_before)
                before = k - 1  # the offsets that this pass read; none for the first pass
                for part in chunks:
                    some = query[heads][..., part, :].contiguous()
                    left_out = None if mask is None else ~mask[heads][..., part].unsqueeze(-1)
                    logits = F.linear(some, key_memory, key_bias).to(wide)
                    if k == last + 1:
                        columns = logits if before < 0 else logits.sub_(offsets[before][heads])
                        weights, upstream = torch.softmax(columns, dim=-1), grad[heads][..., part, :].contiguous()
                        if left_out is not None:
                            weights.masked_fill_(left_out, 0.0)
                            upstream = upstream.masked_fill(left_out, 0.0)
                        grad_logits = F.linear(upstream, value_memory).to(wide).mul_(weights)
                        grad_logits.addcmul_(weights, grad_logits.sum(-1, keepdim=True), value=-1.0)
                        grad_values += _product(weights.to(query.dtype), upstream)
                        if grad_value_bias is not None:
                            grad_value_bias += upstream.flatten(0, -2).sum(0, dtype=wide)
                        if joined:
                            if left_out is not None:
                                columns.masked_fill_(left_out, -torch.inf)
                            grad_logits.addcmul_(columns.exp_(), grad_logits.sum(-2, keepdim=True), value=-1.0)
                        elif ctx.num_steps:
                            grad_before -= grad_logits.sum(-2, keepdim=True)
                    else:
                        shifted = logits if before < 0 else logits - offsets[before][heads]
                        rows = 0.0 if before < 0 else torch.logsumexp(shifted, dim=-1, keepdim=True)
                        columns = logits - rows - offsets[k][heads]
                        if left_out is not None:
                            columns.masked_fill_(left_out, -torch.inf)
                        grad_logits = columns.exp_().mul_(grad_offset)
                        if before >= 0:
                            through = torch.softmax(shifted, dim=-1) * -grad_logits.sum(-1, keepdim=True)
                            grad_before -= through.sum(-2, keepdim=True)
                            grad_logits += through
                    if grad_key_bias is not None:
                        grad_key_bias += grad_logits.flatten(0, -2).sum(0)
                    narrow = grad_logits.to(query.dtype)
                    grad_keys += _product(narrow, some)
                    if k == last + 1:
                        grad_query[heads][..., part, :] = narrow @ key_memory
                    else:
                        grad_query[heads][..., part, :] += narrow @ key_memory
        sums = (grad_keys, grad_values, grad_key_bias, grad_value_bias)
        return grad_query, *(None if each is None else each.to(query.dtype) for each in sums), *[None] * 5


@torch.library.custom_op("tokenmix::external_by_blocks", mutates_args=())
def _in_compiled_graph(
    query: Tensor,
    key_memory: Tensor,
    value_memory: Tensor,
    key_bias: Tensor | None,
    value_bias: Tensor | None,
    mask: Tensor | None,
    num_steps: int,
    chunk_size: int | None,
) -> Tensor:
    """The output without a gradient, as one operator; a compiler would compute all heads at once and miss the cache."""
    with torch.no_grad():
        given = query, key_memory, value_memory, key_bias, value_bias, mask
        return _Blocks.forward(*given, num_steps, chunk_size, None, None)[0]


@_in_compiled_graph.register_fake
def _(query: Tensor, key_memory: Tensor, value_memory: Tensor, *_: object) -> Tensor:
    return empty_like_heads(query, value_memory.shape[1])


def _at_once(factors: Factors, out: Tensor, offset: Tensor) -> bool:
    """Fill `out` and `offset` in place, with one exponential per entry and no shift; return False if that is not safe.

    Not safe: a sum near the limits of the number range; otherwise the result is exact to the last bits. Also not safe:
    graphs and GPUs, where reading values is impossible or would synchronize. A separate function frees the map before
    the next map uses the same memory.
    """
    query, key_memory, value_memory, key_bias, value_bias, mask = factors
    if (
        type(query) is not Tensor
        or not query.is_cpu
        or torch.compiler.is_compiling()
        or not query.numel() * key_memory.numel()
    ):
        return False
    logits = F.linear(query, key_memory, key_bias)
    weights = logits.to(torch.promote_types(logits.dtype, torch.float32)).exp_()
    left_out = None if mask is None else ~mask.unsqueeze(-1)
    if left_out is not None:
        weights.masked_fill_(left_out, 0.0)
    columns, tiny = weights.sum(-2, keepdim=True), torch.finfo(weights.dtype).tiny
    if not (columns.amin() > tiny**0.5 and columns.amax() < torch.inf):
        return False
    rows = weights.div_(columns).sum(-1, keepdim=True)
    if left_out is not None:
        rows.masked_fill_(left_out, 1.0)
    # With columns of at least tiny^(1/2), underflow in a row is less than tiny^(1/4) of the row.
    if not rows.amin() > tiny**0.25:
        return False
    weights = weights.div_(rows).to(query.dtype)
    if out.is_contiguous() and value_bias is None:
        torch.mm(weights.flatten(0, -2), value_memory, out=out.view(-1, out.shape[-1]))
    else:
        out.copy_(F.linear(weights, value_memory.mT, value_bias))
    if left_out is not None:
        out.masked_fill_(left_out, 0.0)
    offset.copy_(columns.log_())
    return True


class _VmapInfo(Protocol):
    batch_size: int


class _BlocksOfAnyMode(_Blocks):
    """`_Blocks` with rules for forward mode and vmap, which `torch.compile` rejects."""

    @staticmethod
    def setup_context(ctx: _Context, inputs: Inputs, output: tuple[Tensor, Tensor]) -> None:
        _Blocks.setup_context(ctx, inputs, output)
        ctx.save_for_forward(*inputs[:6])

    @staticmethod
    def jvp(ctx: _Context, *tangents: Tensor | None) -> tuple[Tensor, None]:
        """The reference's, as the transpose of the transpose: custom forward-mode rules cannot be nested."""
        tensors = ctx.saved_tensors[:6]
        run, there = _written(Factors(*tensors), ctx.num_steps)
        directions = [
            torch.zeros_like(tensor) if tangent is None else tangent
            for tensor, tangent in zip(tensors[:5], tangents[:5], strict=True)
            if tensor is not None
        ]
        out, pull = torch.func.vjp(run, *there)[:2]
        return torch.func.vjp(pull, torch.zeros_like(out))[1](tuple(directions))[0], None

    @staticmethod
    def vmap(info: _VmapInfo, in_dims: tuple[int | None, ...], *args: object) -> object:
        """One call per sample, each with its own memories and mask."""

        def of_sample(arg: object, dim: int | None, i: int) -> object:
            return arg.select(dim, i) if isinstance(arg, Tensor) and dim is not None else arg

        calls = [
            _BlocksOfAnyMode.apply(*(of_sample(arg, dim, i) for arg, dim in zip(args, in_dims, strict=True)))
            for i in range(info.batch_size)
        ]
        out, offsets = (torch.stack(each) for each in zip(*calls, strict=True))
        return (out, offsets), (0, 0)


def _written(factors: Factors, num_steps: int) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """The reference as a function of its differentiable tensors that are not None, and these tensors."""
    named = {name: tensor for name, tensor in factors._asdict().items() if tensor is not None and name != "mask"}

    def run(*there: Tensor) -> Tensor:
        moved = factors._replace(**dict(zip(named, there, strict=True)))
        return reference(moved, "double" if num_steps else "softmax", max(1, num_steps))

    return run, list(named.values())


def _blocks(query: Tensor, slots: int, size: int | None, merge: Merge | None) -> Iterator[tuple[Index, list[slice]]]:
    """Indices into leading axes, and token chunks; without a size, blocks of about TILE_ENTRIES map entries."""
    num_tokens = query.shape[-2]
    if size is not None or merge is not None:
        size = size or max(1, num_tokens)
        yield ..., [slice(start, start + size) for start in range(0, num_tokens, size)]
        return
    num_samples, num_heads = query.shape[:2]
    together = max(1, TILE_ENTRIES // max(1, num_tokens * slots))
    samples = max(1, together // max(1, num_heads))
    # Groups of nearly equal size, which may exceed the limit a little.
    heads = max(1, math.ceil(num_heads / math.ceil(max(1, num_heads) / (1.1 * together))))
    for sample in range(0, num_samples, samples):
        for head in range(0, num_heads, heads):
            yield (slice(sample, sample + samples), slice(head, head + heads)), [slice(0, num_tokens)]


def _product(left: Tensor, right: Tensor) -> Tensor:
    """The sum over all but the last axis of (..., a)^T (..., c), (a, c)."""
    return left.flatten(0, -2).mT @ right.flatten(0, -2)
