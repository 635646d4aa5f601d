"""Layers in float32 or bfloat16: the GELU inside the product, and a few samples at a time."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tokenmix.cpu.layers import Int8Linear, Range, check_unfollowed, samples_at_a_time
from tokenmix.cpu.operators import Activation, Dtype, fused_linear
from tokenmix.layers.gated_mlp import GatedMLP

__all__ = ["GROUP", "AnyLinear", "FusedLinear", "GroupedGatedMLP", "make_linear"]


GROUP = 2**20
"""Numbers worked on together, 4 MiB. Products of a quarter of that have too few rows; with three times as many the time
may go to fresh memory pages (LOG.md, 2026-11-22)."""


class FusedLinear(nn.Module):
    """A linear layer for inference, with the GELU after it.

        y = act(x W^T + b)

    In bfloat16 x, W, b and the product are rounded to it; what continues is float32.

    Shape:
        (..., in_features) float32 to (..., out_features) float32.

    Raises:
        UserError: an input that autograd follows.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        act: Activation = "none",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.act: Activation = act
        self.register_buffer("weight", torch.zeros(out_features, in_features, dtype=dtype))
        self.register_buffer("bias", torch.zeros(out_features, dtype=dtype) if bias else None)

    @torch.no_grad()
    def fill(self, weight: Tensor, bias: Tensor | None, inputs: Range) -> None:
        """Take over W and b; the range of the inputs is for `Int8Linear`."""
        self.weight.copy_(weight)
        if self.bias is not None:
            assert bias is not None
            self.bias.copy_(bias)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) to (..., out_features)."""
        check_unfollowed(self, x)
        return fused_linear(x.to(self.weight.dtype), self.weight, self.bias, self.act).float()

    def extra_repr(self) -> str:
        """The arguments that shape the layer."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, act={self.act!r}"


class GroupedGatedMLP(GatedMLP):
    """A gMLP branch on a few samples at a time, whose hidden features stay in the caches and in memory at hand."""

    def forward(self, x: Tensor, mask: Tensor | None = None, *, attention: Tensor | None = None) -> Tensor:
        """Mix the tokens of x (B, N, D); a given map of tiny attention is for all samples at once."""
        together = samples_at_a_time(x.shape[1:-1].numel() * self.hidden, GROUP)
        if attention is not None:
            return super().forward(x, mask, attention=attention)
        if x.dim() != 3 or x.shape[0] <= together or torch.compiler.is_compiling() or torch.jit.is_tracing():
            return super().forward(x, mask)
        masks = [None] * len(x) if mask is None else mask.split(together)
        out = torch.empty_like(x)
        for some, kept, made in zip(x.split(together), masks, out.split(together)):
            made.copy_(super().forward(some, kept))
        return out


AnyLinear = FusedLinear | Int8Linear


def make_linear(dtype: Dtype) -> Callable[..., AnyLinear]:
    """The linear layer whose products are of this type; its arguments are `FusedLinear`'s first four."""
    if dtype == "int8":
        return Int8Linear

    def make(in_features: int, out_features: int, **options: Any) -> FusedLinear:
        return FusedLinear(in_features, out_features, **options, dtype=getattr(torch, dtype))

    return make
