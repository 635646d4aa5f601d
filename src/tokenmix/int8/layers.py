"""Layers that multiply in int8 and hand float32 on."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from tokenmix.layers.spatial_gating import SpatialGatingUnit

__all__ = ["Activation", "Int8Gate", "Int8Linear", "Range", "samples_at_a_time"]

Range = tuple[float, float]
Activation = Literal["none", "gelu", "gelu-tanh"]

_POST_OPS = {"none": ("none", "none"), "gelu": ("gelu", "none"), "gelu-tanh": ("gelu", "tanh")}


class Int8Linear(nn.Module):
    """A linear layer on inputs of 8 bits, with the GELU behind it in the same kernel.

        q = clamp(round(x / s) + z, 0, 255),    y = act(s t (q - z) Q^T + b),    W ~ t Q

    Q is int8 with one scale t per row. s and z are fixed from `low` and `high`, the range that x had in calibration, so
    that a sample's answer does not depend on what else is in the batch.

    Shape:
        (..., in_features) float32 to (..., out_features) float32.
    """

    qweight: Tensor
    scale: Tensor
    bias: Tensor | None
    range: Tensor

    def __init__(self, in_features: int, out_features: int, *, bias: bool = True, act: Activation = "none") -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.act: Activation = act
        self.register_buffer("qweight", torch.zeros(out_features, in_features, dtype=torch.int8))
        self.register_buffer("scale", torch.ones(out_features))
        self.register_buffer("bias", torch.zeros(out_features) if bias else None)
        self.register_buffer("range", torch.tensor([0.0, 1.0]))
        self._packed: tuple[Any, ...] | None = None

    @torch.no_grad()
    def fill(self, weight: Tensor, bias: Tensor | None, inputs: Range) -> None:
        """Take over W and b of a map whose input lay in this range."""
        quantised, scale = quantize_rows(weight)
        self.qweight.copy_(quantised)
        self.scale.copy_(scale)
        if self.bias is not None:
            assert bias is not None
            self.bias.copy_(bias)
        # 0 has to be one of the 256 values, so that padding and dead units stay exact.
        low, high = inputs
        self.range.copy_(torch.tensor([min(low, 0.0), max(high, 0.0, low + 1e-6, 1e-6)]))
        self._packed = None

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) to (..., out_features)."""
        return self.multiply(self.quantize(x))

    @property
    def step(self) -> float:
        """s, by which neighbouring inputs differ."""
        return self._ready()[0]

    def quantize(self, x: Tensor) -> Tensor:
        """q (..., in_features) in uint8, from x."""
        scale, _, offset, _, _ = self._ready()
        q = torch.empty(x.shape, dtype=torch.uint8)
        together = samples_at_a_time(x.shape[1:].numel())
        # The half in `offset` makes a cut a rounding. By way of int16, since PyTorch goes from float32 to uint8 number
        # by number, which takes four times as long.
        for some, made in zip(x.split(together), q.split(together)):
            made.copy_(torch.add(offset, some, alpha=1.0 / scale).clamp_(0.0, 255.0).to(torch.int16))
        return q

    def multiply(self, q: Tensor) -> Tensor:
        """y (..., out_features) in float32, from q."""
        scale, zero, _, weight, zeros = self._ready()
        post_op, algorithm = _POST_OPS[self.act]
        y = torch.ops.onednn.qlinear_pointwise(
            q, scale, zero, weight, self.scale, zeros, self.bias, 1.0, 0, torch.float32, post_op, [], algorithm
        )
        # Of nothing oneDNN makes (0, out_features), whatever the other sizes.
        return y.view(*q.shape[:-1], self.out_features)

    def _ready(self) -> tuple[Any, ...]:
        if self._packed is None:
            self._packed = self._pack()
        return self._packed

    def _pack(self) -> tuple[Any, ...]:
        low, high = self.range.tolist()
        scale = (high - low) / 255.0
        zero = round(-low / scale)
        weight = torch.ops.onednn.qlinear_prepack(self.qweight, None)
        zeros = torch.zeros(self.out_features, dtype=torch.int64)
        return scale, zero, torch.tensor(zero + 0.5), weight, zeros

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._packed = None
        super()._load_from_state_dict(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        # The packed weight is oneDNN's own layout, which can neither be copied nor saved.
        return {**self.__dict__, "_packed": None}

    def extra_repr(self) -> str:
        """The arguments that shape the layer."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, act={self.act!r}"


class Int8Gate(nn.Module):
    """A split spatial gating unit whose product over the tokens is done in int8.

        out = Z_1 * (s t (Q P) + b 1^T),    P = clamp(round(LayerNorm(Z_2) / s), -127, 127),    W ~ t Q

    Q is int8 with one scale t per row of W; s is fixed from calibration.

    Shape:
        (B, N, C) with N <= n to (B, N, C/2).
    """

    qweight: Tensor
    scale: Tensor
    bias: Tensor
    limit: Tensor

    def __init__(self, unit: SpatialGatingUnit) -> None:
        super().__init__()
        n = unit.num_tokens
        self.norm, self.num_tokens, self.out_dim = unit.norm, n, unit.out_dim
        self.register_buffer("qweight", torch.zeros(n, n, dtype=torch.int8))
        self.register_buffer("scale", torch.ones(n))
        self.register_buffer("bias", torch.ones(n))
        self.register_buffer("limit", torch.tensor(1.0))

    @torch.no_grad()
    def fill(self, unit: SpatialGatingUnit, limit: float) -> None:
        """Take over a unit whose normalised features lay in [-limit, limit]."""
        weight, scale = quantize_rows(unit.matrix(unit.num_tokens).detach())
        self.qweight.copy_(weight)
        self.scale.copy_(scale)
        self.bias.copy_(unit.bias.detach())
        self.limit.fill_(max(limit, 1e-6))

    def forward(self, x: Tensor, mask: Tensor | None = None, *, addend: Tensor | None = None) -> Tensor:
        """Gate x (B, N, C); mask and addend as in `SpatialGatingUnit`."""
        n = x.shape[1]
        content, gated = x.chunk(2, dim=-1)
        gated = self.norm(gated)
        if mask is not None:
            gated = gated.masked_fill(~mask.unsqueeze(-1), 0.0)
        step = self.limit / 127.0
        weight, rows, bias = self.qweight[:n, :n], (self.scale[:n] * step)[:, None], self.bias[:n, None]
        out = torch.empty_like(gated)
        # One sample at a time, so that what lies between stays in the cache.
        for sample, made in zip(gated, out):
            q = torch.div(sample, step).round_().clamp_(-127.0, 127.0).to(torch.int8)
            torch.addcmul(bias, torch._int_mm(weight, q).float(), rows, out=made)
        if addend is not None:
            out += addend
        out *= content
        return out if mask is None else out.masked_fill(~mask.unsqueeze(-1), 0.0)

    def extra_repr(self) -> str:
        """The arguments that shape the unit."""
        return f"{2 * self.out_dim}, {self.num_tokens}"


def samples_at_a_time(numbers: int) -> int:
    """How many samples to work on together, if each takes so many numbers, for them to stay in the cache.

    It also keeps to memory that the process has already: fresh pages cost more than what is written to them.
    """
    return max(1, 2**18 // max(1, numbers))


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Q (int8) and t with weight ~ t Q, one scale a row; a row of zeros gets zeros."""
    scale = weight.abs().amax(1).clamp_min(1e-30) / 127.0
    return (weight / scale[:, None]).round().to(torch.int8), scale
