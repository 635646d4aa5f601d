"""Less-attention: the scores of a layer computed from the scores of the previous layer or stage."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenmix.errors import UserError
from tokenmix.ops.attention import attention, fused_kernels_enabled
from tokenmix.ops.checks import check_optional, check_tensors
from tokenmix.ops.normalize import widen


class Scores(NamedTuple):
    """Pre-softmax attention scores, passed from layer to layer.

        A = query @ key^T (+ common_query @ common_key^T) (+ dense)

    Attributes:
        query, key: (B, H, N, r); the query includes the scale.
        dense: (B, H, N, N) or None, the part without factors.
        common_query, common_key: (B or 1, H or 1, N, m) or None: the low-rank term from the biases of less-attention,
            shared across the batch, and across heads that share a transform.
    """

    query: Tensor
    key: Tensor
    dense: Tensor | None = None
    common_query: Tensor | None = None
    common_key: Tensor | None = None

    def matrix(self) -> Tensor:
        """A as one tensor (B, H, N, N), for figures, losses and the dense reference; needs O(N^2) memory."""
        query, key, dense, _, _ = self.joined()
        product = query @ key.transpose(-1, -2)
        return product if dense is None else product + dense

    def joined(self) -> "Scores":
        """The same scores with all factors concatenated in query and key, (B, H, N, r + m)."""
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

    The paper prints an O(N^2) cost for this product, which is O(N^3) in N tokens; `transform_factored` avoids the cost.

    Args:
        scores: A, (B, H, N, N), before the softmax.
        theta: W, (n, n) shared by the heads, or (H, n, n), with n >= N; the leading N x N block is used.
        theta_bias: b, (n,) or (H, n); None for 0.
        psi: U, like `theta`.
        psi_bias: c, like `theta_bias`.
        mask: (B, N) bool, True = the token takes part. Masked tokens are excluded from every sum, and their scores are
            0.

    Returns:
        A', (B, H, N, N).

    Reference: Zhang et al., You Only Need Less Attention at Each Stage in Vision Transformers, arXiv 2406.00427.
    """
    check_tensors(scores=scores, theta=theta, psi=psi)
    check_optional(theta_bias=theta_bias, psi_bias=psi_bias, mask=mask)
    num_tokens = scores.shape[-1]
    theta, psi = _leading(theta, num_tokens), _leading(psi, num_tokens)
    left_out = None if mask is None else ~(mask[:, None, :, None] & mask[:, None, None, :])
    if left_out is not None:
        scores = scores.masked_fill(left_out, 0.0)
    rows = scores @ theta.transpose(-1, -2)
    if theta_bias is not None:
        rows = rows + _row(theta_bias, num_tokens).unsqueeze(-2)
    if mask is not None:  # Excludes masked rows from the sum of b.
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
    """`transform_scores` on the factors of A = Q K^T: exact, without an N x N map.

        A' = [U Q, U 1, c] [W K, b, 1]^T

    Mixing the tokens of Q and K costs 2 H N^2 r multiply-adds.

    Args:
        query, key: Q and K, (B, H, N, r).
        theta, theta_bias, psi, psi_bias, mask: as in `transform_scores`.

    Returns:
        Q' and K', (B, H, N, r + 2).
    """
    check_tensors(query=query, key=key)
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
    """`transform_scores` on `Scores`: each part keeps its form, and the biases join the common factors.

        A = Q K^T + E G^T + D   to   A' = (U Q)(W K)^T + [U E, U 1, c] [W G, b, 1]^T

    A dense part D becomes U D W^T + (U 1) b^T + c 1^T and includes the common factors. Arguments are as in
    `transform_factored`.
    """
    _check_kind(scores)
    check_tensors(theta=theta, theta_bias=theta_bias, psi=psi, psi_bias=psi_bias)
    check_optional(mask=mask)
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
    # U 1 over the unmasked tokens: (H or 1, N), or (B, H or 1, N) with a mask.
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
    """softmax(A) V for scores of an earlier layer, (B, H, N, d), in the fused kernels.

    Only a dense part of the scores is materialized per image and head. On a CPU under `torch.no_grad`, the term from
    the biases may be one map shared by all images, if that needs less memory.

    Args:
        scores: A, including the scale.
        value: V, (B, H, N, d).
        mask: (B, N) bool, True = the token takes part; other rows are 0.
        dropout: rate on the attention map, in training and evaluation alike.
    """
    _check_kind(scores)
    left, right, dense = scores.common_query, scores.common_key, scores.dense
    # Under torch.func, a tensor does not show whether an outer transform tracks it.
    if left is not None and right is not None and dense is None and not (torch.is_grad_enabled() or _recorded()):
        # One map (1, H_c, N, N), if smaller than copies of Q and K with more columns, 2 B H N d. The fused kernels have
        # no gradient for such a map, and CUDA's fastest kernel rejects it. With half precision, only the columns are
        # rounded.
        query, shared = scores.query, left.shape[0] == right.shape[0] == 1
        smaller = left.shape[1] * left.shape[2] ** 2 <= 2 * query.numel()
        if shared and smaller and query.element_size() > 2 and query.is_cpu and fused_kernels_enabled():
            bias = left @ right.transpose(-1, -2)
            return attention(query, scores.key, value, mask=mask, bias=bias, scale=1.0, dropout=dropout)
    # torch 2.8 cannot compile a slice of a named tuple.
    query, key, bias, _, _ = scores.joined()
    return attention(query, key, value, mask=mask, bias=bias, scale=1.0, dropout=dropout)


def check_scores(scores: Scores | None, expected: tuple[int, int, int]) -> Scores:
    """The scores; `UserError` if they are None or do not fit (B, H, N)."""
    if scores is None:
        raise UserError(
            "LessAttention(scores_from='previous') has no query and key: call mix(x, carry) with the scores that "
            "SelfAttention.mix returned, or build it with scores_from='own'"
        )
    _check_kind(scores)
    if tuple(scores.query.shape[:3]) != expected:
        raise UserError(
            f"LessAttention needs scores of (B, H, N) = {expected}, got {tuple(scores.query.shape[:3])}; give both "
            "layers the same num_heads, and use AttentionResidual between stages"
        )
    return scores


def _check_kind(scores: object) -> None:
    if not isinstance(scores, Scores):
        raise UserError(
            f"scores must be the Scores that SelfAttention.mix returned, got {type(scores).__name__}; a dense map A "
            "becomes Scores(A[..., :0], A[..., :0], A)"
        )


def _recorded() -> bool:
    """Whether the call is recorded as a graph, which must not depend on the current sizes."""
    return torch.compiler.is_exporting() or torch.jit.is_tracing()


def _leading(weight: Tensor, num_tokens: int) -> Tensor:
    if num_tokens > weight.shape[-1]:
        raise UserError(
            f"the score transform was built for {weight.shape[-1]} tokens and got {num_tokens}; "
            "interpolate its weights with tokenmix.ops.resize_score_transform"
        )
    if not _recorded() and num_tokens == weight.shape[-1]:
        return weight
    # Cut by a negative pad instead of a slice. Whether a slice is contiguous depends on N = n, as does the shortcut
    # above. Either would prevent a recorded graph from having a dynamic N up to n.
    cut = num_tokens - weight.shape[-1]
    return F.pad(weight, (0, cut, 0, cut))


def _row(bias: Tensor, num_tokens: int) -> Tensor:
    if _recorded() or num_tokens != bias.shape[-1]:
        bias = F.pad(bias, (0, num_tokens - bias.shape[-1]))
    return bias.reshape(-1, num_tokens)


def _mix_tokens(weight: Tensor, x: Tensor) -> Tensor:
    """weight @ x for x (B, H, N, r), without a copy of the weight for each image.

    A shared weight multiplies (B, N, H r), the layout after a projection; a weight per head multiplies all images at
    once.
    """
    if torch.jit.is_tracing():  # a dynamic batch in ONNX must not depend on the number of copies
        return weight @ x
    batch, heads, num_tokens, width = x.shape
    if weight.dim() == 2:
        flat = torch.bmm(weight.expand(batch, -1, -1), x.transpose(1, 2).flatten(2))
        return flat.unflatten(2, (heads, width)).transpose(1, 2)
    flat = torch.bmm(weight, x.permute(1, 2, 0, 3).reshape(heads, num_tokens, -1))
    return flat.view(heads, num_tokens, batch, width).permute(2, 0, 1, 3)


def _columns(like: Tensor, *columns: Tensor) -> Tensor:
    """Stack columns (..., N) that broadcast against each other as (B or 1, H or 1, N, m), in the dtype of `like`."""
    batched = [column if column.dim() == 3 else column.unsqueeze(0) for column in columns]
    return torch.stack(torch.broadcast_tensors(*batched), dim=-1).to(like.dtype)


def _side_by_side(*factors: Tensor) -> Tensor:
    """Concatenate factors (B or 1, H or 1, N, r) to a contiguous (B, H, N, sum of r)."""
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
    """The scores of one stage, downsampled to the halved grid of the next stage.

        R = scale * Conv1x1(Norm(P_q A P_k^T)),   P_q, P_k: depthwise 2 x 2, stride 2, on the query and key grids

    P acts on tokens. For scores in factors, P downsamples the factors, so no map is larger than the result.

    The paper writes one strided convolution on the map and N/2 tokens. Halving height and width leaves a quarter of the
    tokens, so here both axes of the map shrink by 4, each along its own grid. The paper does not name the norm. Here
    each sample has one mean and variance over heads and map, and each head has a weight and a bias.

    Args:
        scores: A of the stage's last layer, (B, H_in, h*w, h*w), or its factors; S keys without `key_weight`.
        grid: (h, w). An odd side is zero-padded, so the result's side is rounded up.
        query_weight: (H_in, 2, 2), of P_q.
        key_weight: (H_in, 2, 2), of P_k; None keeps the keys, for stages that reduce theirs to the same S.
        norm_weight: (H_in,).
        norm_bias: (H_in,).
        head_weight: (H_out, H_in), the 1 x 1 convolution across heads.
        layer_scale: (H_out,).
        mask: (B, h*w) bool, True = the token takes part. A token of the next stage takes part if one of its four does.
        eps: added to the variance.

    Returns:
        R, (B, H_out, h'*w', h'*w' or S) with h' = ceil(h / 2); 0 for masked tokens.

    Reference: Zhang et al., arXiv 2406.00427.
    """
    check_tensors(query_weight=query_weight, norm_weight=norm_weight, norm_bias=norm_bias)
    check_tensors(head_weight=head_weight, layer_scale=layer_scale)
    check_optional(key_weight=key_weight, mask=mask)
    if isinstance(scores, Scores):
        scores = scores.joined()
    else:
        check_tensors(scores=scores)
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
    else:  # over the unmasked pairs
        wide = widen(pooled)
        taking = pairs.to(wide.dtype)
        count = (taking.sum((1, 2, 3), keepdim=True) * pooled.shape[1]).clamp_min(1.0)
        centred = (wide - (wide * taking).sum((1, 2, 3), keepdim=True) / count) * taking
        variance = centred.square().sum((1, 2, 3), keepdim=True) / count
        normed = (centred * torch.rsqrt(variance + eps)).to(pooled.dtype)
        normed = normed * norm_weight[:, None, None] + norm_bias[:, None, None]
    # An einsum would give a gradient whose layout torch.compile (2.14) predicts wrongly after the norm.
    out = F.conv2d(normed, (head_weight * layer_scale.unsqueeze(-1))[:, :, None, None])
    return out if pairs is None else out.masked_fill(~pairs, 0.0)


def pool_mask(mask: Tensor, grid: tuple[int, int]) -> Tensor:
    """Downsample the mask (B, h*w) by 2 in both axes, rounded up: True if one of the four tokens takes part."""
    image = mask.unflatten(1, grid).unsqueeze(1).float()
    return F.max_pool2d(F.pad(image, (0, grid[1] % 2, 0, grid[0] % 2)), 2).flatten(1) > 0


def _pool_tokens(x: Tensor, weight: Tensor, grid: tuple[int, int]) -> Tensor:
    """P x: each 2 x 2 block of tokens (B, H, h*w, r) summed with the weights (H, 2, 2) of its head."""
    image = x.unflatten(2, grid)
    image = F.pad(image, (0, 0, 0, grid[1] % 2, 0, grid[0] % 2))
    blocks = image.unflatten(3, (-1, 2)).unflatten(2, (-1, 2))
    return torch.einsum("bhiyjxr,hyx->bhijr", blocks, weight).flatten(2, 3)
