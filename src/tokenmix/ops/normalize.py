"""Double normalisation: a softmax over tokens, then L1 over slots, in one numerically stable expression."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from tokenmix.errors import UserError
from tokenmix.ops.checks import check_mask_type, check_tensors, check_whole


def slot_offset(logits: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Log-sum-exp of each slot's logits over the tokens.

        L_j = log sum_i exp(a_ij)

    Only L mixes tokens. `torch.logaddexp` merges the L of two parts of a sequence, which allows streaming and sharding.

    Args:
        logits: a, (..., N, S).
        mask: bool, True = the token takes part; (B, N), or (..., N) with as many axes as L has.

    Returns:
        L (..., S), float32 for half precision; -inf if all tokens are masked.
    """
    check_tensors(logits=logits)
    wide = widen(logits)
    if mask is not None:
        wide = wide.masked_fill(_left_out(mask, logits), -torch.inf)
    return torch.logsumexp(wide, dim=-2)


def double_normalize(logits: Tensor, *, mask: Tensor | None = None, num_steps: int = 1, sparse: bool = False) -> Tensor:
    """Softmax over the tokens, then L1 over the slots.

        L_j  = logsumexp_i a_ij
        A_ij = softmax_j (a_ij - L_j)

    The two published divisions cancel into one softmax with an offset per slot. No epsilon is needed: nothing
    underflows to 0/0, and every row sums to 1 at any scale of the logits. (The released code adds 1e-9 to the row sums,
    which is 0 in float16.)

    More steps are Sinkhorn's iteration, which ends with the rows: L^k_j = logsumexp_i (a_ij - r^(k-1)_i),
    r^k_i = logsumexp_j (a_ij - L^k_j).

    Args:
        logits: a, (..., N, S) with tokens on axis -2 and slots on axis -1.
        mask: bool, True = the token takes part; (B, N), or (..., N) with one axis less than the logits. Masked tokens
            are excluded from L, and their rows are 0.
        num_steps: Sinkhorn steps, each a pass over columns and one over rows.
        sparse: `entmax15` instead of the last softmax over the slots.

    Returns:
        A (..., N, S) in the dtype of the logits; half precision is computed in float32.

    Reference: Guo et al., Beyond Self-attention: External Attention using Two Linear Layers, arXiv 2105.02358, equation
    6.
    """
    check_tensors(logits=logits)
    check_whole(num_steps=num_steps)
    wide = widen(logits)
    if mask is not None:
        # Neutral values keep padding, NaN included, out of the result and the gradient.
        wide = wide.masked_fill(_left_out(mask, logits), 0.0)
    offset = _finite(slot_offset(wide, mask=mask))
    for _ in range(num_steps - 1):
        rows = torch.logsumexp(wide - offset, dim=-1, keepdim=True)
        offset = _finite(slot_offset(wide - rows, mask=mask))
    weights = entmax15(wide - offset) if sparse else torch.softmax(wide - offset, dim=-1)
    if mask is not None:
        weights = weights.masked_fill(_left_out(mask, logits), 0.0)
    return weights.to(logits.dtype)


def entmax15(logits: Tensor) -> Tensor:
    """A sparse softmax over the last axis: 1.5-entmax.

        p_j = max(a_j / 2 - tau, 0)^2,   tau such that sum_j p_j = 1

    Shape: logits a (..., S) to p (..., S) in their dtype. Rows sum to 1.

    Reference: Peters, Niculae, Martins, Sparse Sequence-to-Sequence Models, 2019, arXiv 1905.05702, Algorithm 2.
    """
    half = widen(logits) / 2
    half = half - half.detach().amax(-1, keepdim=True)
    with torch.no_grad():  # The support: the largest number of leading entries with tau below the last of them.
        ordered = half.sort(dim=-1, descending=True).values
        ranks = torch.arange(1, ordered.shape[-1] + 1, device=ordered.device, dtype=ordered.dtype)
        taus = _threshold(ordered.cumsum(-1), ordered.square().cumsum(-1), ranks)
        support = half >= ordered.gather(-1, (taus <= ordered).sum(-1, keepdim=True).clamp_min(1) - 1)
    inside = torch.where(support, half, 0.0)
    tau = _threshold(inside.sum(-1, True), inside.square().sum(-1, True), support.sum(-1, keepdim=True))
    return torch.where(support, half - tau, 0.0).clamp_min(0.0).square().to(logits.dtype)


def _threshold(total: Tensor, squares: Tensor, count: Tensor) -> Tensor:
    """tau of `count` entries with this sum and sum of squares."""
    mean = total / count
    return mean - ((1.0 - (squares - total * mean)) / count).clamp_min(0.0).sqrt()


def broadcast_mask(mask: Tensor, logits: Tensor) -> Tensor:
    """Broadcast a token mask (B, N), or (..., N) of full rank, against the tokens of the logits."""
    tokens = logits.shape[:-1]
    check_mask_type(mask)
    if mask.device != logits.device:
        raise UserError(f"all tensors must be on one device, got {logits.device}, {mask.device}; move the mask")
    full = mask
    if mask.dim() == 2 and len(tokens) > 2:
        full = mask.reshape(mask.shape[0], *[1] * (len(tokens) - 2), mask.shape[1])
    fits = full.dim() == len(tokens) and all(m in (n, 1) for m, n in zip(full.shape, tokens, strict=True))
    if not fits or full.shape[-1] != tokens[-1]:
        raise UserError(
            f"mask must be (B, N) or {tuple(tokens)} for logits {tuple(logits.shape)}, got {tuple(mask.shape)}; "
            "give one bool for each token"
        )
    return full


def _left_out(mask: Tensor, logits: Tensor) -> Tensor:
    return ~broadcast_mask(mask, logits).unsqueeze(-1)


def _finite(offset: Tensor) -> Tensor:
    """L as (..., 1, S), with 0 for slots without any token; -inf would give inf - inf."""
    return offset.masked_fill(offset == -torch.inf, 0.0).unsqueeze(-2)


def full_precision(x: Tensor) -> AbstractContextManager[object]:
    """No autocast, under which products of widened tensors would be in half precision again."""
    # The meta device has none.
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def widen(x: Tensor) -> Tensor:
    """Half precision as float32; other dtypes as they are."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
