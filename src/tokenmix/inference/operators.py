"""Wrappers of PyTorch's private CPU operators; `tokenmix.inference` calls no others."""

import functools
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenmix.errors import UserError

Activation = Literal["none", "gelu", "gelu-tanh"]

Dtype = Literal["float32", "bfloat16", "int8"]

OPERATORS: dict[Dtype, tuple[str, ...]] = {
    "float32": ("mkldnn._linear_pointwise", "mkldnn._reorder_linear_weight"),
    "bfloat16": (),
    "int8": ("onednn.qlinear_prepack", "onednn.qlinear_pointwise"),
}
"""Their names under `torch.ops`, by product dtype."""

ACTIVATIONS = {"none": ("none", "none"), "gelu": ("gelu", "none"), "gelu-tanh": ("gelu", "tanh")}
"""Function and approximation of each activation, as the operators name them."""


def require_operators(dtype: Dtype) -> None:
    """Raise `UserError` unless this PyTorch has the operators and, for int8, the library behind them."""
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
    """Whether float32 products use oneDNN: on AMD's CPUs with AVX-512; elsewhere MKL is as fast (dev/LOG.md)."""
    found = torch.cpu.get_capabilities()
    amd = "AMD" in str(found.get("cpu_name")) and bool(found.get("avx512_f"))
    return torch.backends.mkldnn.is_available() and amd


def pack_linear(weight: Tensor, rows: int) -> Tensor:
    """A float32 weight (E, D) in oneDNN's layout, for inputs of about `rows` rows; cannot be copied or saved."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, rows)


def fused_linear(x: Tensor, packed: Tensor, bias: Tensor | None, act: Activation) -> Tensor:
    """act(x W^T + b) in one kernel, for a weight from `pack_linear`."""
    function, approximation = ACTIVATIONS[act]
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, function, [], approximation if act != "none" else "")


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int) -> Tensor:
    """A float32 convolution (B, C, H, W) to (B, E, H', W') with the same summation order for any batch size.

    F.conv2d uses PyTorch's own kernel for one small image and oneDNN for several. The kernels round differently, which
    can change an 8-bit step. oneDNN also rounds differently by layout, and for one image PyTorch derives the layout
    from an arbitrary batch stride. Channels-last inputs with plain strides avoid both differences.
    """
    _, channels, height, width = x.shape
    strides = (height * width * channels, 1, width * channels, channels)
    x = x.contiguous(memory_format=torch.channels_last).as_strided(x.shape, strides)
    if not torch.backends.mkldnn.is_available() or torch.compiler.is_compiling():
        return F.conv2d(x, weight, bias, stride, padding)
    return torch.mkldnn_convolution(x, weight, bias, (padding, padding), (stride, stride), (1, 1), 1)


@functools.cache
def largest_weight() -> int:
    """The largest |Q| for which this CPU adds products with 8-bit inputs exactly: 127, or 64 on x86 without VNNI.

    Without VNNI, oneDNN adds two adjacent products in 16 bits, up to 32,767 < 2 * 255 * 127; 2 * 255 * 64 = 32,640
    fits. One test product detects this on any system.
    """
    inputs = torch.full((1, 64), 255, dtype=torch.uint8)
    weight = pack_weight(torch.full((1, 64), 127, dtype=torch.int8))
    packed = PackedInt8(1.0, 0, weight, torch.ones(1), torch.zeros(1, dtype=torch.int64), torch.tensor(0.5))
    found = int8_linear(inputs, packed, None, "none")
    return 127 if found.item() == 64 * 255 * 127 else 64


def pack_weight(weight: Tensor) -> Tensor:
    """An int8 weight (E, D) in the library's layout; cannot be copied or saved."""
    return torch.ops.onednn.qlinear_prepack(weight, None)


class PackedInt8(NamedTuple):
    """s, z, Q (E, D) from `pack_weight`, its scales t, one per row, their zero points, and z + 1/2 for rounding."""

    step: float
    zero: int
    weight: Tensor
    scales: Tensor
    zeros: Tensor
    offset: Tensor


def int8_linear(q: Tensor, packed: PackedInt8, bias: Tensor | None, act: Activation) -> Tensor:
    """act(s t (q - z) Q^T + b) in float32, for q (..., D) in uint8."""
    function, approximation = ACTIVATIONS[act]
    return torch.ops.onednn.qlinear_pointwise(q, *packed[:5], bias, 1.0, 0, torch.float32, function, [], approximation)
