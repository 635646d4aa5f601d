"""MLP-Mixer's mixing of tokens."""

from collections.abc import Sequence
from math import prod
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tokenmix.errors import UserError
from tokenmix.layers.base import Capabilities, Device, Mixer, finish, replace_parameter
from tokenmix.ops.checks import check_rates, check_whole


class TokenMLP(Mixer):
    """One MLP over the tokens, the same for every channel.

        out = (W_2 gelu(W_1 X + b_1 1^T) + b_2 1^T),   W_1 (T x N), W_2 (N x T)

    Masked tokens count as 0.

    Paper: Tolstikhin et al., MLP-Mixer: An all-MLP Architecture for Vision, arXiv 2105.01601, section 2; the published
    hidden width is half of the channels.

    Args:
        dim: width D.
        num_tokens: N.
        hidden_tokens: T, width of the MLP; D / 2 if not given.
        dropout: after the second product.

    Shape:
        x (B, N, D) to (B, N, D), exactly N tokens.

    Cost: 2 N T D multiply-adds.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(length="fixed", map=None, equivariant=False)

    def __init__(
        self,
        dim: int,
        num_tokens: int,
        *,
        hidden_tokens: int | None = None,
        dropout: float = 0.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_whole(dim=dim, num_tokens=num_tokens)
        hidden = max(1, dim // 2) if hidden_tokens is None else hidden_tokens
        check_whole(hidden_tokens=hidden)
        check_rates(dropout=dropout)
        self.dim, self.num_tokens = dim, num_tokens
        self.fc1 = nn.Linear(num_tokens, hidden, device=device, dtype=dtype)
        self.fc2 = nn.Linear(hidden, num_tokens, device=device, dtype=dtype)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x, mask = self.checked(x, mask)
        if x.shape[1] != self.num_tokens:
            raise UserError(
                f"TokenMLP was built for {self.num_tokens} tokens, got {x.shape[1]}; build it with num_tokens="
                f"{x.shape[1]}, or resize it by set_grid"
            )
        mixed = self.fc2(F.gelu(self.fc1(x.transpose(1, 2))))
        return finish(self.dropout(mixed).transpose(1, 2), mask)

    @torch.no_grad()
    def set_grid(self, old: Sequence[int], new: Sequence[int]) -> None:
        """Interpolate the rows of W_2 and b_2, and the columns of W_1, over the grid of the tokens.

        W_1 is scaled by N_old / N_new, so that its sum over tokens keeps its size.
        """
        if prod(old) != self.num_tokens:
            raise UserError(
                f"the grid {tuple(old)} has {prod(old)} tokens, the layer has {self.num_tokens}; give one of as many"
            )

        def resized(rows: Tensor) -> Tensor:
            grid = rows.reshape(1, -1, *old).float()
            mode = "bicubic" if len(old) == 2 else "linear"
            return F.interpolate(grid, size=tuple(new), mode=mode, align_corners=False).flatten(2)[0].to(rows.dtype)

        count = prod(new)
        replace_parameter(self.fc1, "weight", resized(self.fc1.weight) * (self.num_tokens / count))
        replace_parameter(self.fc2, "weight", resized(self.fc2.weight.T).T.contiguous())
        replace_parameter(self.fc2, "bias", resized(self.fc2.bias[None])[0])
        self.num_tokens = self.fc1.in_features = self.fc2.out_features = count

    def macs(self, num_tokens: int) -> int:
        check_whole(num_tokens=num_tokens)
        return 2 * num_tokens * self.fc1.out_features * self.dim
