"""External attention: tokens attend to two learned memories of S slots, with cost linear in N; also sharded."""

from typing import Literal, TypedDict, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tokenmix.errors import UserError
from tokenmix.kernels.support import require_triton
from tokenmix.ops.attention import attention
from tokenmix.ops.checks import check_choice, check_chunk_size, check_rates, check_tensor, check_whole
from tokenmix.ops.external_blocks import Factors, Normalization, cosine, external_by_blocks, reference_map
from tokenmix.ops.normalize import broadcast_mask, double_normalize, slot_offset

Backend = Literal["eager", "tiled", "sdpa", "triton"]


class Options(TypedDict):
    """Arguments that a layer passes unchanged to `external_attention`."""

    normalization: Normalization
    num_steps: int
    chunk_size: int | None
    backend: Backend | None


WHOLE_MAP = ("sigmoid", "entmax15")
"""Normalisations that need the materialized map."""

# Several heads with larger maps, or a quarter of this size without a gradient, are computed in tiles.
LEAST_ENTRIES = 2**21


def external_attention(
    query: Tensor,
    key_memory: Tensor,
    value_memory: Tensor,
    *,
    key_bias: Tensor | None = None,
    value_bias: Tensor | None = None,
    mask: Tensor | None = None,
    normalization: Normalization = "double",
    num_steps: int = 1,
    chunk_size: int | None = None,
    dropout: float = 0.0,
    backend: Backend | None = None,
) -> Tensor:
    """Attention to S learned slots instead of N tokens.

        A   = Norm(F M_k^T + b_k)
        out = A M_v + b_v

    The biases are from the released multi-head code; the paper has none. Under double normalisation b_k cancels
    exactly, because b_k shifts a slot's logits and offset alike. Its gradient is then 0 up to rounding; b_k only
    matters for `"softmax"` and `"sigmoid"`.

    All backends compute `tokenmix.ops.external_blocks.reference`. docs/guides/cost.md compares their times with the two
    plain products.

    Args:
        query: F, (B, H, N, d) or any other leading axes.
        key_memory: M_k, (S, d).
        value_memory: M_v, (S, d_v).
        key_bias: b_k, (S,).
        value_bias: b_v, (d_v,).
        mask: bool, True = the token takes part; (B, N) or (..., N). Masked tokens may hold any value, NaN included, and
            are 0 in the output.
        normalization: `"double"`, see `double_normalize`, or a variant: `"sigmoid"` replaces the exponential by the
            sigmoid, `"l2"` uses sqrt(d) cos(F, M_k) as logits, `"entmax15"` is sparse over the slots. `"softmax"` over
            the slots does not mix tokens.
        num_steps: Sinkhorn steps; 1 for `"softmax"` and `"entmax15"`.
        chunk_size: tokens per chunk, forward and backward. Working memory is then O(chunk_size * S) per head for any N,
            and the tokens are read num_steps + 1 times. The derivatives of torch.func keep the maps. Exported and
            traced graphs use one chunk for any N. Not with a backend.
        dropout: rate on A; not with chunk_size.
        backend: implementation by name; the call fails if this backend cannot compute it. `"eager"` materializes the
            map. `"tiled"` works on groups of heads whose map fits the cache, and recomputes the map for the gradient.
            `"triton"` is fused on a CUDA device and never materializes the map. `"sdpa"` is PyTorch's attention over
            the slots. All but `"eager"` need one Sinkhorn step and no dropout. None selects `"eager"`, or on a CPU
            `"tiled"` for several heads with more than 2^21 map entries (2^19 without a gradient). Calls with dropout,
            exported and traced calls, and compiled calls with a gradient always use `"eager"`.

    Returns:
        (..., N, d_v), in the query's dtype; half precision is normalised in float32.

    Reference: Guo et al., arXiv 2105.02358, equations 5 and 6.
    """
    check_options(normalization, num_steps, chunk_size, dropout, backend)
    factors = checked_factors(Factors(query, key_memory, value_memory, key_bias, value_bias, mask))
    if normalization == "l2":
        query, key_memory = cosine(factors.query, factors.key_memory)
        factors, normalization = factors._replace(query=query, key_memory=key_memory), "double"
    if normalization in WHOLE_MAP:
        backend = "eager"
    steps = num_steps if normalization == "double" else 0
    in_graph = torch.compiler.is_exporting() or torch.jit.is_tracing()
    if chunk_size is not None and not in_graph and chunk_size < query.shape[-2]:
        return external_by_blocks(factors, num_steps=steps, chunk_size=chunk_size)
    chosen = backend or "eager"
    # A saved graph may contain PyTorch's operators only, and a compiler fuses them if there is a gradient.
    written = in_graph or (torch.compiler.is_compiling() and factors.learned)
    if backend is None and query.is_cpu and query.dim() > 3 and dropout == 0.0 and num_steps == 1 and not written:
        entries = query.shape[:-1].numel() * key_memory.shape[0]
        least = LEAST_ENTRIES if factors.learned else LEAST_ENTRIES // 4
        chosen = "tiled" if query.shape[-3] > 1 and entries > least else "eager"
    if chosen == "eager":
        return _eager(factors, normalization, num_steps, dropout)
    if num_steps != 1:
        raise UserError(f"backend={chosen!r} has one Sinkhorn step, got num_steps={num_steps}; use 'eager'")
    if chosen == "tiled":
        return external_by_blocks(factors, num_steps=steps)
    if chosen == "sdpa":
        return _by_sdpa(factors, double=bool(steps))
    factors = factors.in_autocast_type()
    require_triton("external_attention", *factors[:5], mask=factors.mask)
    # This imports triton, which a CPU does not need.
    from tokenmix.kernels.external import fused_external_attention

    return fused_external_attention(*factors, double=bool(steps))


def external_attention_map(
    query: Tensor,
    key_memory: Tensor,
    *,
    key_bias: Tensor | None = None,
    mask: Tensor | None = None,
    normalization: Normalization = "double",
    num_steps: int = 1,
) -> Tensor:
    """The map A (..., N, S) of `external_attention` with the same arguments; rows of masked tokens are 0."""
    check_options(normalization, num_steps)
    factors = checked_factors(Factors(query, key_memory, key_memory, key_bias, None, mask))
    return reference_map(factors, normalization, num_steps)


def check_options(
    normalization: str,
    num_steps: int = 1,
    chunk_size: int | None = None,
    dropout: float = 0.0,
    backend: Backend | None = None,
) -> None:
    """Raise `UserError` for unknown or incompatible options."""
    check_choice("normalization", normalization, get_args(Normalization))
    check_whole(num_steps=num_steps)
    check_chunk_size(chunk_size)
    check_rates(dropout=dropout)
    if normalization in ("softmax", "entmax15") and num_steps != 1:
        raise UserError(
            f"normalization={normalization!r} has no Sinkhorn steps, got num_steps={num_steps}; leave it at 1 or use "
            "'double'"
        )
    if chunk_size is not None and dropout > 0.0:
        raise UserError(
            f"chunk_size={chunk_size} excludes dropout of the map, got {dropout}; set one of them to None or 0"
        )
    if backend is not None:
        check_choice("backend", backend, get_args(Backend))
        if chunk_size is not None:
            raise UserError(
                f"backend={backend!r} does all tokens at once, got chunk_size={chunk_size}; leave one of them out"
            )
        if backend != "eager" and dropout > 0.0:
            raise UserError(
                f"backend={backend!r} has no dropout of the map, got dropout={dropout}; set it to 0 or use "
                "backend='eager'"
            )
    if normalization in WHOLE_MAP:
        if backend not in (None, "eager"):
            raise UserError(f"backend={backend!r} has no normalization={normalization!r}; leave backend out")
        if chunk_size is not None:
            raise UserError(f"normalization={normalization!r} does all tokens at once; leave chunk_size out")


def checked_factors(factors: Factors) -> Factors:
    """Check the tensors, set masked tokens of the query to 0 (no NaN in gradients), broadcast the mask."""
    query, key_memory, value_memory, key_bias, value_bias, mask = factors
    for name, tensor in (("query", query), ("key_memory", key_memory), ("value_memory", value_memory)):
        check_tensor(name, tensor)
    if query.dim() < 2 or key_memory.dim() != 2 or query.shape[-1] != key_memory.shape[-1]:
        raise UserError(
            f"external attention takes query (..., N, d) and key_memory (S, d) of one width d, "
            f"got {tuple(query.shape)} and {tuple(key_memory.shape)}; project the query to the width of the memory"
        )
    if key_bias is not None and key_bias.shape != key_memory.shape[:1]:
        raise UserError(
            f"key_bias must be (S,) = {tuple(key_memory.shape[:1])}, got {tuple(key_bias.shape)}; it has a number for "
            "each slot"
        )
    if value_memory.dim() != 2 or value_memory.shape[0] != key_memory.shape[0]:
        raise UserError(
            f"value_memory must be (S = {key_memory.shape[0]}, d_v), got {tuple(value_memory.shape)}; both memories "
            "have a row for each slot"
        )
    if value_bias is not None and value_bias.shape != value_memory.shape[1:]:
        raise UserError(
            f"value_bias must be (d_v,) = {tuple(value_memory.shape[1:])}, got {tuple(value_bias.shape)}; it is added "
            "to each token's output"
        )
    if mask is not None:
        mask = broadcast_mask(mask, query)
        # Unlike masked_fill, this keeps the memory layout of adjacent heads.
        query = torch.where(mask.unsqueeze(-1), query, 0.0)
    return Factors(query, key_memory, value_memory, key_bias, value_bias, mask)


def _eager(factors: Factors, normalization: Normalization, num_steps: int, dropout: float) -> Tensor:
    query, key_memory, value_memory, key_bias, value_bias, mask = factors
    plain = mask is None and key_bias is None and normalization == "double" and num_steps == 1
    # Two fused softmaxes give the same result. They cannot handle a slot with all logits -inf, which only a bias or
    # float16 causes. On CUDA the first softmax would use one thread block for all tokens of a head.
    if plain and query.device.type == "cpu":
        # One name, so that each step writes to memory that is still in the cache.
        weights = F.linear(query, key_memory)
        if weights.dtype in (torch.float32, torch.float64):
            weights = torch.log_softmax(weights, dim=-2)
            weights = torch.softmax(weights, dim=-1)
        else:
            weights = double_normalize(weights)
    else:
        weights = reference_map(factors, normalization, num_steps)
    if dropout > 0.0:
        weights = F.dropout(weights, dropout)
    out = F.linear(weights, value_memory.t(), value_bias)
    return out if mask is None or value_bias is None else out.masked_fill(~mask.unsqueeze(-1), 0.0)


def _by_sdpa(factors: Factors, *, double: bool) -> Tensor:
    """PyTorch's attention over the slots, with their offset as bias; compared with `tokenmix.kernels`.

        out = SDPA(F, M_k, M_v, bias = b_k - L, scale = 1) + b_v

    The logits are written once, to compute L. In the forward pass the map stays inside the kernel.
    """
    query, key_memory, value_memory, key_bias, value_bias, mask = factors
    shift = query.new_zeros(key_memory.shape[0]) if key_bias is None else key_bias
    if double:
        offset = slot_offset(F.linear(query, key_memory, key_bias), mask=mask)
        offset = offset.masked_fill(offset == -torch.inf, 0.0)
        # A softmax is invariant to a common shift, and half precision rounds small numbers less.
        shift = (shift - (offset - offset.mean(-1, keepdim=True))).unsqueeze(-2).to(query.dtype)
    keys, values = (m.expand(*query.shape[:-2], *m.shape) for m in (key_memory, value_memory))
    bias = shift.expand(*query.shape[:-1], key_memory.shape[0])
    out = attention(query, keys, values, bias=bias, scale=1.0)
    if value_bias is not None:
        out = out + value_bias
    if mask is not None:
        return out.masked_fill(~mask.unsqueeze(-1), 0.0)
    return out.clone() if out.dim() == 3 else out  # without a head axis PyTorch's attention returns a view


def sharded_external_attention(
    query: Tensor,
    key_memory: Tensor,
    value_memory: Tensor,
    *,
    key_bias: Tensor | None = None,
    value_bias: Tensor | None = None,
    mask: Tensor | None = None,
    num_steps: int = 1,
    chunk_size: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """`external_attention` with double normalisation and the tokens split over processes.

        L_j  = log sum_r exp(L_rj),   L_rj = log sum_(i on rank r) exp(a_ij)
        A_ij = softmax_j (a_ij - L_j)

    Only L crosses ranks. Per sample, head and slot, this is a maximum and a sum forward and a gradient backward: 12
    bytes in float32 for any N, times num_steps.

    Every rank of the group must call the function, with the same number of samples and heads, the same memories and the
    same options. The number of tokens may differ and may be 0. All ranks must run the same number of backward passes.
    Only first derivatives are supported.

    The gradient of `query` is complete. Gradients of memories and biases cover only the rank's tokens: sum them over
    the ranks, as DistributedDataParallel does (as a mean).

    Args:
        query: F of the rank's tokens, (B, H, N_r, d) or any other leading axes.
        mask: of the rank's tokens, (B, N_r) or (..., N_r).
        key_memory, value_memory, key_bias, value_bias, num_steps, chunk_size: as in `external_attention`.
        group: process group; None for all processes.

    Returns:
        (..., N_r, d_v) for the rank's tokens; masked tokens are 0.

    Raises:
        UserError: there is no process group, or `external_attention` rejects the arguments.

    Reference: Guo et al., arXiv 2105.02358, equations 5 and 6; sharding is an extension.
    """
    check_options("double", num_steps, chunk_size)
    factors = checked_factors(Factors(query, key_memory, value_memory, key_bias, value_bias, mask))
    if not (dist.is_available() and dist.is_initialized()):
        raise UserError(
            "sharded_external_attention found no process group: start the program with torchrun and call "
            "torch.distributed.init_process_group, or use external_attention in a single process"
        )

    def total(here: Tensor) -> Tensor:
        summed = here.contiguous().clone()
        dist.all_reduce(summed, dist.ReduceOp.SUM, group)
        return summed

    def merge(here: Tensor) -> Tensor:
        """L of all ranks from the rank's own L; 0 for a slot that no token reaches."""
        largest = here.contiguous().clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        largest = largest.masked_fill(torch.isneginf(largest), 0.0)
        merged = largest + torch.log(total(torch.exp(here - largest)))
        return merged.masked_fill(torch.isneginf(merged), 0.0)

    return external_by_blocks(factors, num_steps=num_steps, chunk_size=chunk_size, merge=merge, total=total)
