"""The spatial gating unit of gMLP."""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from tokenmix.errors import UserError
from tokenmix.layers.base import Capabilities, Device, Factory, Mixer, replace_parameter, zero_masked
from tokenmix.ops.checks import check_choice, check_flags, check_numbers, check_tensor, check_whole
from tokenmix.ops.gating import GateVariant, fft_macs, gate_matrix, gated_tokens
from tokenmix.ops.resize import resize_gate

GateKind = Literal["dense", "toeplitz", "toeplitz-fft"]


class SpatialGatingUnit(Mixer):
    """Features multiplied by a learned linear map over the tokens.

        s(Z) = Z_1 * (W LayerNorm(Z_2) + b 1^T)            `split`; the other variants in `tokenmix.ops.spatial_gate`

    Paper:
        Liu et al., Pay Attention to MLPs (arXiv 2105.08050), section 2.1.

    Args:
        dim: channels C of the input.
        num_tokens: n, the largest number of tokens.
        variant: `"split"`, `"multiplicative"`, `"additive"` or `"linear"`.
        gate: `"dense"`, n^2 weights (images); `"toeplitz"`, 2n-1 weights W_ij = w_(i-j) (text); `"toeplitz-fft"`, the
            same weights applied in O(N log N).
        causal: token i is gated by tokens up to i.
        norm: LayerNorm on what W meets.
        init_std: standard deviation of W at the start.

    Attributes:
        out_dim: C/2 for `split`, C otherwise.

    Shape:
        (B, N, C) with N <= n to (B, N, out_dim). Fewer tokens than n meet the leading block of W.

    Raises:
        UserError: an odd C to split; more than n tokens (`tokenmix.ops.resize_gate` makes a larger gate).

    The unit starts as the identity on Z_1: W ~ N(0, init_std), b = 1. The paper wants W near zero and prints no number;
    1e-6 is timm's. For the ablations, about whose start the paper says nothing, the same aim gives b = 0 when additive,
    and W = I, b = 0 when linear. Padding is not masked in the paper; here it is if there is a mask.
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
        """Start as the identity."""
        if isinstance(self.norm, nn.LayerNorm):
            self.norm.reset_parameters()
        nn.init.normal_(self.weight, std=self.init_std)
        nn.init.constant_(self.bias, 1.0 if self.variant in ("split", "multiplicative") else 0.0)
        if self.variant == "linear":
            diagonal = self.weight.diagonal() if self.gate == "dense" else self.weight[self.num_tokens - 1]
            diagonal.add_(1.0)

    # Without a `*`: the ONNX exporter of traced graphs gives every argument of a forward method by place.
    def forward(self, x: Tensor, mask: Tensor | None = None, addend: Tensor | None = None) -> Tensor:
        """Gate x (B, N, C); `addend` (B, N, out_dim) joins W Z_2 + b before the product."""
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
        """The (N, N) matrix W that the tokens of x met. It has no batch axis: a mask, which is per sample, is checked
        and otherwise has no part in it; in `forward` the columns of masked tokens meet zeros and their rows are
        dropped."""
        self.checked(x, mask)
        return self.matrix(x.shape[1])

    def matrix(self, n: int) -> Tensor:
        """The (n, n) matrix W that n tokens meet."""
        return gate_matrix(self.weight, n, causal=self.causal)

    def set_grid(self, old: Sequence[int], new: Sequence[int]) -> None:
        """Interpolate W and b (`tokenmix.ops.resize_gate`); a Toeplitz gate only over tokens in a line.

        Raises:
            UserError: a Toeplitz gate over a grid of rows, whose weights depend on a shift in the line of all rows.
        """
        if self.gate != "dense" and len(old) > 1:
            raise UserError(
                f"a {self.gate} gate cannot be resized from grid {tuple(old)} to {tuple(new)}, since a shift along "
                "the sequence is not a shift on the grid; use a dense gate, or build the model at that size"
            )
        weight, bias = resize_gate(self.weight, self.bias, old, new)
        replace_parameter(self, "weight", weight)
        replace_parameter(self, "bias", bias)
        self.num_tokens = len(bias)

    def macs(self, num_tokens: int) -> int:
        """N^2 out_dim, or N log N by FFT (`fft_macs`); the elementwise product is not counted."""
        check_whole(num_tokens=num_tokens)
        if self.gate == "toeplitz-fft":
            return fft_macs(num_tokens, self.out_dim)
        return num_tokens**2 * self.out_dim
