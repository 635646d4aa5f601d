"""The attention residual: the scores of one stage of a pyramid, shrunk for the next stage."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenmix.errors import UserError
from tokenmix.ops.less import Scores


def attention_residual(
    scores: Scores | Tensor,
    grid: tuple[int, int],
    query_weight: Tensor,
    key_weight: Tensor | None,
    norm_weight: Tensor,
    norm_bias: Tensor,
    head_weight: Tensor,
    layer_scale: Tensor,
    *,
    mask: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """The scores of one stage, shrunk to the halved grid of the next.

        R = scale * Conv1x1(Norm(P_q A P_k^T)),   P_q, P_k: depthwise 2 x 2, stride 2, on the query and key grids

    P acts on tokens, so of scores in factors it shrinks the factors, and no map larger than the result is made.

    Paper: Zhang et al., arXiv 2406.00427, which writes one strided convolution on the map and N/2 tokens; halving
    height and width quarters the tokens, so both axes of the map shrink by 4, each along its own grid. Its norm is not
    named: this one has one mean and variance for each sample, over heads and map, and a weight and bias for each head.

    Args:
        scores: A of the stage's last layer, (B, H_in, h*w, h*w), or its factors; S keys without `key_weight`.
        grid: (h, w). An odd side is padded with zeros, so that the result's side is the half rounded up.
        query_weight: (H_in, 2, 2), of P_q.
        key_weight: (H_in, 2, 2), of P_k; None leaves the keys alone, where both stages reduce theirs to the same S.
        norm_weight: (H_in,).
        norm_bias: (H_in,).
        head_weight: (H_out, H_in), the 1 x 1 convolution across heads.
        layer_scale: (H_out,).
        mask: (B, h*w) bool, True = the token takes part. A token of the next stage does if one of its four did.
        eps: added to the variance.

    Returns:
        R, (B, H_out, h'*w', h'*w' or S) with h' = ceil(h / 2), 0 where a token takes no part.

    Raises:
        UserError: scores whose number of tokens is not h * w; a mask without `key_weight`.
    """
    scores = scores.joined() if isinstance(scores, Scores) else scores
    num_tokens = (scores.query if isinstance(scores, Scores) else scores).shape[-2]
    if num_tokens != grid[0] * grid[1]:
        raise UserError(
            f"a grid of {grid[0]} x {grid[1]} has {grid[0] * grid[1]} tokens, the scores have {num_tokens}; give the "
            "grid of the stage that ends"
        )
    if key_weight is None and mask is not None:
        raise UserError(
            f"a token mask does not apply to keys on another grid, got mask {tuple(mask.shape)} and key_weight=None; "
            "pool the keys too (keys='pooled'), or leave the mask out"
        )
    dense = scores.dense if isinstance(scores, Scores) else scores
    pooled = None
    if isinstance(scores, Scores):
        query, key = scores.query, scores.key
        if mask is not None:
            query, key = (factor.masked_fill(~mask[:, None, :, None], 0.0) for factor in (query, key))
        key = key if key_weight is None else _pool_tokens(key, key_weight, grid)
        pooled = _pool_tokens(query, query_weight, grid) @ key.transpose(-1, -2)
    if dense is not None:
        if mask is not None:
            dense = dense.masked_fill(~(mask[:, None, :, None] & mask[:, None, None, :]), 0.0)
        half = _pool_tokens(dense, query_weight, grid)
        both = half if key_weight is None else _pool_tokens(half.transpose(-1, -2), key_weight, grid).transpose(-1, -2)
        pooled = both if pooled is None else pooled + both
    assert pooled is not None
    kept = None if mask is None else pool_mask(mask, grid)
    pairs = None if kept is None else kept[:, None, :, None] & kept[:, None, None, :]
    normed = _norm_map(pooled, pairs, norm_weight, norm_bias, eps)
    # As an einsum it gives a gradient whose layout torch.compile (2.14) predicts wrongly after the norm.
    out = F.conv2d(normed, (head_weight * layer_scale.unsqueeze(-1))[:, :, None, None])
    return out if pairs is None else out.masked_fill(~pairs, 0.0)


def pool_mask(mask: Tensor, grid: tuple[int, int]) -> Tensor:
    """The mask (B, h*w) of a grid of half the sides, rounded up: True where one of the four tokens takes part."""
    image = mask.unflatten(1, grid).unsqueeze(1).float()
    return F.max_pool2d(F.pad(image, (0, grid[1] % 2, 0, grid[0] % 2)), 2).flatten(1) > 0


def _pool_tokens(x: Tensor, weight: Tensor, grid: tuple[int, int]) -> Tensor:
    """P x: tokens (B, H, h*w, r) on their grid, each 2 x 2 block summed with the weights (H, 2, 2) of its head."""
    image = x.unflatten(2, grid)
    image = F.pad(image, (0, 0, 0, grid[1] % 2, 0, grid[0] % 2))
    blocks = image.unflatten(3, (-1, 2)).unflatten(2, (-1, 2))
    return torch.einsum("bhiyjxr,hyx->bhijr", blocks, weight).flatten(2, 3)


def _norm_map(x: Tensor, pairs: Tensor | None, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Mean 0 and variance 1 over heads and map of each sample, over the pairs that take part if some do not."""
    if pairs is None:
        return F.group_norm(x, 1, weight, bias, eps)
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    kept = pairs.to(wide.dtype)
    count = (kept.sum((1, 2, 3), keepdim=True) * x.shape[1]).clamp_min(1.0)
    mean = (wide * kept).sum((1, 2, 3), keepdim=True) / count
    centred = (wide - mean) * kept
    normed = centred * torch.rsqrt(centred.square().sum((1, 2, 3), keepdim=True) / count + eps)
    return normed.to(x.dtype) * weight[:, None, None] + bias[:, None, None]
