"""External attention: tokens attend to two learned memories of S slots, in time linear in N; also over processes."""

from typing import Literal, TypedDict, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from tokenmix.errors import UserError
from tokenmix.kernels.support import require_triton
from tokenmix.ops.attention import attention
from tokenmix.ops.checks import check_choice, check_chunk_size, check_rates, check_tensor, check_whole
from tokenmix.ops.external_blocks import Factors, Normalization, cosine, external_by_blocks, reference_map
from tokenmix.ops.normalize import broadcast_mask, double_normalize, slot_offset

Backend = Literal["eager", "tiled", "sdpa", "triton"]


class Options(TypedDict):
    """What a layer passes on to `external_attention` as it is."""

    normalization: Normalization
    num_steps: int
    chunk_size: int | None
    backend: Backend | None


WHOLE_MAP = ("sigmoid", "entmax15")
"""Normalisations of the materialized map alone."""

# Several heads whose maps have more entries than this, or a quarter of it without a gradient, are worked on in tiles.
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

    Paper: Guo et al., arXiv 2105.02358, equations 5 and 6. The biases are those of the released multi-head code; the
    paper has none. Under double normalisation b_k cancels exactly (it shifts a slot's logits and its offset alike), so
    its gradient is 0 up to rounding; it acts under `"softmax"` only.

    Args:
        query: F, (B, H, N, d) or any other leading axes.
        key_memory: M_k, (S, d).
        value_memory: M_v, (S, d_v).
        key_bias: b_k, (S,).
        value_bias: b_v, (d_v,).
        mask: bool, True = the token takes part; (B, N) or (..., N). The others may hold anything, NaN
            included, and are 0 in the output.
        normalization: `"double"`, see `double_normalize`, or a form of it: `"sigmoid"` puts the sigmoid in place of the
            exponential, `"l2"` takes sqrt(d) cos(F, M_k) as logits, `"entmax15"` is sparse over the slots.
            `"softmax"`, over the slots alone, does not mix tokens.
        num_steps: Sinkhorn steps; 1 for `"softmax"` and `"entmax15"`.
        chunk_size: tokens that are worked on at a time, forward and backward. Working memory is then
            O(chunk_size * S) a head, whatever N; the tokens are read num_steps + 1 times. Under the derivatives of
            torch.func the maps are kept; an exported or traced graph does all at once, for any N. Not with a backend.
        dropout: probability of dropping an entry of A; not with chunk_size.
        backend: an implementation by name; it computes the call or raises. `"eager"` materializes the map. `"tiled"`
            works on groups of heads whose map stays in the cache and recomputes it for the gradient. None is
            `"tiled"` on a CPU, without dropout, for several heads whose maps have more than 2^21 entries, or 2^19
            without a gradient, unless the call is exported, traced, or compiled with a gradient; else `"eager"`.
            `"triton"` is fused on a CUDA device and never materializes the map; `"sdpa"` is PyTorch's attention over
            the slots. All but `"eager"` have one Sinkhorn step, and no dropout.

    All backends compute `tokenmix.ops.external_blocks.reference`. How long they take next to the two bare products:
    docs/benchmarks.md.

    Returns:
        (..., N, d_v), in the query's type; half precision is normalised in float32.
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
    # A saved graph holds PyTorch's operators only, and with a gradient a compiler fuses them.
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
    # It imports triton, which a CPU does without.
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
    """The map A (..., N, S) that `external_attention` uses with the same arguments; rows of masked tokens are 0."""
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
    """Raise `UserError` for an option that is not there, or options that exclude each other."""
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
    """The tensors if they fit each other, the query with 0 where no token takes part, so that no value there, NaN
    included, reaches a memory's gradient. The mask then broadcasts against the tokens (..., N).
    """
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
        # Other than masked_fill it keeps the layout of heads that lie side by side.
        query = torch.where(mask.unsqueeze(-1), query, 0.0)
    return Factors(query, key_memory, value_memory, key_bias, value_bias, mask)


def _eager(factors: Factors, normalization: Normalization, num_steps: int, dropout: float) -> Tensor:
    query, key_memory, value_memory, key_bias, value_bias, mask = factors
    plain = mask is None and key_bias is None and normalization == "double" and num_steps == 1
    # The same in two fused softmaxes. They cannot have a slot that is closed by -inf, which only a bias or float16
    # brings; on CUDA the first would have one block of threads for all tokens of a head.
    if plain and query.device.type == "cpu":
        # One name, so that each step writes where the one before was, which the cache still holds.
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
    """PyTorch's attention over the slots, with a bias that is their offset; for comparison with `tokenmix.kernels`.

        out = SDPA(F, M_k, M_v, bias = b_k - L, scale = 1) + b_v

    L is made from logits that are written once; the map after it stays inside the kernel that PyTorch picks, forward.
    """
    query, key_memory, value_memory, key_bias, value_bias, mask = factors
    shift = query.new_zeros(key_memory.shape[0]) if key_bias is None else key_bias
    if double:
        offset = slot_offset(F.linear(query, key_memory, key_bias), mask=mask)
        offset = offset.masked_fill(offset == -torch.inf, 0.0)
        # A softmax does not see what all slots have in common, and half precision rounds a small number less.
        shift = (shift - (offset - offset.mean(-1, keepdim=True))).unsqueeze(-2).to(query.dtype)
    keys, values = (m.expand(*query.shape[:-2], *m.shape) for m in (key_memory, value_memory))
    bias = shift.expand(*query.shape[:-1], key_memory.shape[0])
    out = attention(query, keys, values, bias=bias, scale=1.0)
    if value_bias is not None:
        out = out + value_bias
    if mask is not None:
        return out.masked_fill(~mask.unsqueeze(-1), 0.0)
    return out.clone() if out.dim() == 3 else out  # without an axis of heads PyTorch's attention returns a view


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
    """`external_attention` with double normalisation, each process holding some of the tokens.

        L_j  = log sum_r exp(L_rj),   L_rj = log sum_(i on rank r) exp(a_ij)
        A_ij = softmax_j (a_ij - L_j)

    Only L crosses ranks: for each sample, head and slot its maximum and its sum forward and one gradient backward, 12
    bytes in float32, whatever N, times num_steps. Every rank of the group must call it, with as many samples and heads,
    the same memories and options, and any number of tokens, 0 included; and go backward through it equally often.

    The gradient of `query` is complete. Those of memories and biases only cover the rank's own tokens: they must be
    summed over the ranks like those of any other parameter that the tokens share, which DistributedDataParallel does
    (as a mean). It has a first derivative only.

    Paper: Guo et al., arXiv 2105.02358, equations 5 and 6; that they shard is ours.

    Args:
        query: F of the rank's tokens, (B, H, N_r, d) or any other leading axes.
        mask: of the rank's tokens, (B, N_r) or (..., N_r).
        key_memory, value_memory, key_bias, value_bias, num_steps, chunk_size: as in `external_attention`.
        group: the processes; None for all.

    Returns:
        (..., N_r, d_v) of the rank's tokens; masked ones are 0.

    Raises:
        UserError: no process group, or what `external_attention` refuses.
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
        """L of all ranks from the rank's own, 0 where no token reaches a slot."""
        largest = here.contiguous().clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        largest = largest.masked_fill(torch.isneginf(largest), 0.0)
        merged = largest + torch.log(total(torch.exp(here - largest)))
        return merged.masked_fill(torch.isneginf(merged), 0.0)

    return external_by_blocks(factors, num_steps=num_steps, chunk_size=chunk_size, merge=merge, total=total)
