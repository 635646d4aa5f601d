"""Whether Triton can run here: a plain answer, before a kernel is touched."""

import importlib.util
import os
from typing import Any

import torch

from tokenmix.errors import UserError

__all__ = ["autocast", "float32_precision", "num_programs", "require_device", "require_triton"]

KERNEL_TYPES = (torch.float16, torch.bfloat16, torch.float32)


def require_triton(what: str, *tensors: torch.Tensor | None) -> None:
    """Raise `UserError` unless Triton can run `what` on these tensors: a device as below, one type it takes."""
    given = [t for t in tensors if t is not None]
    require_device(what, *given)
    types = {t.dtype for t in given}
    if len(types) > 1 or not types <= set(KERNEL_TYPES):
        named = ", ".join(sorted(str(t).removeprefix("torch.") for t in types))
        raise UserError(
            f"{what}: backend='triton' takes one of float16, bfloat16, float32 for all tensors, got {named}; "
            f"convert them, or use backend='eager'"
        )


def require_device(what: str, *tensors: torch.Tensor) -> None:
    """Raise `UserError` unless Triton is installed and the tensors lie on a CUDA device.

    The interpreter counts as a device: set TRITON_INTERPRET=1 before anything imports triton.
    """
    if importlib.util.find_spec("triton") is None:
        raise UserError(
            f"{what}: backend='triton' needs the package triton; pip install triton, or use backend='eager'"
        )
    kinds = {t.device.type for t in tensors}
    if kinds != {"cuda"} and not (kinds == {"cpu"} and os.environ.get("TRITON_INTERPRET") == "1"):
        raise UserError(
            f"{what}: backend='triton' needs a CUDA device, got {', '.join(sorted(kinds))}; use backend='eager'"
        )


def autocast(*tensors: torch.Tensor | None) -> tuple[Any, ...]:
    """The tensors in autocast's type, where it is on: our operators are not on its list."""
    kind = next(t for t in tensors if t is not None).device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(t if t is None else t.to(dtype) for t in tensors)


def float32_precision() -> str:
    """How a kernel multiplies float32: as torch is told to by `torch.set_float32_matmul_precision`."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def num_programs(device: torch.device) -> int:
    """How many programs walk over the tiles: a few for each multiprocessor, so that sums of gradients stay small."""
    if device.type != "cuda":
        return 3
    return 4 * torch.cuda.get_device_properties(device).multi_processor_count
