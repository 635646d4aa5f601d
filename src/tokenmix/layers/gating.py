"""Spatial gating (gMLP), tiny attention (aMLP) and MLP-Mixer's token MLP."""

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenmix.errors import UserError
from tokenmix.layers.base import Capabilities, Device, Factory, Mixer, masked_output, replace_parameter, zero_masked
from tokenmix.ops.attention import attention, attention_probabilities
from tokenmix.ops.checks import check_choice, check_flags, check_numbers, check_rates, check_tensor, check_whole
from tokenmix.ops.gating import GateVariant, fft_macs, gate_matrix, gated_tokens
from tokenmix.ops.resize import resize_gate, resize_rows

GateKind = Literal["dense", "toeplitz", "toeplitz-fft"]


class SpatialGatingUnit(Mixer):
    """Features multiplied by a learned linear map over the tokens.

        s(Z) = Z_1 * (W LayerNorm(Z_2) + b 1^T)            `split`; the other variants in `tokenmix.ops.spatial_gate`

    The unit starts as the identity on Z_1: W ~ N(0, init_std), b = 1. The paper asks for W near zero and gives no
    number; 1e-6 is from timm. The paper does not initialise the ablations. Here they also start near the identity:
    b = 0 for additive, W = I and b = 0 for linear. The paper does not mask padding; this layer applies the mask if
    there is one.

    Args:
        dim: channels C of the input.
        num_tokens: n, the largest number of tokens.
        variant: `"split"`, `"multiplicative"`, `"additive"` or `"linear"`.
        gate: `"dense"`, n^2 weights (images); `"toeplitz"`, 2n-1 weights W_ij = w_(i-j) (text); `"toeplitz-fft"`, the
            same weights applied in O(N log N).
        causal: token i is gated by tokens up to i.
        norm: apply LayerNorm to the input of W.
        init_std: standard deviation of W at the start.

    Attributes:
        out_dim: C/2 for `split`, C otherwise.

    Shape: (B, N, C) with N <= n to (B, N, out_dim). N < n tokens use the leading N x N block of W.

    Reference: Liu et al., Pay Attention to MLPs, arXiv 2105.08050, section 2.1.
    """

    capabilities = Capabilities(causal=True, length="up-to", map="gate", equivariant=False)

    def __init__(
        self,
        dim: int,
        num_tokens: int,
        *,
        variant: GateVariant = "split",
        gate: GateKind = "dense",
        causal: bool = False,
        norm: bool = True,
        init_std: float = 1e-6,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_whole(dim=dim, num_tokens=num_tokens)
        check_choice("variant", variant, get_args(GateVariant))
        check_choice("gate", gate, get_args(GateKind))
        check_flags(causal=causal, norm=norm)
        check_numbers(0.0, init_std=init_std)
        if variant == "split" and dim % 2:
            raise UserError(f"a split gate halves its channels, got dim={dim}; give an even dim or another variant")
        factory: Factory = {"device": device, "dtype": dtype}
        self.dim, self.num_tokens, self.causal = dim, num_tokens, causal
        self.variant: GateVariant = variant
        self.gate: GateKind = gate
        self.init_std = init_std
        self.out_dim = dim // 2 if variant == "split" else dim
        self.norm = nn.LayerNorm(self.out_dim, **factory) if norm else nn.Identity()
        shape = (num_tokens, num_tokens) if gate == "dense" else (2 * num_tokens - 1,)
        self.weight = nn.Parameter(torch.empty(shape, **factory))
        self.bias = nn.Parameter(torch.empty(num_tokens, **factory))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if isinstance(self.norm, nn.LayerNorm):
            self.norm.reset_parameters()
        nn.init.normal_(self.weight, std=self.init_std)
        nn.init.constant_(self.bias, 1.0 if self.variant in ("split", "multiplicative") else 0.0)
        if self.variant == "linear":
            diagonal = self.weight.diagonal() if self.gate == "dense" else self.weight[self.num_tokens - 1]
            diagonal.add_(1.0)

    # No `*` before the optional arguments: the ONNX exporter of traced graphs passes them by position.
    def forward(self, x: Tensor, mask: Tensor | None = None, addend: Tensor | None = None) -> Tensor:
        """Gate x (B, N, C); `addend` (B, N, out_dim) is added to W Z_2 + b before the product."""
        x, mask = self.checked(x, mask)
        if addend is not None and not self.inside:
            check_tensor("addend", addend)
            if addend.shape != (*x.shape[:2], self.out_dim):
                raise UserError(
                    f"addend must be {(*x.shape[:2], self.out_dim)}, got {tuple(addend.shape)}; it joins the output of "
                    f"the gate, of width {self.out_dim}"
                )
        out = gated_tokens(
            x,
            self.weight,
            self.bias,
            variant=self.variant,
            norm=self.norm,
            addend=addend,
            mask=mask,
            causal=self.causal,
            method="fft" if self.gate == "toeplitz-fft" else "dense",
        )
        return out if self.inside else zero_masked(out, mask)

    def attention_map(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The (N, N) matrix W for the tokens of x; `mask` is only checked, because W is the same for all samples."""
        self.checked(x, mask)
        return self.matrix(x.shape[1])

    def matrix(self, n: int) -> Tensor:
        """The (n, n) matrix W for n tokens."""
        return gate_matrix(self.weight, n, causal=self.causal)

    def set_grid(self, old: Sequence[int], new: Sequence[int]) -> None:
        """Interpolate W and b (`tokenmix.ops.resize_gate`); `UserError` for a Toeplitz gate on several rows."""
        if self.gate != "dense" and len(old) > 1:
            raise UserError(
                f"a {self.gate} gate cannot be resized from grid {tuple(old)} to {tuple(new)}, since a shift along "
                "the sequence is not a shift on the grid; use a dense gate, or build the model at that size"
            )
        weight, bias = resize_gate(self.weight, self.bias, old, new, causal=self.causal)
        replace_parameter(self, "weight", weight)
        replace_parameter(self, "bias", bias)
        self.num_tokens = len(bias)

    def macs(self, num_tokens: int) -> int:
        """N^2 out_dim, or N log N by FFT (`fft_macs`); the elementwise product is not counted."""
        check_whole(num_tokens=num_tokens)
        return fft_macs(num_tokens, self.out_dim) if self.gate == "toeplitz-fft" else num_tokens**2 * self.out_dim


class TinyAttention(Mixer):
    """Single-head self-attention of small width.

        Q, K, V = split(W_qkv x),    out = W_o softmax(Q K^T / sqrt(d)) V

    Args:
        dim: width D of the tokens.
        out_dim: width of the output (default D). aMLP uses half of the hidden width.
        attention_dim: head width d: 64 in aMLP-base, 128 in aMLP-large.
        causal: token i sees tokens up to i.

    Shape: (B, N, D) to (B, N, out_dim).

    Reference: Liu et al., Pay Attention to MLPs, arXiv 2105.08050, section 4.3 (aMLP).
    """

    capabilities = Capabilities(causal=True, map="tokens")

    def __init__(
        self,
        dim: int,
        *,
        out_dim: int | None = None,
        attention_dim: int = 64,
        causal: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        out_dim = dim if out_dim is None else out_dim
        check_whole(dim=dim, out_dim=out_dim, attention_dim=attention_dim)
        check_flags(causal=causal)
        factory: Factory = {"device": device, "dtype": dtype}
        self.dim, self.out_dim, self.attention_dim, self.causal = dim, out_dim, attention_dim, causal
        self.qkv = nn.Linear(dim, 3 * attention_dim, **factory)
        self.proj = nn.Linear(attention_dim, out_dim, **factory)

    # No `*` before the optional arguments: the ONNX exporter of traced graphs passes them by position.
    def forward(self, x: Tensor, mask: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        """Attend over the tokens of x (B, N, D); `weights` (B, 1, N, N) replaces the layer's attention map."""
        x, mask = self.checked(x, mask)
        query, key, value = self.qkv(x).unsqueeze(1).chunk(3, dim=-1)
        mixed = attention(query, key, value, mask=mask, causal=self.causal) if weights is None else weights @ value
        return masked_output(self.proj(mixed.squeeze(1)), None if self.inside else mask)

    def attention_map(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The attention map (B, 1, N, N)."""
        x, mask = self.checked(x, mask)
        query, key, _ = self.qkv(x).unsqueeze(1).chunk(3, dim=-1)
        return attention_probabilities(query, key, mask=mask, causal=self.causal)

    def macs(self, num_tokens: int) -> int:
        """3 N D d + 2 N^2 d + N d out_dim."""
        check_whole(num_tokens=num_tokens)
        projections = num_tokens * self.attention_dim * (3 * self.dim + self.out_dim)
        return projections + 2 * num_tokens**2 * self.attention_dim


class GatedMLP(Mixer):
    """gMLP's block without its norm and shortcut; mixes channels and tokens at once.

        Z = GELU(U x),    y = V (Z_1 * (W LayerNorm(Z_2) + b 1^T + TinyAttention(x)))

    Tiny attention reads x, before U. The paper does not give its initial weights. Here its output projection starts
    near zero, like W, so the block starts as the plain MLP V GELU(U_1 x).

    Args:
        dim: width D.
        num_tokens: n, the largest number of tokens.
        expansion: hidden width over D. The paper's networks, which have no other MLP, use 6. The default 2 replaces
            self-attention: 3 D^2 + n^2 weights, equal to self-attention's 4 D^2 when n = D.
        variant, gate, causal: see `SpatialGatingUnit`.
        attention_dim: head width of tiny attention (aMLP: 64 or 128); 0 for none.
        dropout: rate on the output.

    Shape: (B, N, D) with N <= n to (B, N, D).

    Reference: Liu et al., Pay Attention to MLPs, arXiv 2105.08050, sections 2 (gMLP) and 4.3 (aMLP).
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
            # For networks that initialise all linear layers.
            self.tiny_attention.proj.init_std = self.gating.init_std  # pyrefly: ignore[bad-argument-type]
        self.proj_out = nn.Linear(width, dim, **factory)
        self.dropout = nn.Dropout(dropout)
        self.reset_gate()

    def reset_gate(self) -> None:
        """Start as the plain MLP; call this after a network has initialised its linear layers."""
        self.gating.reset_parameters()
        if self.tiny_attention is not None:
            nn.init.normal_(self.tiny_attention.proj.weight, std=self.gating.init_std)
            nn.init.zeros_(self.tiny_attention.proj.bias)

    # No `*` before the optional arguments: the ONNX exporter of traced graphs passes them by position.
    def forward(self, x: Tensor, mask: Tensor | None = None, attention: Tensor | None = None) -> Tensor:
        """Mix x (B, N, D); `attention` (B, 1, N, N) replaces the map of tiny attention, which gradients then reach."""
        x, mask = self.checked(x, mask)
        if attention is not None and self.tiny_attention is None:
            raise UserError("this GatedMLP has no tiny attention; build it with attention_dim=64")
        z = self.act(self.proj_in(x))
        addend = None if self.tiny_attention is None else self.tiny_attention(x, mask, attention)
        return masked_output(self.dropout(self.proj_out(self.gating(z, mask, addend))), mask)

    def attention_map(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        self.checked(x, mask)
        return self.gating.matrix(x.shape[1])

    def tiny_attention_map(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The (B, 1, N, N) map of tiny attention."""
        if self.tiny_attention is None:
            raise UserError("this GatedMLP has no tiny attention; build it with attention_dim=64")
        return self.tiny_attention.attention_map(*self.checked(x, mask))

    def set_grid(self, old: Sequence[int], new: Sequence[int]) -> None:
        self.gating.set_grid(old, new)
        self.num_tokens = self.gating.num_tokens

    def macs(self, num_tokens: int) -> int:
        """N D hidden + N^2 out + N out D, plus tiny attention's; out = hidden/2 for a split gate."""
        check_whole(num_tokens=num_tokens)
        linear = num_tokens * self.dim * (self.hidden + self.gating.out_dim)
        tiny = 0 if self.tiny_attention is None else self.tiny_attention.macs(num_tokens)
        return linear + self.gating.macs(num_tokens) + tiny


class TokenMLP(Mixer):
    """One MLP over the tokens, shared by all channels; masked tokens count as 0.

        out = (W_2 gelu(W_1 X + b_1 1^T) + b_2 1^T),   W_1 (T x N), W_2 (N x T)

    Args:
        dim: width D.
        num_tokens: N.
        hidden_tokens: T, width of the MLP (default D / 2, as published).
        dropout: rate on the output.

    Shape: x (B, N, D) to (B, N, D), exactly N tokens.

    Cost: 2 N T D multiply-adds.

    Reference: Tolstikhin et al., MLP-Mixer: An all-MLP Architecture for Vision, arXiv 2105.01601, section 2.
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
        return masked_output(self.dropout(mixed).transpose(1, 2), mask)

    @torch.no_grad()
    def set_grid(self, old: Sequence[int], new: Sequence[int]) -> None:
        """Interpolate W_1, W_2 and b_2 over the token grid; W_1 is scaled by N_old / N_new, to keep its sum."""
        if prod(old) != self.num_tokens:
            raise UserError(
                f"the grid {tuple(old)} has {prod(old)} tokens, the layer has {self.num_tokens}; give one of as many"
            )
        resized, count = partial(resize_rows, old_grid=old, new_grid=new), prod(new)
        replace_parameter(self.fc1, "weight", resized(self.fc1.weight) * (self.num_tokens / count))
        replace_parameter(self.fc2, "weight", resized(self.fc2.weight.T).T.contiguous())
        replace_parameter(self.fc2, "bias", resized(self.fc2.bias[None])[0])
        self.num_tokens = self.fc1.in_features = self.fc2.out_features = count

    def macs(self, num_tokens: int) -> int:
        check_whole(num_tokens=num_tokens)
        return 2 * num_tokens * self.fc1.out_features * self.dim
