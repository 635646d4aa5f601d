"""Argument checks for ops and layers. Each raises `UserError` with the value and a remedy."""

from collections.abc import Collection
from math import isfinite
from numbers import Integral, Real
from typing import TypeGuard

import torch
from torch import Tensor

from tokenmix.errors import UserError, unknown_name

EXAMPLES: dict[str, object] = {
    "dim": 64,
    "num_tokens": 196,
    "num_heads": 8,
    "num_slots": 64,
    "expansion": 4,
    "reduction": 4,
    "attention_dim": 64,
    "out_dim": 64,
}
"""Example values for messages, by argument name (default 1)."""


def check_whole(least: int = 1, **values: object) -> None:
    """Raise `UserError` unless every value is a whole number of at least `least`."""
    for name, value in values.items():
        whole = _is_whole(value)
        if not whole or value < least:
            bound = f"at least {least}" if whole else f"a whole number of at least {least}"
            raise UserError(f"{name} must be {bound}, got {value!r}; for example {name}={EXAMPLES.get(name, 1)}")


def _is_whole(value: object) -> TypeGuard[int]:
    # The first test covers the usual case in a tenth of the time; some checks run at every call of an op. torch 2.8
    # cannot compile isinstance with a union.
    return type(value) is int or (isinstance(value, (Integral, torch.SymInt)) and not isinstance(value, bool))


def check_chunk_size(chunk_size: int | None) -> None:
    if chunk_size is not None and (not _is_whole(chunk_size) or chunk_size < 1):
        raise UserError(f"chunk_size must be at least 1 token, got {chunk_size!r}; None does all tokens at once")


def check_flags(**values: object) -> None:
    for name, value in values.items():
        if not isinstance(value, bool):
            raise UserError(f"{name} must be True or False, got {value!r}; the default is to leave {name} out")


def check_rates(**values: object) -> None:
    """Raise `UserError` unless every value is a probability."""
    for name, value in values.items():
        if not isinstance(value, Real) or not 0.0 <= float(value) <= 1.0:
            raise UserError(f"{name} must be a number between 0 and 1, got {value!r}; {name}=0 drops nothing")


def check_numbers(least: float | None = None, **values: object) -> None:
    """Raise `UserError` unless every value is a finite number, and at least `least` if given."""
    for name, value in values.items():
        if not isinstance(value, Real) or not isfinite(value) or (least is not None and value < least):
            bound = "" if least is None else f" of at least {least:g}"
            raise UserError(f"{name} must be a finite number{bound}, got {value!r}; leave {name} out for the default")


def check_choice(name: str, value: object, known: Collection[str]) -> None:
    """Raise `UserError` with the nearest names unless the value is in `known`."""
    if not isinstance(value, str):
        raise UserError(f"{name} must be one of {', '.join(known)}, got {value!r}")
    if value not in known:
        raise unknown_name(name, value, known)


def check_heads(dim: int, num_heads: int) -> int:
    """Head width; `UserError` unless num_heads divides dim."""
    check_whole(dim=dim, num_heads=num_heads)
    if dim % num_heads:
        fitting = [heads for heads in range(1, dim + 1) if dim % heads == 0]
        nearest = min(fitting, key=lambda heads: abs(heads - num_heads))
        raise UserError(f"num_heads must divide dim {dim}, got {num_heads}; the nearest that does is {nearest}")
    return dim // num_heads


def check_tensor(taker: str, value: object) -> None:
    """Raise `UserError` with a conversion hint unless the value is a tensor; `taker` starts the message."""
    if isinstance(value, Tensor):
        return
    kind = type(value)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    if value is None:
        raise UserError(f"{taker} must be a torch.Tensor, got None; pass the tensor as an argument")
    if kind.__module__ == "numpy":
        remedy = "convert it with torch.from_numpy(x), and .float() for numbers of another type"
    elif isinstance(value, list | tuple):
        remedy = "convert it with torch.tensor(x), or torch.stack(x) for a list of tensors"
    else:
        remedy = "convert it with torch.as_tensor(x)"
    raise UserError(f"{taker} must be a torch.Tensor, got {name}; {remedy}")


def check_tensors(**values: object) -> None:
    """Raise `UserError` for a value that is not a tensor."""
    for name, value in values.items():
        check_tensor(name, value)


def check_optional(**values: Tensor | None) -> None:
    """Raise `UserError` for a value that is neither None nor a tensor, or for a mask that is not boolean."""
    for name, value in values.items():
        if value is not None:
            check_mask_type(value) if name.endswith("mask") else check_tensor(name, value)


def check_mask_type(mask: Tensor) -> None:
    """Raise `UserError` with a conversion hint unless the mask is a boolean tensor."""
    check_tensor("mask", mask)
    if mask.dtype != torch.bool:
        raise UserError(
            f"mask must be boolean with True = the token takes part, got {mask.dtype}; give mask == 0 for an additive "
            "mask (0 takes part, -inf does not), mask.bool() for one of 1 and 0 (1 takes part), ~mask.bool() for a "
            "key_padding_mask of torch (True = ignore)"
        )
