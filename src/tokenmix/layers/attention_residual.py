"""The attention residual: the scores of one stage's last layer, shrunk and added to the next stage's first."""

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from tokenmix.errors import UserError
from tokenmix.layers.base import Device, Factory
from tokenmix.ops.checks import check_choice, check_numbers, check_tensor, check_whole
from tokenmix.ops.less import Scores, attention_residual

Keys = Literal["pooled", "kept"]


class AttentionResidual(nn.Module):
    """Carries attention scores from a stage to the next, which has a quarter of the tokens.

        R = scale * Conv1x1(Norm(P_q A P_k^T)),   P_q, P_k: depthwise 2 x 2, stride 2, on the query and key grids

    The next stage's first layer adds R to its scores: `SelfAttention.mix(x, None, mask, residual=R)`. It starts small:
    P averages, the scale is `init_scale`.

    Paper: Zhang et al., arXiv 2406.00427, names the steps (DWConv, Norm, 1 x 1, LayerScale) but no norm and no initial
    values; `tokenmix.ops.attention_residual` says how the map shrinks and which norm this is.

    Args:
        num_heads_in: heads of the stage that ends.
        num_heads_out: heads of the stage that begins.
        keys: `"pooled"`: keys are the stage's tokens and shrink with them; `"kept"`: both stages attend to the same
            grid of reduced keys, which stays as it is, and there is no P_k.
        init_scale: LayerScale at the start, one number for each head out.
        eps: added to the variance in the norm.

    Shape:
        scores (B, H_in, h*w, h*w) or in factors, to (B, H_out, h'*w', h'*w'), h' = ceil(h / 2). With `"kept"` keys,
        (B, H_in, h*w, S) to (B, H_out, h'*w', S).

    Raises:
        UserError: no heads or an unknown option; scores of another number of heads, or of tokens that do not fill the
            grid; a mask with `"kept"` keys.
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
        """The residual R of the scores of a stage's last layer, whose tokens are row by row on a grid (h, w)."""
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
        """Multiply-adds of one sample for scores in factors of that width, on a grid (h, w), and with kept keys S."""
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
