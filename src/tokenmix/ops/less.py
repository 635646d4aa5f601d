"""Less-attention: the scores of a layer computed from those of the layer before, or of the stage before."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenmix.errors import UserError
from tokenmix.ops.attention import attention, fused_kernels_enabled


class Scores(NamedTuple):
    """Pre-softmax attention scores, passed from layer to layer.

        A = query @ key^T (+ common_query @ common_key^T) (+ dense)

    query, key: (B, H, N, r), the scale already in the query. dense: (B, H, N, N) or None, the part without factors.
    common_query, common_key: (B or 1, H or 1, N, m) or None; what the biases of less-attention add, which images have
    in common, and heads that share a transform.
    """

    query: Tensor
    key: Tensor
    dense: Tensor | None = None
    common_query: Tensor | None = None
    common_key: Tensor | None = None

    def matrix(self) -> Tensor:
        """A itself, (B, H, N, N): N^2 memory, for figures, losses and the dense reference."""
        query, key, dense, _, _ = self.joined()
        product = query @ key.transpose(-1, -2)
        return product if dense is None else product + dense

    def joined(self) -> "Scores":
        """The same scores with all factors side by side in query and key, (B, H, N, r + m)."""
        if self.common_query is None or self.common_key is None:
            return self
        pairs = (self.query, self.common_query), (self.key, self.common_key)
        query, key = (_side_by_side(own, common) for own, common in pairs)
        return Scores(query, key, self.dense)


def transform_scores(
    scores: Tensor,
    theta: Tensor,
    theta_bias: Tensor | None,
    psi: Tensor,
    psi_bias: Tensor | None,
    *,
    mask: Tensor | None = None,
) -> Tensor:
    """Less-attention's rule on a dense map of scores, as printed: 2 H N^3 multiply-adds.

        A' = Psi(Theta(A)^T)^T = U A W^T + (U 1) b^T + c 1^T,   Theta(X) = X W^T + 1 b^T,  Psi(X) = X U^T + 1 c^T

    Paper: Zhang et al., You Only Need Less Attention at Each Stage in Vision Transformers, arXiv 2406.00427. It prints
    an O(N^2) cost for this product, which is O(N^3) in N tokens; `transform_factored` avoids it.

    Args:
        scores: A, (B, H, N, N), before the softmax.
        theta: W, (n, n) shared by the heads, or (H, n, n), with n >= N; the leading N x N block is used.
        theta_bias: b, (n,) or (H, n); none for 0.
        psi: U, like `theta`.
        psi_bias: c, like `theta_bias`.
        mask: (B, N) bool, True = the token takes part. Others are left out of every sum, and their scores are 0.

    Returns:
        A', (B, H, N, N).
    """
    num_tokens = scores.shape[-1]
    theta, psi = _leading(theta, num_tokens), _leading(psi, num_tokens)
    left_out = None if mask is None else ~(mask[:, None, :, None] & mask[:, None, None, :])
    if left_out is not None:
        scores = scores.masked_fill(left_out, 0.0)
    rows = scores @ theta.transpose(-1, -2)
    if theta_bias is not None:
        rows = rows + _row(theta_bias, num_tokens).unsqueeze(-2)
    if mask is not None:  # So that b is not summed over rows that take no part.
        rows = rows.masked_fill(~mask[:, None, :, None], 0.0)
    out = psi @ rows
    if psi_bias is not None:
        out = out + _row(psi_bias, num_tokens).unsqueeze(-1)
    return out if left_out is None else out.masked_fill(left_out, 0.0)


def transform_factored(
    query: Tensor,
    key: Tensor,
    theta: Tensor,
    theta_bias: Tensor,
    psi: Tensor,
    psi_bias: Tensor,
    *,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`transform_scores` on the factors of A = Q K^T: exact, and no N x N map is made.

        A' = [U Q, U 1, c] [W K, b, 1]^T

    It mixes the tokens of Q and of K, 2 H N^2 r multiply-adds, and adds two columns to each.

    Args:
        query: Q, (B, H, N, r).
        key: K, (B, H, N, r).
        theta, theta_bias, psi, psi_bias, mask: as of `transform_scores`.

    Returns:
        Q' and K', (B, H, N, r + 2).
    """
    return next_scores(Scores(query, key), theta, theta_bias, psi, psi_bias, mask=mask).joined()[:2]


def next_scores(
    scores: Scores,
    theta: Tensor,
    theta_bias: Tensor,
    psi: Tensor,
    psi_bias: Tensor,
    *,
    mask: Tensor | None = None,
) -> Scores:
    """`transform_scores` on `Scores`: each part stays what it is, and the biases join the common factors.

        A = Q K^T + E G^T + D   to   A' = (U Q)(W K)^T + [U E, U 1, c] [W G, b, 1]^T

    With a dense part D, what is common is in U D W^T + (U 1) b^T + c 1^T. Arguments are those of `transform_factored`.
    """
    num_tokens = scores.query.shape[-2]
    theta, psi = _leading(theta, num_tokens), _leading(psi, num_tokens)
    left_out = None if mask is None else ~mask[:, None, :, None]

    def kept(x: Tensor) -> Tensor:
        return x if left_out is None else x.masked_fill(left_out, 0.0)

    query, key = (kept(_mix_tokens(w, kept(x))) for w, x in ((psi, scores.query), (theta, scores.key)))
    if scores.dense is not None:
        rest = scores.dense
        if scores.common_query is not None and scores.common_key is not None:
            rest = rest + scores.common_query @ scores.common_key.transpose(-1, -2)
        return Scores(query, key, transform_scores(rest, theta, theta_bias, psi, psi_bias, mask=mask))
    b, c = _row(theta_bias, num_tokens), _row(psi_bias, num_tokens)
    # U 1 over the tokens that take part: (H or 1, N), or (B, H or 1, N) with a mask.
    if mask is None:
        sums = psi.sum(-1).reshape(-1, num_tokens)
    else:
        sums = mask.to(psi.dtype) @ psi.transpose(-1, -2)
        sums = sums.unsqueeze(1) if psi.dim() == 2 else sums.transpose(0, 1)
    common_query = _columns(query, sums, c)
    common_key = _columns(key, b, torch.ones_like(b))
    if scores.common_query is not None and scores.common_key is not None:
        common_query = _side_by_side(psi @ kept(scores.common_query), common_query)
        common_key = _side_by_side(theta @ kept(scores.common_key), common_key)
    return Scores(query, key, None, kept(common_query), kept(common_key))


def attention_from_scores(scores: Scores, value: Tensor, *, mask: Tensor | None = None, dropout: float = 0.0) -> Tensor:
    """softmax(A) V for scores that were passed on, (B, H, N, d).

    It runs in the fused kernels: only a dense part of the scores is a map of each image and head, and on a CPU under
    `torch.no_grad` what the biases add is one map for all images where that is smaller than copies of the factors.

    Args:
        scores: A, the scale already in it.
        value: V, (B, H, N, d).
        mask: (B, N) bool, True = the token takes part; the row of any other token is 0.
        dropout: probability that an entry of the map is dropped; the caller switches it off for evaluation.
    """
    left, right, dense = scores.common_query, scores.common_key, scores.dense
    # Under torch.func a tensor does not say whether an outer transform follows it.
    if left is not None and right is not None and dense is None and not (torch.is_grad_enabled() or _recorded()):
        # As one map (1, H_c, N, N) if that is smaller than the copies of Q and K with more columns, 2 B H N d. The
        # fused kernels have no gradient for it, and CUDA's fastest takes none. Half precision rounds the columns only.
        query, shared = scores.query, left.shape[0] == right.shape[0] == 1
        smaller = left.shape[1] * left.shape[2] ** 2 <= 2 * query.numel()
        if shared and smaller and query.element_size() > 2 and query.is_cpu and fused_kernels_enabled():
            bias = left @ right.transpose(-1, -2)
            return attention(query, scores.key, value, mask=mask, bias=bias, scale=1.0, dropout=dropout)
    # torch 2.8 compiles no slice of a named tuple.
    query, key, bias, _, _ = scores.joined()
    return attention(query, key, value, mask=mask, bias=bias, scale=1.0, dropout=dropout)


def check_scores(scores: Scores | None, expected: tuple[int, int, int]) -> Scores:
    """The scores; `UserError` where there are none, or not of (B, H, N)."""
    if scores is None:
        raise UserError(
            "LessAttention(scores_from='previous') has no query and key: call mix(x, carry) with the scores that "
            "SelfAttention.mix returned, or build it with scores_from='own'"
        )
    if not isinstance(scores, Scores):
        raise UserError(
            f"LessAttention takes the Scores that SelfAttention.mix returned, got {type(scores).__name__}; a dense map "
            "A becomes Scores(A[..., :0], A[..., :0], A)"
        )
    if tuple(scores.query.shape[:3]) != expected:
        raise UserError(
            f"LessAttention needs scores of (B, H, N) = {expected}, got {tuple(scores.query.shape[:3])}; give both "
            "layers the same num_heads, and use AttentionResidual between stages"
        )
    return scores


def _recorded() -> bool:
    """Whether the call becomes a graph for other sizes: nothing in it may then depend on the sizes at hand."""
    return torch.compiler.is_exporting() or torch.jit.is_tracing()


def _leading(weight: Tensor, num_tokens: int) -> Tensor:
    if num_tokens > weight.shape[-1]:
        raise UserError(
            f"the score transform was built for {weight.shape[-1]} tokens and got {num_tokens}; "
            "interpolate its weights with tokenmix.ops.resize_score_transform"
        )
    if not _recorded() and num_tokens == weight.shape[-1]:
        return weight
    # A copy by a negative pad, not a slice: whether a slice is contiguous depends on N = n, as the shortcut above does,
    # and either would keep a recorded graph from a dynamic N up to n.
    cut = num_tokens - weight.shape[-1]
    return F.pad(weight, (0, cut, 0, cut))


def _row(bias: Tensor, num_tokens: int) -> Tensor:
    """A bias (n,) or (H, n) as (H or 1, N)."""
    if _recorded() or num_tokens != bias.shape[-1]:
        bias = F.pad(bias, (0, num_tokens - bias.shape[-1]))
    return bias.reshape(-1, num_tokens)


def _mix_tokens(weight: Tensor, x: Tensor) -> Tensor:
    """weight @ x for x (B, H, N, r).

    A weight that the heads share multiplies (B, N, H r), where the numbers of a token lie side by side as they leave a
    projection, so that nothing is copied. One of each head takes all images in one product: a broadcast one would copy
    it for each image.
    """
    if torch.jit.is_tracing():  # An ONNX graph takes any batch only without the copies' number in it.
        return weight @ x
    batch, heads, num_tokens, width = x.shape
    if weight.dim() == 2:
        flat = torch.bmm(weight.expand(batch, -1, -1), x.transpose(1, 2).flatten(2))
        return flat.unflatten(2, (heads, width)).transpose(1, 2)
    flat = torch.bmm(weight, x.permute(1, 2, 0, 3).reshape(heads, num_tokens, -1))
    return flat.view(heads, num_tokens, batch, width).permute(2, 0, 1, 3)


def _columns(like: Tensor, *columns: Tensor) -> Tensor:
    """Columns (..., N) that broadcast against each other as one (B or 1, H or 1, N, m), in the type of `like`."""
    batched = [column if column.dim() == 3 else column.unsqueeze(0) for column in columns]
    return torch.stack(torch.broadcast_tensors(*batched), dim=-1).to(like.dtype)


def _side_by_side(*factors: Tensor) -> Tensor:
    """Factors (B or 1, H or 1, N, r) as one (B, H, N, sum of r); contiguous, as attention wants it."""
    lead = torch.broadcast_tensors(*(factor[..., :1] for factor in factors))[0].shape[:-1]
    return torch.cat([factor.expand(*lead, -1) for factor in factors], dim=-1)


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
    if pairs is None:
        normed = F.group_norm(pooled, 1, norm_weight, norm_bias, eps)
    else:  # over the pairs that take part
        wide = pooled.float() if pooled.dtype in (torch.float16, torch.bfloat16) else pooled
        taking = pairs.to(wide.dtype)
        count = (taking.sum((1, 2, 3), keepdim=True) * pooled.shape[1]).clamp_min(1.0)
        centred = (wide - (wide * taking).sum((1, 2, 3), keepdim=True) / count) * taking
        variance = centred.square().sum((1, 2, 3), keepdim=True) / count
        normed = (centred * torch.rsqrt(variance + eps)).to(pooled.dtype)
        normed = normed * norm_weight[:, None, None] + norm_bias[:, None, None]
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
