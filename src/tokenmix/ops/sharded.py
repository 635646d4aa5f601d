"""External attention with tokens sharded over processes: communication does not grow with N."""

from collections.abc import Callable
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tokenmix.errors import UserError
from tokenmix.ops.external.api import check_chunks, check_memories, check_normalization, without_padding
from tokenmix.ops.normalize import slot_offset


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
        key_memory: M_k, (S, d).
        value_memory: M_v, (S, d_v).
        key_bias: b_k, (S,).
        value_bias: b_v, (d_v,).
        mask: bool, True = the token takes part; of the rank's tokens, (B, N_r) or (..., N_r).
        num_steps: Sinkhorn steps.
        chunk_size: tokens that are worked on at a time; each chunk's map is made again in the backward pass.
        group: the processes; None for all.

    Returns:
        (..., N_r, d_v) of the rank's tokens; masked ones are 0.

    Raises:
        UserError: no process group, or what `external_attention` refuses.
    """
    check_normalization("double", num_steps)
    check_chunks(chunk_size, 0.0)
    check_memories(query, key_memory, value_memory, key_bias, value_bias)
    _check_group()
    query, full = without_padding(query, mask)
    logits_of = partial(_logits, key_memory=key_memory, key_bias=key_bias)
    if chunk_size is None:
        parts, masks, run = [logits_of(query, full)], [full], _once
        logits_of = _ready
    else:
        parts, run = query.split(chunk_size, dim=-2), _again_in_backward
        masks = [None] * len(parts) if full is None else full.split(chunk_size, dim=-1)

    def collect(part: Tensor, mask: Tensor | None, offset: Tensor | None) -> Tensor:
        logits = logits_of(part, mask)
        if offset is not None:
            logits = logits - torch.logsumexp(logits - offset, dim=-1, keepdim=True)
        return slot_offset(logits, mask=mask)

    def emit(part: Tensor, mask: Tensor | None, offset: Tensor | None) -> Tensor:
        assert offset is not None
        shares = torch.softmax(logits_of(part, mask) - offset, dim=-1).to(query.dtype)
        out = F.linear(shares, value_memory.mT, value_bias)
        return out if mask is None else out.masked_fill(~mask.unsqueeze(-1), 0.0)

    offset = None
    for _ in range(num_steps):
        local = torch.stack([run(collect, part, m, offset) for part, m in zip(parts, masks, strict=True)])
        offset = cast(Tensor, _Merge.apply(torch.logsumexp(local, dim=0), group)).unsqueeze(-2)
    return torch.cat([run(emit, part, m, offset) for part, m in zip(parts, masks, strict=True)], dim=-2)


def _once(work: Callable[..., Tensor], *arguments: Tensor | None) -> Tensor:
    return work(*arguments)


def _again_in_backward(work: Callable[..., Tensor], *arguments: Tensor | None) -> Tensor:
    return cast(Tensor, checkpoint(work, *arguments, use_reentrant=False))


def _ready(logits: Tensor, mask: Tensor | None) -> Tensor:
    """Logits that are there already: without chunks one pass makes them for all steps."""
    return logits


class _Merge(torch.autograd.Function):
    """L of all ranks from the rank's own, 0 where no token reaches a slot."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, local: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        largest = local.contiguous().clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        largest = largest.masked_fill(torch.isneginf(largest), 0.0)
        total = torch.exp(local - largest)
        dist.all_reduce(total, dist.ReduceOp.SUM, group)
        merged = largest + torch.log(total)
        merged = merged.masked_fill(torch.isneginf(merged), 0.0)
        ctx.save_for_backward(torch.exp(local - merged))
        ctx.group = group  # pyrefly: ignore[missing-attribute]
        return merged

    @staticmethod
    @once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:  # pyrefly: ignore[bad-override]
        (share,) = ctx.saved_tensors  # pyrefly: ignore[missing-attribute]
        total = grad.contiguous().clone()
        dist.all_reduce(total, dist.ReduceOp.SUM, ctx.group)  # pyrefly: ignore[missing-attribute]
        return total * share, None


def _logits(query: Tensor, mask: Tensor | None, key_memory: Tensor, key_bias: Tensor | None) -> Tensor:
    """Wide logits, neutral where a token takes no part."""
    logits = F.linear(query, key_memory, key_bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if mask is None else logits.masked_fill(~mask.unsqueeze(-1), 0.0)


def _check_group() -> None:
    if not (dist.is_available() and dist.is_initialized()):
        raise UserError(
            "sharded_external_attention found no process group: start the program with torchrun and call "
            "torch.distributed.init_process_group, or use external_attention in a single process"
        )
