"""PyTorch's private operators for CPUs: all the non-public ones that `tokenmix.inference` calls."""

import functools
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from tokenmix.errors import UserError

Activation = Literal["none", "gelu", "gelu-tanh"]

Dtype = Literal["float32", "bfloat16", "int8"]

OPERATORS: dict[Dtype, tuple[str, ...]] = {
    "float32": ("mkldnn._linear_pointwise", "mkldnn._reorder_linear_weight"),
    "bfloat16": (),
    "int8": ("onednn.qlinear_prepack", "onednn.qlinear_pointwise"),
}
"""Their names under `torch.ops`, by the type of the products that need them."""

ACTIVATIONS = {"none": ("none", "none"), "gelu": ("gelu", "none"), "gelu-tanh": ("gelu", "tanh")}
"""Of each activation the function and its approximation, as operators name them."""


def require_operators(dtype: Dtype) -> None:
    """Raise `UserError` unless this PyTorch has the operators and, for int8, the library after them."""
    if dtype == "int8" and "onednn" not in torch.backends.quantized.supported_engines:
        raise UserError("this PyTorch has no oneDNN, whose int8 kernels are needed; install the wheel of pytorch.org")
    split = ((name, *name.split(".")) for name in OPERATORS[dtype])
    missing = [name for name, library, operator in split if not hasattr(getattr(torch.ops, library), operator)]
    if missing:
        raise UserError(
            f"torch {torch.__version__} has no operator {', '.join(missing)}, which {dtype} needs; install torch 2.14"
        )


@functools.cache
def has_fused_linear() -> bool:
    """Whether float32 products go to oneDNN: on AMD's CPUs with AVX-512, which PyTorch's MKL does not use there.

    On AMD's others and on Intel's, MKL is as fast or faster (dev/LOG.md, 2026-11-22).
    """
    found = torch.cpu.get_capabilities()
    amd = "AMD" in str(found.get("cpu_name")) and bool(found.get("avx512_f"))
    return torch.backends.mkldnn.is_available() and amd


def pack_linear(weight: Tensor, rows: int) -> Tensor:
    """A float32 weight (E, D) in oneDNN's layout for inputs of about `rows` rows; it cannot be copied or saved."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, rows)


def fused_linear(x: Tensor, packed: Tensor, bias: Tensor | None, act: Activation) -> Tensor:
    """act(x W^T + b) in one kernel, for a weight of `pack_linear`."""
    function, approximation = ACTIVATIONS[act]
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, function, [], approximation if act != "none" else "")


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int) -> Tensor:
    """A float32 convolution (B, C, H, W) to (B, E, H', W') whose sums are added in one order at any batch size.

    F.conv2d sends one small image to PyTorch's own kernel and several to oneDNN. The two round differently, so that a
    number between two 8-bit steps may go either way. So does oneDNN by the layout of x, which for one image PyTorch
    reads from the stride of the batch, any number: x is given with its channels last and all strides plain.
    """
    _, channels, height, width = x.shape
    strides = (height * width * channels, 1, width * channels, channels)
    x = x.contiguous(memory_format=torch.channels_last).as_strided(x.shape, strides)
    if not torch.backends.mkldnn.is_available() or torch.compiler.is_compiling():
        return F.conv2d(x, weight, bias, stride, padding)
    return torch.mkldnn_convolution(x, weight, bias, (padding, padding), (stride, stride), (1, 1), 1)


@functools.cache
def largest_weight() -> int:
    """The largest |Q| whose products with 8-bit inputs this CPU adds exactly: 127, or 64 on x86 without VNNI.

    There oneDNN adds two neighbouring products in 16 bits, which end at 32,767 < 2 * 255 * 127. One such product says
    so on any system, and 2 * 255 * 64 = 32,640 fits.
    """
    inputs = torch.full((1, 64), 255, dtype=torch.uint8)
    weight = pack_weight(torch.full((1, 64), 127, dtype=torch.int8))
    ones, zeros = torch.ones(1), torch.zeros(1, dtype=torch.int64)
    found = int8_linear(inputs, 1.0, 0, weight, ones, zeros, None, "none")
    return 127 if found.item() == 64 * 255 * 127 else 64


def pack_weight(weight: Tensor) -> Tensor:
    """An int8 weight (E, D) in the library's own layout, which can neither be copied nor saved."""
    return torch.ops.onednn.qlinear_prepack(weight, None)


def int8_linear(
    q: Tensor,
    scale: float,
    zero: int,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor,
    bias: Tensor | None,
    act: Activation,
) -> Tensor:
    """act(s t (q - z) Q^T + b) in float32, for q (..., D) in uint8 and a packed Q (E, D) with a scale t a row."""
    function, approximation = ACTIVATIONS[act]
    return torch.ops.onednn.qlinear_pointwise(
        q, scale, zero, weight, scales, zeros, bias, 1.0, 0, torch.float32, function, [], approximation
    )
