"""External attention with tokens sharded over processes: communication does not grow with N."""

import torch
import torch.distributed as dist
from torch import Tensor

from tokenmix.errors import UserError
from tokenmix.ops.external.api import check_chunks, checked_factors
from tokenmix.ops.external.blocks import external_by_blocks


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
    check_chunks(chunk_size, 0.0)
    factors = checked_factors(query, key_memory, value_memory, key_bias, value_bias, mask, "double", num_steps)
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
