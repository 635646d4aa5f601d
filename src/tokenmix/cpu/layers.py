"""Layers that multiply in int8 and return float32."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec

import torch
from torch import Tensor, nn

from tokenmix.cpu.operators import Activation, int8_linear, int8_matmul, largest_weight, pack_weight
from tokenmix.errors import UserError
from tokenmix.layers.base import Mixer, check_mask, check_tokens, zero_masked
from tokenmix.layers.spatial_gating import SpatialGatingUnit, check_addend
from tokenmix.ops.resize import resize_gate

Range = tuple[float, float]

P = ParamSpec("P")


def outside_graphs(forward: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """A method that torch.compile calls as it is: Inductor takes no weight that oneDNN has packed."""
    uncompiled: Any = torch.compiler.disable(forward, reason="Inductor takes no weight that oneDNN has packed")

    @functools.wraps(forward)
    def called(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        # What `disable` returns takes longer to call.
        if torch.compiler.is_dynamo_compiling():
            return uncompiled(*args, **kwargs)
        return forward(*args, **kwargs)

    return called


class Packing(nn.Module):
    """A layer that keeps its weight in oneDNN's layout as well, from its first call on; no copy or file holds that."""

    def __init__(self) -> None:
        super().__init__()
        self._packed: Any = None

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._packed = None
        super()._load_from_state_dict(*args, **kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Packing":
        self._packed = None
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_packed": None}


class Int8Linear(Packing):
    """A linear layer on inputs of 8 bits, with the GELU after it in the same kernel.

        q = clamp(round(x / s) + z, 0, 255),    y = act(s t (q - z) Q^T + b),    W ~ t Q

    Q is int8 with one scale t per row, of 7 bits on a CPU that adds products of 8 in too few
    (`tokenmix.cpu.operators.largest_weight`). s and z are fixed from `low` and `high`, the range that x had in
    calibration, so that a sample's output does not depend on what else is in the batch.

    Shape:
        (..., in_features) float32 to (..., out_features) float32.

    Raises:
        UserError: an input that autograd follows, or a move to another type or device.
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

    @torch.no_grad()
    def fill(self, weight: Tensor, bias: Tensor | None, inputs: Range) -> None:
        """Take over W and b of a map whose input was in this range."""
        quantised, scale = quantize_rows(weight, largest_weight())
        self.qweight.copy_(quantised)
        self.scale.copy_(scale)
        if self.bias is not None:
            assert bias is not None
            self.bias.copy_(bias)
        # 0 has to be one of the 256 values, so that padding and dead units stay exact.
        low, high = inputs
        self.range.copy_(torch.tensor([min(low, 0.0), max(high, 0.0, low + 1e-6, 1e-6)]))
        self._packed = None

    @outside_graphs
    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) to (..., out_features)."""
        return self.multiply(self.quantize(x))

    @property
    def step(self) -> float:
        """s, by which neighbouring inputs differ."""
        return self._ready()[0]

    def quantize(self, x: Tensor) -> Tensor:
        """q (..., in_features) in uint8, from x."""
        check_unfollowed(self, x)
        scale, _, offset, *_ = self._ready()
        q = torch.empty(x.shape, dtype=torch.uint8)
        together = samples_at_a_time(x.shape[1:].numel())
        # The half in `offset` makes a cut a rounding. By way of int16, since PyTorch goes from float32 to uint8 number
        # by number, which takes four times as long.
        for some, made in zip(x.split(together), q.split(together)):
            made.copy_(torch.add(offset, some, alpha=1.0 / scale).clamp_(0.0, 255.0).to(torch.int16))
        return q

    def multiply(self, q: Tensor) -> Tensor:
        """y (..., out_features) in float32, from q."""
        scale, zero, _, weight, rows, zeros = self._ready()
        y = int8_linear(q, scale, zero, weight, rows, zeros, self.bias, self.act)
        # Of nothing oneDNN makes (0, out_features), whatever the other sizes.
        return y.view(*q.shape[:-1], self.out_features)

    def _ready(self) -> tuple[Any, ...]:
        if self._packed is None:
            if torch.compiler.is_exporting():
                raise UserError("an int8 model packs its weights in its first call; call it once before torch.export")
            self._packed = self._pack()
        return self._packed

    def _pack(self) -> tuple[Any, ...]:
        low, high = self.range.tolist()
        scale = (high - low) / 255.0
        zero = round(-low / scale)
        weight, rows = self.qweight, self.scale
        if weight.numel() and int(weight.abs().max()) > largest_weight():
            # The file of a CPU that adds products of 8 bits exactly.
            weight, rows = quantize_rows(rows[:, None] * weight, largest_weight())
        zeros = torch.zeros(self.out_features, dtype=torch.int64)
        return scale, zero, torch.tensor(zero + 0.5), pack_weight(weight), rows, zeros

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Packing:
        check_move(fn)
        return super()._apply(fn, recurse)

    def extra_repr(self) -> str:
        """The arguments that shape the layer."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, act={self.act!r}"


class Int8Gate(Mixer):
    """A split spatial gating unit whose product over the tokens is done in int8.

        out = Z_1 * (s t (Q P) + b 1^T),    P = clamp(round(LayerNorm(Z_2) / s), -127, 127),    W ~ t Q

    Q is int8 with one scale t per row of W; s is fixed from calibration.

    Shape:
        (B, N, C) with N <= n to (B, N, C/2).

    Raises:
        UserError: more than n tokens, an input that autograd follows, or a move to another type or device.
    """

    capabilities = SpatialGatingUnit.capabilities
    qweight: Tensor
    scale: Tensor
    bias: Tensor
    limit: Tensor

    def __init__(self, unit: SpatialGatingUnit) -> None:
        super().__init__()
        n = unit.num_tokens
        self.dim, self.norm, self.num_tokens, self.out_dim = unit.dim, unit.norm, n, unit.out_dim
        self.gate, self.causal = unit.gate, unit.causal
        self.register_buffer("qweight", torch.zeros(n, n, dtype=torch.int8))
        self.register_buffer("scale", torch.ones(n))
        self.register_buffer("bias", torch.ones(n))
        self.register_buffer("limit", torch.tensor(1.0))

    @torch.no_grad()
    def fill(self, unit: SpatialGatingUnit, limit: float) -> None:
        """Take over a unit whose normalised features were in [-limit, limit]."""
        self.qweight, self.scale = quantize_rows(unit.matrix(unit.num_tokens).detach())
        self.bias.copy_(unit.bias.detach())
        self.limit.fill_(max(limit, 1e-6))

    @outside_graphs
    def forward(self, x: Tensor, mask: Tensor | None = None, *, addend: Tensor | None = None) -> Tensor:
        """Gate x (B, N, C); mask and addend as in `SpatialGatingUnit`."""
        check_tokens(self, x)
        check_unfollowed(self, x)
        n = self._checked_length(x.shape[1])
        mask = check_mask(mask, x, n)
        check_addend(addend, x, self.out_dim)
        content, gated = x.chunk(2, dim=-1)
        gated = zero_masked(self.norm(gated), mask)
        step = self.limit / 127.0
        weight, rows, bias = self.qweight[:n, :n], (self.scale[:n] * step)[:, None], self.bias[:n, None]
        out = torch.empty_like(gated)
        # One sample at a time, so that what lies between stays in the cache.
        for sample, made in zip(gated, out):
            q = torch.div(sample, step).round_().clamp_(-127.0, 127.0).to(torch.int8)
            torch.addcmul(bias, int8_matmul(weight, q).float(), rows, out=made)
        if addend is not None:
            out += addend
        out *= content
        return zero_masked(out, mask)

    def attention_map(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The (N, N) matrix t Q that the tokens of x met."""
        check_tokens(self, x)
        check_mask(mask, x, x.shape[1])
        return self.matrix(x.shape[1])

    def matrix(self, n: int) -> Tensor:
        """The (n, n) matrix t Q that n tokens meet."""
        n = self._checked_length(n)
        return self.scale[:n, None] * self.qweight[:n, :n]

    def set_grid(self, old: Sequence[int], new: Sequence[int]) -> None:
        """Interpolate t Q and b as `SpatialGatingUnit.set_grid`, and round once more.

        Raises:
            UserError: a Toeplitz or causal gate, of whose weights the matrix shows a part.
        """
        if self.gate != "dense" or self.causal:
            kind = "causal" if self.causal else self.gate
            raise UserError(
                f"a {kind} gate in int8 cannot be resized from grid {tuple(old)} to {tuple(new)}; "
                "give the float32 model that size, then quantise it"
            )
        weight, self.bias = resize_gate(self.matrix(self.num_tokens), self.bias, old, new)
        self.qweight, self.scale = quantize_rows(weight)
        self.num_tokens = len(self.bias)

    def macs(self, num_tokens: int) -> int:
        """N^2 out_dim."""
        return num_tokens**2 * self.out_dim

    def _checked_length(self, n: int) -> int:
        if n > self.num_tokens:
            raise UserError(f"this gate takes up to {self.num_tokens} tokens, got {n}; set_grid makes it larger")
        return n

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Int8Gate":
        check_move(fn)
        return super()._apply(fn, recurse)

    def extra_repr(self) -> str:
        """The arguments that shape the unit."""
        return f"{2 * self.out_dim}, {self.num_tokens}"


def check_unfollowed(layer: nn.Module, x: Tensor) -> None:
    """Raise `UserError` if autograd follows x, of which an int8 product records nothing."""
    if x.requires_grad and torch.is_grad_enabled():
        raise UserError(
            f"{type(layer).__name__} has no gradient and got an input that requires one; "
            "call the copy under torch.no_grad(), or take gradients of the model that it was made from"
        )


def check_move(fn: Callable[[Tensor], Tensor]) -> None:
    """Raise `UserError` if what `nn.Module._apply` is about to do leaves float32 on the CPU."""
    moved = fn(torch.zeros(1))
    if moved.dtype != torch.float32 or moved.device.type != "cpu":
        raise UserError(
            f"an int8 model stays in float32 on the CPU around its products, got {moved.dtype} on {moved.device}: "
            "quantise the float32 model again, since parts of this copy may have been converted already"
        )


def samples_at_a_time(numbers: int, most: int = 2**18) -> int:
    """Number of samples to process together, if each takes that many numbers, so that they stay in the cache.

    It also keeps to memory that the process has already: fresh pages cost more than what is written to them.
    """
    return max(1, most // max(1, numbers))


def quantize_rows(weight: Tensor, largest: int = 127) -> tuple[Tensor, Tensor]:
    """Q (int8, |Q| <= largest) and t with weight ~ t Q, one scale a row; a row of zeros gets zeros."""
    scale = weight.abs().amax(1).clamp_min(1e-30) / largest
    return (weight / scale[:, None]).round().to(torch.int8), scale
