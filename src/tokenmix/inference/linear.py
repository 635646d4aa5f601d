"""Linear layers for CPUs, in int8, float32 or bfloat16, with prepacked weights and a fused GELU."""

import functools
from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenmix.errors import UserError
from tokenmix.inference.operators import (
    ACTIVATIONS,
    Activation,
    Dtype,
    PackedInt8,
    fused_linear,
    has_fused_linear,
    int8_linear,
    largest_weight,
    pack_linear,
    pack_weight,
)

Range = tuple[float, float]

P = ParamSpec("P")
Held = TypeVar("Held")


def outside_graphs(forward: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Exclude a method from torch.compile: Inductor does not accept weights packed by oneDNN."""
    uncompiled = torch.compiler.disable(forward, reason="Inductor takes no weight that oneDNN has packed")

    @functools.wraps(forward)
    def called(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        # Calls to the result of `disable` are slower.
        if torch.compiler.is_dynamo_compiling():
            return uncompiled(*args, **kwargs)
        return forward(*args, **kwargs)

    return called


class Packing(nn.Module, Generic[Held]):
    """A layer that packs its weight for oneDNN at the first call; copies and files do not contain the packed weight."""

    bias: Tensor | None

    def __init__(self, in_features: int, out_features: int, act: Activation) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.act: Activation = act
        self._packed: Held | None = None

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, act={self.act!r}"

    def _load_from_state_dict(self, *args: object, **kwargs: object) -> None:
        self._packed = None
        super()._load_from_state_dict(*args, **kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Packing":
        self._packed = None
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_packed": None}


class Int8Linear(Packing[PackedInt8]):
    """A linear layer on 8-bit inputs, with the following GELU in the same kernel.

        q = clamp(round(x / s) + z, 0, 255),    y = act(s t (q - z) Q^T + b),    W ~ t Q

    Q is int8 with one scale t per row; 7 bits on CPUs that accumulate products in 16 bits
    (`tokenmix.inference.operators.largest_weight`). s and z are fixed from `low` and `high`, the range of x in
    calibration. A sample's output therefore does not depend on the rest of the batch.

    Shape: (..., in_features) float32 to (..., out_features) float32.

    Raises:
        UserError: the input requires a gradient, or the layer is moved to another dtype or device.
    """

    qweight: Tensor
    scale: Tensor
    range: Tensor

    def __init__(self, in_features: int, out_features: int, *, bias: bool = True, act: Activation = "none") -> None:
        super().__init__(in_features, out_features, act)
        self.register_buffer("qweight", torch.zeros(out_features, in_features, dtype=torch.int8))
        self.register_buffer("scale", torch.ones(out_features))
        self.register_buffer("bias", torch.zeros(out_features) if bias else None)
        self.register_buffer("range", torch.tensor([0.0, 1.0]))

    @torch.no_grad()
    def fill(self, weight: Tensor, bias: Tensor | None, inputs: Range) -> None:
        """Set W and b; `inputs` is the range of the input."""
        quantised, scale = quantize_rows(weight, largest_weight())
        self.qweight.copy_(quantised)
        self.scale.copy_(scale)
        if self.bias is not None:
            assert bias is not None
            self.bias.copy_(bias)
        # 0 must be one of the 256 values, so that padding and dead units stay exact.
        low, high = inputs
        self.range.copy_(torch.tensor([min(low, 0.0), max(high, 0.0, low + 1e-6, 1e-6)]))
        self._packed = None

    @outside_graphs
    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(self.quantize(x))

    @property
    def step(self) -> float:
        """s, the input's quantization step."""
        return self._ready().step

    def quantize(self, x: Tensor) -> Tensor:
        """q (..., in_features) in uint8, from x."""
        check_unfollowed(self, x)
        held = self._ready()
        q = torch.empty(x.shape, dtype=torch.uint8)
        together = samples_at_a_time(x.shape[1:].numel())
        # The half in `offset` turns truncation into rounding. The detour over int16 is four times as fast: PyTorch
        # converts float32 to uint8 element by element.
        for some, made in zip(x.split(together), q.split(together)):
            made.copy_(torch.add(held.offset, some, alpha=1.0 / held.step).clamp_(0.0, 255.0).to(torch.int16))
        return q

    def multiply(self, q: Tensor) -> Tensor:
        """y (..., out_features) in float32, from q."""
        held = self._ready()
        y = int8_linear(q, held, self.bias, self.act)
        # For an empty input, oneDNN returns (0, out_features) regardless of the other sizes.
        return y.view(*q.shape[:-1], self.out_features)

    def _ready(self) -> PackedInt8:
        if self._packed is None:
            if torch.compiler.is_exporting():
                raise UserError("an int8 model packs its weights in its first call; call it once before torch.export")
            low, high = self.range.tolist()
            scale = (high - low) / 255.0
            zero = round(-low / scale)
            weight, rows = self.qweight, self.scale
            if weight.numel() and int(weight.abs().max()) > largest_weight():
                # The file is from a CPU that adds 8-bit products exactly.
                weight, rows = quantize_rows(rows[:, None] * weight, largest_weight())
            zeros = torch.zeros(self.out_features, dtype=torch.int64)
            offset = torch.tensor(zero + 0.5)
            self._packed = PackedInt8(scale, zero, pack_weight(weight), rows, zeros, offset)
        return self._packed

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Packing:
        moved = fn(torch.zeros(1))
        if moved.dtype != torch.float32 or moved.device.type != "cpu":
            raise UserError(
                f"an int8 model stays in float32 on the CPU around its products, got {moved.dtype} on {moved.device}: "
                "quantise the float32 model again, since parts of this copy may have been converted already"
            )
        return super()._apply(fn, recurse)


def check_unfollowed(layer: nn.Module, x: Tensor) -> None:
    """Raise `UserError` if x requires a gradient, because int8 products are not differentiable."""
    if x.requires_grad and torch.is_grad_enabled():
        raise UserError(
            f"{type(layer).__name__} has no gradient and got an input that requires one; "
            "call the copy under torch.no_grad(), or take gradients of the model that it was made from"
        )


def samples_at_a_time(numbers: int, most: int = 2**18) -> int:
    """Number of samples to process together so that they stay in the cache and in memory that is already mapped."""
    return max(1, most // max(1, numbers))


def quantize_rows(weight: Tensor, largest: int = 127) -> tuple[Tensor, Tensor]:
    """Q (int8, |Q| <= largest) and t with weight ~ t Q, one scale per row; a zero row gives zeros."""
    scale = weight.abs().amax(1).clamp_min(1e-30) / largest
    return (weight / scale[:, None]).round().to(torch.int8), scale


class FusedLinear(Packing[Tensor]):
    """A linear layer for inference, with the following GELU.

        y = act(x W^T + b)

    In bfloat16, x, W, b and the product are rounded; the output is float32.

    Shape: (..., in_features) float32 to (..., out_features) float32.

    Raises:
        UserError: the input requires a gradient.
    """

    weight: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        act: Activation = "none",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(in_features, out_features, act)
        self.register_buffer("weight", torch.zeros(out_features, in_features, dtype=dtype))
        self.register_buffer("bias", torch.zeros(out_features, dtype=dtype) if bias else None)

    @torch.no_grad()
    def fill(self, weight: Tensor, bias: Tensor | None, inputs: Range) -> None:
        """Set W and b; only `Int8Linear` uses the range."""
        self.weight.copy_(weight)
        self._packed = None
        if self.bias is not None:
            assert bias is not None
            self.bias.copy_(bias)

    def forward(self, x: Tensor) -> Tensor:
        check_unfollowed(self, x)
        # Saved and compiled graphs may contain PyTorch's public operators only.
        plain = self.weight.dtype != torch.float32 or torch.compiler.is_compiling() or torch.jit.is_tracing()
        if plain or not has_fused_linear():
            y = F.linear(x.to(self.weight.dtype), self.weight, self.bias)
            return (y if self.act == "none" else F.gelu(y, approximate=ACTIVATIONS[self.act][1])).float()
        if self._packed is None:
            self._packed = pack_linear(self.weight, max(1, x.shape[:-1].numel()))
        return fused_linear(x, self._packed, self.bias, self.act)


AnyLinear = FusedLinear | Int8Linear


def make_linear(dtype: Dtype) -> Callable[..., AnyLinear]:
    """The linear layer class for products of this type, with the first four arguments of `FusedLinear`."""
    return Int8Linear if dtype == "int8" else functools.partial(FusedLinear, dtype=getattr(torch, dtype))
