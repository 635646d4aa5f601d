"""Spatial gating: features multiplied by a learned linear map over the tokens."""

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenmix.errors import UserError
from tokenmix.ops.checks import check_choice, check_flags, check_optional, check_tensor, check_tensors

GateVariant = Literal["split", "multiplicative", "additive", "linear"]
GateMethod = Literal["dense", "fft"]


def spatial_gate(
    z: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    variant: GateVariant = "split",
    norm: Callable[[Tensor], Tensor] | None = None,
    addend: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    method: GateMethod = "dense",
) -> Tensor:
    """Gate features by a linear map over the tokens.

        f(X) = W norm(X) + b 1^T + addend
        split           Z_1 * f(Z_2)        multiplicative   Z * f(Z)
        additive        Z + f(Z)            linear           f(Z)

    The paper has no mask.

    Args:
        z: (B, N, C) features; `split` takes the first C/2 channels as Z_1 and the rest as Z_2.
        weight: W, (n, n) with n >= N, whose leading N x N block is used; or (2n-1,), a Toeplitz W.
        bias: b, (n,), one number per token.
        variant: one of the four forms; `split` is the paper's gating unit.
        norm: applied to the tokens before W (default: none).
        addend: (B, N, C/2), or (B, N, C) if not split; tiny attention's output in aMLP.
        mask: (B, N) or (1, N) bool, True = the token takes part. Masked tokens count as 0 under W and are 0 in the
            output. They must hold finite numbers.
        causal: use the lower triangle of W only.
        method: `"fft"` applies a Toeplitz W in O(N log N), see `toeplitz_by_fft`.

    Shape: (B, N, C) to (B, N, C/2) for `split`, (B, N, C) otherwise.

    Reference: Liu et al., Pay Attention to MLPs, arXiv 2105.08050, section 2.1 and table 3.
    """
    check_tensor("z of a spatial gate", z)
    check_tensors(weight=weight, bias=bias)
    check_optional(mask=mask, addend=addend)
    check_choice("variant", variant, ("split", "multiplicative", "additive", "linear"))
    check_choice("method", method, ("dense", "fft"))
    check_flags(causal=causal)
    if variant == "split" and z.shape[-1] % 2:
        raise UserError(f"a split gate halves its channels, got {z.shape[-1]}; give an even number of channels")
    if z.dim() != 3:
        raise UserError(
            f"a spatial gate takes features (B, N, C), got {tuple(z.shape)} to mix; "
            "x.unsqueeze(0) makes a batch of one sample"
        )
    size, n, _ = z.shape
    # A W for fewer tokens is reported where W is cut to n.
    if bias.dim() != 1 or bias.shape[0] < min(n, _built_for(weight)):
        raise UserError(
            f"bias must have a number for each of {n} tokens, got {tuple(bias.shape)}; interpolate it with the "
            "weight by tokenmix.ops.resize_gate"
        )
    if mask is not None:
        if mask.shape not in ((size, n), (1, n)):
            raise UserError(f"mask must be (B, N) = {(size, n)}, got {tuple(mask.shape)}; give one bool for each token")
        mask = mask.expand(size, n)
    out = gated_tokens(
        z, weight, bias, variant=variant, norm=norm, addend=addend, mask=mask, causal=causal, method=method
    )
    return out if mask is None else out.masked_fill(~mask.unsqueeze(-1), 0.0)


def gated_tokens(
    z: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    variant: GateVariant,
    norm: Callable[[Tensor], Tensor] | None,
    addend: Tensor | None,
    mask: Tensor | None,
    causal: bool,
    method: GateMethod,
) -> Tensor:
    """`spatial_gate` of checked arguments; the caller zeroes masked positions."""
    content, gated = z.chunk(2, dim=-1) if variant == "split" else (z, z)
    if norm is not None:
        gated = norm(gated)
    if mask is not None:
        gated = gated.masked_fill(~mask.unsqueeze(-1), 0.0)
    size, n = gated.shape[:2]
    if method == "fft":
        gate = toeplitz_by_fft(weight, gated, causal=causal) + bias[:n, None].to(gated.dtype)
    else:
        # One batched product with W on the left, without a transpose.
        matrix = gate_matrix(weight, n, causal=causal).expand(size, n, n)
        if torch.compiler.is_compiling():
            # The compiler fuses the addition of b with the product by Z_1; baddbmm would write b to memory first.
            product = torch.bmm(matrix, gated)
            gate = product + bias[:n, None].to(product.dtype)
        else:
            gate = torch.baddbmm(bias[:n, None], matrix, gated)
    gate = gate if addend is None else gate + addend
    if variant == "linear":
        return gate
    return content + gate if variant == "additive" else content * gate


def gate_matrix(weight: Tensor, n: int, *, causal: bool = False) -> Tensor:
    """The (n, n) matrix for n tokens: the leading block of a dense W, or the full Toeplitz W."""
    if weight.dim() == 1:
        matrix = toeplitz_matrix(weight, n)
    else:
        _check_length(weight, n)
        # The strides of a view depend on whether n is the full size. torch.export then rejects a range of n that
        # includes it.
        columns = torch.arange(n, device=weight.device) if torch.compiler.is_exporting() else None
        matrix = weight[:n, :n] if columns is None else weight[:n].index_select(1, columns)
    return matrix.tril() if causal else matrix


def _built_for(weight: Tensor) -> int:
    return (weight.shape[0] + 1) // 2 if weight.dim() == 1 else weight.shape[0]


def _check_length(weight: Tensor, n: int) -> None:
    if weight.dim() == 1 and weight.shape[0] % 2 == 0:
        raise UserError(f"a Toeplitz gate of n tokens has 2n-1 weights, got {weight.shape[0]}; give an odd number")
    if n > _built_for(weight):
        raise UserError(
            f"the gate was built for {_built_for(weight)} tokens and got {n}; "
            "set the image size before the swap, or interpolate the weights of a gate without class tokens with "
            "tokenmix.ops.resize_gate(weight, bias, old_grid, new_grid)"
        )


def toeplitz_matrix(weight: Tensor, n: int) -> Tensor:
    """A Toeplitz matrix from its diagonals, W_ij = w_(i-j).

    Args:
        weight: (2m-1,) with m >= n; w_k has index k + m - 1.
        n: size of the matrix.

    Shape: (2m-1,) to (n, n). n < m gives the leading block of the m x m matrix, from the middle of w.
    """
    check_tensors(weight=weight)
    _check_length(weight, n)
    # Concatenated rows of length 2n, read as rows of length 2n-1, shift by one entry per row. Unlike `unfold` this
    # exports with dynamic n; unlike a gather its gradient is a plain sum.
    rows = F.pad(_diagonals(weight, n).flip(0), (0, 1)).expand(n, 2 * n).reshape(-1)
    return rows[: n * (2 * n - 1)].view(n, 2 * n - 1)[:, n - 1 :]


def _diagonals(weight: Tensor, n: int) -> Tensor:
    middle = (weight.shape[0] - 1) // 2
    return weight[middle - n + 1 : middle + n]


def toeplitz_by_fft(weight: Tensor, z: Tensor, *, causal: bool = False) -> Tensor:
    """W Z for a Toeplitz W of N tokens, as a convolution of length 2N: O(N log(N) C), without an N x N tensor.

    On 2 CPU cores (one sample, 256 channels, forward and backward) the FFT and the matrix tie at N = 256. At N = 4,096
    the FFT is 17 times faster. `causal` uses the lower triangle of W only.

    Shape: weight (2n-1,) with n >= N, see `toeplitz_matrix`, z (B, N, C); half precision is computed in float32.
    """
    n = z.shape[1]
    if weight.dim() != 1:
        raise UserError(f"the FFT needs a Toeplitz gate of (2n-1,) weights, got {tuple(weight.shape)}; use 'dense'")
    _check_length(weight, n)
    if z.shape[0] == 0:  # MKL rejects an empty batch
        return gate_matrix(weight, n, causal=causal) @ z
    real = torch.promote_types(z.dtype, torch.float32)
    w = _diagonals(weight, n).to(real)
    if causal:
        w = w * (torch.arange(2 * n - 1, device=w.device) >= n - 1)
    # The linear convolution has 3n-2 entries. Length 2n is enough, because the wrapped entries are not among the n that
    # are read. On a CPU the transform is up to twice as fast along the last axis as along the strided token axis.
    spectrum = torch.fft.rfft(z.transpose(1, 2).to(real).contiguous(), n=2 * n) * torch.fft.rfft(w, n=2 * n)
    return torch.fft.irfft(spectrum, n=2 * n)[..., n - 1 : 2 * n - 1].transpose(1, 2).to(z.dtype)


def fft_macs(num_tokens: int, channels: int) -> int:
    """Multiply-adds of a Toeplitz product by radix-2 real FFTs of length L = 2N.

    Two transforms per channel and one of the weights cost L log2 L each, and each of the L/2 + 1 complex products costs
    4.
    """
    length = 2 * num_tokens
    transform = length * (length - 1).bit_length()
    return (2 * channels + 1) * transform + 4 * (num_tokens + 1) * channels
