"""The residual branch of a gMLP block, and with tiny attention that of an aMLP block."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tokenmix.errors import UserError
from tokenmix.layers.base import Capabilities, Device, Factory, Mixer, finish
from tokenmix.layers.spatial_gating import GateKind, SpatialGatingUnit
from tokenmix.layers.tiny_attention import TinyAttention
from tokenmix.ops.checks import check_numbers, check_rates, check_whole
from tokenmix.ops.gating import GateVariant


class GatedMLP(Mixer):
    """gMLP's block without its norm and shortcut; it mixes channels and tokens at once.

        Z = GELU(U x),    y = V (Z_1 * (W LayerNorm(Z_2) + b 1^T + TinyAttention(x)))

    Paper:
        Liu et al., Pay Attention to MLPs (arXiv 2105.08050), section 2 (gMLP) and 4.3 (aMLP).

    Args:
        dim: width D.
        num_tokens: n, the largest number of tokens.
        expansion: hidden width over D. The paper's networks, in which this is the whole block, use 6. The default 2 is
            to replace self-attention: 3 D^2 + n^2 weights, which is self-attention's 4 D^2 when n = D.
        variant: how the gate acts, see `SpatialGatingUnit`.
        gate: `"dense"`, `"toeplitz"` or `"toeplitz-fft"`.
        causal: token i depends on tokens up to i.
        attention_dim: width of tiny attention's head (aMLP: 64 or 128); 0 for none.
        dropout: rate on the output.

    Shape:
        (B, N, D) with N <= n to (B, N, D).

    Raises:
        UserError: a hidden width that cannot be halved, or more than n tokens.

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
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_whole(dim=dim, num_tokens=num_tokens)
        check_whole(0, attention_dim=attention_dim)
        check_rates(dropout=dropout)
        check_numbers(0.0, expansion=expansion)
        hidden = int(dim * expansion)
        if hidden < 1 or (variant == "split" and hidden % 2):
            raise UserError(
                f"hidden width {hidden} = int({dim} * {expansion}) must be positive, and even for a split gate, got "
                f"{expansion=}; for example expansion={2 * (hidden // 2) / dim if hidden > 1 else 2:g}"
            )
        factory: Factory = {"device": device, "dtype": dtype}
        self.dim, self.num_tokens, self.hidden = dim, num_tokens, hidden
        self.proj_in = nn.Linear(dim, hidden, **factory)
        self.act = nn.GELU()
        self.gating = SpatialGatingUnit(hidden, num_tokens, variant=variant, gate=gate, causal=causal, **factory)
        self.gating.inside = True
        width = self.gating.out_dim
        self.tiny_attention = (
            TinyAttention(dim, out_dim=width, attention_dim=attention_dim, causal=causal, **factory)
            if attention_dim
            else None
        )
        if self.tiny_attention is not None:
            self.tiny_attention.inside = True
            # For networks that draw the weights of all linear layers.
            self.tiny_attention.proj.init_std = self.gating.init_std  # pyrefly: ignore[bad-argument-type]
        self.proj_out = nn.Linear(width, dim, **factory)
        self.dropout = nn.Dropout(dropout)
        self.reset_gate()

    def reset_gate(self) -> None:
        """Start as the plain MLP; call it after a network has drawn its own weights for the linear layers."""
        self.gating.reset_parameters()
        if self.tiny_attention is not None:
            nn.init.normal_(self.tiny_attention.proj.weight, std=self.gating.init_std)
            nn.init.zeros_(self.tiny_attention.proj.bias)

    # Without a `*`: the ONNX exporter of traced graphs gives every argument of a forward method by place.
    def forward(self, x: Tensor, mask: Tensor | None = None, attention: Tensor | None = None) -> Tensor:
        """Mix the tokens of x (B, N, D).

        `attention` (B, 1, N, N) replaces the map of tiny attention, so that gradients reach it; it costs more.
        """
        x, mask = self.checked(x, mask)
        z = self.act(self.proj_in(x))
        addend = None if self.tiny_attention is None else self.tiny_attention(x, mask, attention)
        return finish(self.dropout(self.proj_out(self.gating(z, mask, addend))), mask)

    def attention_map(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The (N, N) matrix W that the tokens of x met, see `SpatialGatingUnit.attention_map`."""
        self.checked(x, mask)
        return self.gating.matrix(x.shape[1])

    def tiny_attention_map(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The (B, 1, N, N) map of tiny attention."""
        if self.tiny_attention is None:
            raise UserError("this GatedMLP has no tiny attention; build it with attention_dim=64")
        return self.tiny_attention.attention_map(*self.checked(x, mask))

    def set_grid(self, old: Sequence[int], new: Sequence[int]) -> None:
        """Interpolate the gate, see `SpatialGatingUnit.set_grid`."""
        self.gating.set_grid(old, new)
        self.num_tokens = self.gating.num_tokens

    def macs(self, num_tokens: int) -> int:
        """N D hidden + N^2 out + N out D, plus tiny attention's; out = hidden/2 for a split gate."""
        check_whole(num_tokens=num_tokens)
        linear = num_tokens * self.dim * (self.hidden + self.gating.out_dim)
        tiny = 0 if self.tiny_attention is None else self.tiny_attention.macs(num_tokens)
        return linear + self.gating.macs(num_tokens) + tiny
