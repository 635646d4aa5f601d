"""The residual branch of a gMLP block, and with tiny attention that of an aMLP block."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tokenmix.errors import UserError
from tokenmix.layers.base import Capabilities, Mixer, check_mask, check_tokens, zero_masked
from tokenmix.layers.linear import Linear
from tokenmix.layers.spatial_gating import GateKind, SpatialGatingUnit
from tokenmix.layers.tiny_attention import TinyAttention
from tokenmix.ops.gating import GateVariant
from tokenmix.ops.linear import linear

__all__ = ["GatedMLP"]

# Hidden numbers of the samples that go through the branch together on a CPU, 4 MiB in float32. Larger temporaries cost
# cache misses, and page faults at each allocation.
_NUMBERS_AT_ONCE = 2**20


class GatedMLP(Mixer):
    """gMLP's block without its norm and shortcut; it mixes channels and tokens at once.

        Z = GELU(U x),    y = V (Z_1 * (W LayerNorm(Z_2) + b 1^T + TinyAttention(x)))

    Paper:
        Liu et al., Pay Attention to MLPs (arXiv 2105.08050), section 2 (gMLP) and 4.3 (aMLP).

    Args:
        dim: width D.
        num_tokens: n, the largest number of tokens.
        expansion: hidden width over D. The paper's networks, in which this is the whole block, use 6. The default 2 is
            for a place where self-attention stood: 3 D^2 + n^2 weights, which is self-attention's 4 D^2 when n = D.
        variant: how the gate acts, see `SpatialGatingUnit`.
        gate: `"dense"`, `"toeplitz"` or `"toeplitz-fft"`.
        causal: token i depends on tokens up to i.
        attention_dim: width of tiny attention's head (aMLP: 64 or 128); 0 for none.
        dropout: rate on the output.

    Shape:
        (B, N, D) with N <= n to (B, N, D).

    Raises:
        UserError: a hidden width that cannot be halved, or more than n tokens.

    Without gradients on a CPU a few samples at a time pass the whole branch, as many as fit the caches; the answer is
    the same. `gmlp_small`, 8 / 32 images of 224 px, 2 cores of an AMD EPYC: 478 / 2,587 ms with all at once, 309 /
    1,268 ms with two at a time.

    Tiny attention reads x, before U, and is added inside the gate. The paper does not say how it starts: here its
    output projection starts as W does, near zero, so that the branch starts as the plain MLP on Z_1, V GELU(U_1 x).
    """

    capabilities = Capabilities(causal=True, length="up-to", map="gate", equivariant=False)

    def __init__(
        self,
        dim: int,
        num_tokens: int,
        *,
        expansion: float = 2.0,
        variant: GateVariant = "split",
        gate: GateKind = "dense",
        causal: bool = False,
        attention_dim: int = 0,
        dropout: float = 0.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        hidden = _hidden(dim, expansion, variant)
        factory = {"device": device, "dtype": dtype}
        self.dim, self.num_tokens, self.hidden = dim, num_tokens, hidden
        self.proj_in = Linear(dim, hidden, **factory)
        self.act = nn.GELU()
        self.gating = SpatialGatingUnit(hidden, num_tokens, variant=variant, gate=gate, causal=causal, **factory)
        width = self.gating.out_dim
        self.tiny_attention = (
            TinyAttention(dim, out_dim=width, attention_dim=attention_dim, causal=causal, **factory)
            if attention_dim
            else None
        )
        if self.tiny_attention is not None:
            self.tiny_attention.proj.init_std = self.gating.init_std
        self.proj_out = Linear(width, dim, **factory)
        self.dropout = nn.Dropout(dropout)
        self.reset_gate()

    def reset_gate(self) -> None:
        """Start as the plain MLP; call it after a network has drawn its own weights for the linear layers."""
        self.gating.reset_parameters()
        if self.tiny_attention is not None:
            nn.init.normal_(self.tiny_attention.proj.weight, std=self.gating.init_std)
            nn.init.zeros_(self.tiny_attention.proj.bias)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, attention: Tensor | None = None) -> Tensor:
        """Mix the tokens of x (B, N, D).

        `attention` (B, 1, N, N) replaces the map of tiny attention, so that gradients reach it; it costs more.
        """
        check_tokens(self, x)
        mask = check_mask(mask, x, x.shape[1])
        at_once = self._samples_at_once(x)
        if at_once is None or at_once >= len(x) or attention is not None:
            return self._branch(x, mask, attention)
        masks = itertools.repeat(None) if mask is None else mask.split(at_once)
        return torch.cat([self._branch(part, m) for part, m in zip(x.split(at_once), masks)])

    def _samples_at_once(self, x: Tensor) -> int | None:
        """How many samples go through the branch together, if not all: without gradients, what fits a CPU's caches."""
        recorded = torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.jit.is_tracing()
        if recorded or x.device.type != "cpu":
            return None
        return max(1, _NUMBERS_AT_ONCE // max(1, x.shape[1] * self.hidden))

    def _branch(self, x: Tensor, mask: Tensor | None, attention: Tensor | None = None) -> Tensor:
        x = zero_masked(x, mask)
        addend = None if self.tiny_attention is None else self.tiny_attention(x, mask, weights=attention)
        if self._in_halves(x):
            rows = zip(self.proj_in.weight.chunk(2), self.proj_in.bias.chunk(2))
            content, gated = (self._activated(x, *each) for each in rows)
            gated = self.gating.gate_halves(content, gated, mask, addend=addend)
        else:
            gated = self.gating(self._expanded(x), mask, addend=addend)
        return zero_masked(self.dropout(self.proj_out(gated)), mask)

    def _expanded(self, x: Tensor) -> Tensor:
        """Z = GELU(U x)."""
        if self._owns(self.proj_in, Linear):
            return self._activated(x, self.proj_in.weight, self.proj_in.bias)
        return self.act(self.proj_in(x))

    def _activated(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """GELU(weight x + bias), in one call if nobody listens to the activation."""
        if self._owns(self.act, nn.GELU) and self.act.approximate == "none":
            return linear(x, weight, bias, gelu=True)
        return self.act(linear(x, weight, bias))

    def _in_halves(self, x: Tensor) -> bool:
        """Whether U is applied in halves, on a CPU, so that no norm has to copy a half of Z out of it, and no gradient
        of a half into one of Z."""
        if x.device.type != "cpu" or torch.compiler.is_compiling() or torch.jit.is_tracing():
            return False
        own = self._owns(self.proj_in, Linear) and self._owns(self.gating, SpatialGatingUnit)
        if not own or not self._owns(self.act, nn.GELU):
            return False
        # A weight of another type, such as a quantised one, may have no halves.
        plain = type(self.proj_in.weight) in (Tensor, nn.Parameter) and self.proj_in.bias is not None
        return plain and self.gating.variant == "split"

    @staticmethod
    def _owns(module: nn.Module, kind: type) -> bool:
        """Whether a module need not be called itself: no other stands in its place, and nobody listens to it."""
        hooks = module._forward_hooks or module._forward_pre_hooks
        hooks = hooks or module._backward_hooks or module._backward_pre_hooks
        # Some packages put another forward on the instance.
        return type(module) is kind and not hooks and "forward" not in vars(module)

    def attention_map(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The (N, N) matrix W that the tokens of x met, see `SpatialGatingUnit.attention_map`."""
        check_tokens(self, x)
        check_mask(mask, x, x.shape[1])
        return self.gating.matrix(x.shape[1])

    def tiny_attention_map(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The (B, 1, N, N) map of tiny attention."""
        if self.tiny_attention is None:
            raise UserError("this GatedMLP has no tiny attention; build it with attention_dim=64")
        return self.tiny_attention.attention_map(x, mask)

    def set_grid(self, old: Sequence[int], new: Sequence[int]) -> None:
        """Interpolate the gate, see `SpatialGatingUnit.set_grid`."""
        self.gating.set_grid(old, new)
        self.num_tokens = self.gating.num_tokens

    def macs(self, num_tokens: int) -> int:
        """N D hidden + N^2 out + N out D, plus tiny attention's; out = hidden/2 for a split gate."""
        linear = num_tokens * self.dim * (self.hidden + self.gating.out_dim)
        tiny = 0 if self.tiny_attention is None else self.tiny_attention.macs(num_tokens)
        return linear + self.gating.macs(num_tokens) + tiny


def _hidden(dim: int, expansion: float, variant: GateVariant) -> int:
    hidden = int(dim * expansion)
    if hidden < 1 or (variant == "split" and hidden % 2):
        raise UserError(
            f"hidden width {hidden} = int({dim} * {expansion}) must be positive, and even for a split gate; "
            f"for example expansion={2 * max(1, hidden // 2) / dim:g}"
        )
    return hidden
