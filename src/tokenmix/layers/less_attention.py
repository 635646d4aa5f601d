"""Less-attention: attention scores computed from the scores of the previous layer or stage."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from tokenmix.errors import UserError
from tokenmix.layers.base import Capabilities, Device, Factory, Mixer, masked_output, replace_parameter
from tokenmix.ops.attention import attention_probabilities
from tokenmix.ops.checks import (
    check_choice,
    check_flags,
    check_heads,
    check_numbers,
    check_rates,
    check_tensor,
    check_whole,
)
from tokenmix.ops.less import (
    Scores,
    attention_from_scores,
    attention_residual,
    check_scores,
    next_scores,
    transform_scores,
)
from tokenmix.ops.resize import resize_score_transform


class LessAttention(Mixer):
    """Attention whose pre-softmax scores are learned transforms of the previous layer's scores.

        out = concat_h [ softmax(A'_h) V_h ] W_o,   A' = U A W^T + (U 1) b^T + c 1^T = Psi(Theta(A)^T)^T

    With A = Q K^T, the factored form is `A' = [U Q, U 1, c] [W K, b, 1]^T`. The layer mixes the tokens of Q and K, then
    runs ordinary attention in the fused kernels. Scores with a dense part (from `AttentionResidual`) need a dense
    transform of that part. The layer starts with W = U = 1 and b = c = 0: the previous layer's scores.

    The paper transforms the dense map (`mode="dense"`) and prints an O(N^2) cost for 2 H N^3 multiply-adds. It does not
    say whether heads share Theta and Psi.

    Args:
        dim, qkv_bias, dropout, attention_dropout: as in `SelfAttention`.
        num_tokens: n, size of Theta and Psi; fewer tokens use the leading n x n block.
        num_heads: H, equal to the heads of the incoming scores.
        scores_from: `"previous"`: `mix` transforms the incoming scores; `"own"`: the layer has query and key.
        mode: `"factored"`, or `"dense"`, as printed. Both give the same output.
        share_heads: one Theta and one Psi for all heads, 2 n^2 weights; otherwise one per head, 2 H n^2.
        residual: add the transformed scores of the previous layer to the layer's own scores.

    Shape: x (B, N, D) to (B, N, D), N <= num_tokens; map (B, H, N, N).

    Cost: let m = 2 for each less-attention layer since the last vanilla layer, this one excluded. Mixing
    costs 2 N^2 (D + m), attention N^2 (2 D + H (m + 2)), values and output 2 N D^2. `"own"` scores cost 2 N D^2 more.
    The layer needs fewer multiply-adds than a new attention layer when N < D. Dense mode: 2 H N^3 in place of the
    mixing. `residual` adds own attention, 4 N D^2 + 2 N^2 D, and N^2 D + 2 H N^3 for the incoming scores.

    Raises:
        UserError: `residual` without own scores; incoming scores are missing or do not fit.

    Reference: Zhang et al., You Only Need Less Attention at Each Stage in Vision Transformers, arXiv 2406.00427.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(map="tokens", length="up-to", equivariant=False)

    def __init__(
        self,
        dim: int,
        num_tokens: int,
        *,
        num_heads: int = 8,
        scores_from: Literal["own", "previous"] = "own",
        mode: Literal["factored", "dense"] = "factored",
        share_heads: bool = True,
        residual: bool = False,
        qkv_bias: bool = True,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory: Factory = {"device": device, "dtype": dtype}
        check_choice("scores_from", scores_from, ("own", "previous"))
        check_choice("mode", mode, ("factored", "dense"))
        check_whole(num_tokens=num_tokens)
        check_flags(share_heads=share_heads, residual=residual, qkv_bias=qkv_bias)
        if residual and scores_from == "previous":
            raise UserError("residual=True adds to the layer's own scores; leave out scores_from='previous'")
        check_rates(dropout=dropout, attention_dropout=attention_dropout)
        self.dim, self.num_heads, self.head_dim = dim, num_heads, check_heads(dim, num_heads)
        self.num_tokens, self.scores_from, self.mode = num_tokens, scores_from, mode
        self.share_heads, self.residual, self.attention_dropout = share_heads, residual, attention_dropout
        self.qk = nn.Linear(dim, 2 * dim, bias=qkv_bias, **factory) if scores_from == "own" else None
        self.v = nn.Linear(dim, dim, bias=qkv_bias, **factory)
        heads = () if share_heads else (num_heads,)
        self.theta = nn.Parameter(torch.empty(*heads, num_tokens, num_tokens, **factory))
        self.psi = nn.Parameter(torch.empty(*heads, num_tokens, num_tokens, **factory))
        self.theta_bias = nn.Parameter(torch.empty(*heads, num_tokens, **factory))
        self.psi_bias = nn.Parameter(torch.empty(*heads, num_tokens, **factory))
        self.residual_scale = nn.Parameter(torch.empty(num_heads, **factory)) if residual else None
        self.proj = nn.Linear(dim, dim, **factory)
        self.dropout = nn.Dropout(dropout)
        self.kept: list[Scores] | None = None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Reset Theta and Psi to the identity, and the residual's scale to 0."""
        if self.residual_scale is not None:
            self.residual_scale.zero_()
        for weight, bias in ((self.theta, self.theta_bias), (self.psi, self.psi_bias)):
            weight.zero_().diagonal(dim1=-2, dim2=-1).fill_(1.0)
            bias.zero_()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.mix(x, None, mask)[0]

    def mix(self, x: Tensor, carry: Scores | None = None, mask: Tensor | None = None) -> tuple[Tensor, Scores | None]:
        """`forward` in a stack: transforms the incoming scores, or computes its own, and returns them."""
        x, mask = self.checked(x, mask)
        scores = self._scores(x, carry, mask)
        if self.kept is not None:
            self.kept.append(scores)
        dropout = self.attention_dropout if self.training else 0.0
        out = attention_from_scores(scores, _heads(self.v(x), self.num_heads), mask=mask, dropout=dropout)
        return masked_output(self.dropout(self.proj(out.transpose(1, 2).flatten(2))), mask), scores

    def attention_map(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.mix_map(x, None, mask)

    def mix_map(self, x: Tensor, carry: Scores | None = None, mask: Tensor | None = None) -> Tensor:
        x, mask = self.checked(x, mask)
        query, key, dense, _, _ = self._scores(x, carry, mask).joined()
        return attention_probabilities(query, key, mask=mask, bias=dense, scale=1.0)

    def set_grid(self, old: Sequence[int], new: Sequence[int]) -> None:
        """Interpolate Theta and Psi, see `tokenmix.ops.resize_score_transform`."""
        for name in ("theta", "psi"):
            weight, bias = resize_score_transform(getattr(self, name), getattr(self, f"{name}_bias"), old, new)
            replace_parameter(self, name, weight)
            replace_parameter(self, f"{name}_bias", bias)
        self.num_tokens = self.theta.shape[-1]

    def macs(self, num_tokens: int) -> int:
        """The cost formula of the class with m = 0 and no dense part; with `residual`, the layer receives scores."""
        check_whole(num_tokens=num_tokens)
        projections = (4 if self.qk is not None else 2) * num_tokens * self.dim**2
        if self.residual_scale is not None:
            return projections + num_tokens**2 * (3 * self.dim + 2 * self.num_heads * num_tokens)
        if self.mode == "dense":
            return projections + num_tokens**2 * (2 * self.num_heads * num_tokens + 2 * self.dim)
        return projections + num_tokens**2 * (4 * self.dim + 2 * self.num_heads)

    def _scores(self, x: Tensor, carry: Scores | None, mask: Tensor | None) -> Scores:
        """A' of tokens that are already checked."""
        own = None
        if self.qk is not None:
            query, key = (_heads(part, self.num_heads) for part in self.qk(x).chunk(2, dim=2))
            own = Scores(query * self.head_dim**-0.5, key)
            if self.residual_scale is None:
                carry = own
            elif carry is None:
                return own
        scores = check_scores(carry, (x.shape[0], self.num_heads, x.shape[1]))
        transform = self.theta, self.theta_bias, self.psi, self.psi_bias
        if own is not None and self.residual_scale is not None:
            before = transform_scores(scores.matrix(), *transform, mask=mask)
            return Scores(own.query, own.key, self.residual_scale[:, None, None] * before)
        if self.mode == "factored":
            return next_scores(scores, *transform, mask=mask)
        # A dense map has factors of width 0.
        nothing = scores.query[..., :0]
        return Scores(nothing, nothing, transform_scores(scores.matrix(), *transform, mask=mask))


def _heads(x: Tensor, num_heads: int) -> Tensor:
    return x.unflatten(2, (num_heads, -1)).transpose(1, 2)


@contextmanager
def kept_scores(model: nn.Module) -> Iterator[list[Scores]]:
    """The scores of each less-attention layer that runs within the block, in the order of the calls."""
    layers = [module for module in model.modules() if isinstance(module, LessAttention)]
    kept: list[Scores] = []
    for layer in layers:
        layer.kept = kept
    try:
        yield kept
    finally:
        for layer in layers:
            layer.kept = None


Keys = Literal["pooled", "kept"]


class AttentionResidual(nn.Module):
    """Carries attention scores to the next stage, which has a quarter of the tokens.

        R = scale * Conv1x1(Norm(P_q A P_k^T)),   P_q, P_k: depthwise 2 x 2, stride 2, on the query and key grids

    The first layer of the next stage adds R to its scores: `SelfAttention.mix(x, None, mask, residual=R)`. P starts as
    an average and the scale as `init_scale`, so R starts small.

    The paper names the steps (DWConv, Norm, 1 x 1, LayerScale) but neither the norm nor initial values.
    `tokenmix.ops.attention_residual` documents the downsampling and the norm.

    Args:
        num_heads_in: heads of the stage that ends.
        num_heads_out: heads of the stage that begins.
        keys: `"pooled"`: the keys are the stage's tokens and are downsampled with them. `"kept"`: both stages attend to
            the same grid of reduced keys, and there is no P_k.
        init_scale: initial LayerScale, one number per output head.
        eps: added to the variance in the norm.

    Shape: scores (B, H_in, h*w, h*w), dense or in factors, to (B, H_out, h'*w', h'*w'), h' = ceil(h / 2). With `"kept"`
    keys, (B, H_in, h*w, S) to (B, H_out, h'*w', S).

    Reference: Zhang et al., arXiv 2406.00427.
    """

    def __init__(
        self,
        num_heads_in: int,
        num_heads_out: int,
        *,
        keys: Keys = "pooled",
        init_scale: float = 1e-2,
        eps: float = 1e-5,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_whole(num_heads_in=num_heads_in, num_heads_out=num_heads_out)
        check_choice("keys", keys, get_args(Keys))
        check_numbers(init_scale=init_scale)
        check_numbers(0.0, eps=eps)
        factory: Factory = {"device": device, "dtype": dtype}
        self.keys: Keys = keys
        self.num_heads_in, self.num_heads_out, self.eps = num_heads_in, num_heads_out, eps
        self.query_weight = nn.Parameter(torch.full((num_heads_in, 2, 2), 0.25, **factory))
        self.key_weight = nn.Parameter(torch.full((num_heads_in, 2, 2), 0.25, **factory)) if keys == "pooled" else None
        self.norm_weight = nn.Parameter(torch.ones(num_heads_in, **factory))
        self.norm_bias = nn.Parameter(torch.zeros(num_heads_in, **factory))
        self.head_weight = nn.Parameter(torch.empty(num_heads_out, num_heads_in, **factory))
        self.layer_scale = nn.Parameter(torch.full((num_heads_out,), init_scale, **factory))
        nn.init.xavier_uniform_(self.head_weight)

    def extra_repr(self) -> str:
        return f"num_heads_in={self.num_heads_in}, num_heads_out={self.num_heads_out}, keys={self.keys!r}"

    def forward(self, scores: Scores | Tensor, grid: tuple[int, int], mask: Tensor | None = None) -> Tensor:
        """The residual R from the scores of a stage's last layer, with tokens row by row on a grid (h, w)."""
        some = scores.query if isinstance(scores, Scores) else scores
        check_tensor("scores of AttentionResidual", some)
        if some.dim() != 4 or some.shape[1] != self.num_heads_in:
            raise UserError(
                f"AttentionResidual was built for scores (B, {self.num_heads_in}, N, ...), got {tuple(some.shape)}; "
                "build it with num_heads_in, the heads of the stage that ends"
            )
        return attention_residual(
            scores,
            grid,
            self.query_weight,
            self.key_weight,
            self.norm_weight,
            self.norm_bias,
            self.head_weight,
            self.layer_scale,
            mask=mask,
            eps=self.eps,
        )

    def macs(self, grid: tuple[int, int], width: int, num_keys: int | None = None) -> int:
        """Multiply-adds of one sample, for factors of that width on a grid (h, w); `num_keys`: S of kept keys."""
        pooled = -(-grid[0] // 2) * -(-grid[1] // 2)
        if self.keys == "kept":
            if num_keys is None:
                raise UserError(
                    "AttentionResidual(keys='kept') has a map of h'*w' x S, got num_keys=None; give macs the S of "
                    "num_keys, for example num_keys=49"
                )
            shrink, size = 4 * self.num_heads_in * pooled * width, pooled * num_keys
        else:
            shrink, size = 8 * self.num_heads_in * pooled * width, pooled**2
        return shrink + size * self.num_heads_in * (width + self.num_heads_out)
