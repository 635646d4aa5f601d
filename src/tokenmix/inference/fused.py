"""Linear layers in float32 or bfloat16: the weight in the library's own layout, the GELU inside the product."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tokenmix.inference.layers import Int8Linear, Packing, Range, check_unfollowed
from tokenmix.inference.operators import Activation, Dtype, fused_linear, has_fused_linear, pack_linear

_APPROXIMATE = {"gelu": "none", "gelu-tanh": "tanh"}


class FusedLinear(Packing):
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
        self._packed = None
        if self.bias is not None:
            assert bias is not None
            self.bias.copy_(bias)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) to (..., out_features)."""
        check_unfollowed(self, x)
        # Graphs that are saved or compiled hold PyTorch's public operators.
        plain = self.weight.dtype != torch.float32 or torch.compiler.is_compiling() or torch.jit.is_tracing()
        if plain or not has_fused_linear():
            y = F.linear(x.to(self.weight.dtype), self.weight, self.bias)
            return (y if self.act == "none" else F.gelu(y, approximate=_APPROXIMATE[self.act])).float()
        if self._packed is None:
            self._packed = pack_linear(self.weight, max(1, x.shape[:-1].numel()))
        return fused_linear(x, self._packed, self.bias, self.act)

    def extra_repr(self) -> str:
        """The arguments that shape the layer."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, act={self.act!r}"


AnyLinear = FusedLinear | Int8Linear


def make_linear(dtype: Dtype) -> Callable[..., AnyLinear]:
    """The linear layer whose products are of this type; its arguments are `FusedLinear`'s first four."""
    if dtype == "int8":
        return Int8Linear

    def make(in_features: int, out_features: int, **options: Any) -> FusedLinear:
        return FusedLinear(in_features, out_features, **options, dtype=getattr(torch, dtype))

    return make
