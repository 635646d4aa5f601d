"""PyTorch's private operators for int8 on CPUs: all that `tokenmix.cpu` calls without a promise of torch's."""

from typing import Any, Literal

import torch
from torch import Tensor

from tokenmix.errors import UserError

__all__ = [
    "OPERATORS",
    "Activation",
    "int8_linear",
    "int8_matmul",
    "missing_operators",
    "pack_weight",
    "require_operators",
]

Activation = Literal["none", "gelu", "gelu-tanh"]

OPERATORS = ("onednn.qlinear_prepack", "onednn.qlinear_pointwise", "aten._int_mm")
"""Their names under `torch.ops`."""

_POST_OPS = {"none": ("none", "none"), "gelu": ("gelu", "none"), "gelu-tanh": ("gelu", "tanh")}


def missing_operators() -> list[str]:
    """Those of `OPERATORS` that this PyTorch does not have."""
    split = ((name, *name.split(".")) for name in OPERATORS)
    return [name for name, library, operator in split if not hasattr(getattr(torch.ops, library), operator)]


def require_operators() -> None:
    """Raise `UserError` unless this PyTorch has the operators and the library behind them."""
    if "onednn" not in torch.backends.quantized.supported_engines:
        raise UserError("this PyTorch has no oneDNN, whose int8 kernels are needed; install the wheel of pytorch.org")
    if missing := missing_operators():
        raise UserError(
            f"torch {torch.__version__} has no operator {', '.join(missing)}, which int8 needs; install torch 2.14"
        )


def pack_weight(weight: Tensor) -> Tensor:
    """An int8 weight (E, D) in the library's own layout, which can neither be copied nor saved."""
    return torch.ops.onednn.qlinear_prepack(weight, None)


def int8_linear(
    q: Tensor, scale: float, zero: int, weight: Any, scales: Tensor, zeros: Tensor, bias: Tensor | None, act: Activation
) -> Tensor:
    """act(s t (q - z) Q^T + b) in float32, for q (..., D) in uint8 and a packed Q (E, D) with a scale t a row."""
    post_op, algorithm = _POST_OPS[act]
    return torch.ops.onednn.qlinear_pointwise(
        q, scale, zero, weight, scales, zeros, bias, 1.0, 0, torch.float32, post_op, [], algorithm
    )


def int8_matmul(left: Tensor, right: Tensor) -> Tensor:
    """The int32 product of two int8 matrices."""
    return torch._int_mm(left, right)
