"""Whether Triton can run here, checked before a kernel is used."""

import importlib.util
import os
from typing import Any

import torch

from tokenmix.errors import UserError

KERNEL_TYPES = (torch.float16, torch.bfloat16, torch.float32)


def require_triton(what: str, *tensors: torch.Tensor | None, mask: torch.Tensor | None = None) -> None:
    """Raise `UserError` unless Triton can run `what` on these tensors: a device as below, one type it takes."""
    given = [t for t in tensors if t is not None]
    require_device(what, *given, *([] if mask is None else [mask]))
    types = {t.dtype for t in given}
    if len(types) > 1 or not types <= set(KERNEL_TYPES):
        named = ", ".join(sorted(str(t).removeprefix("torch.") for t in types))
        raise UserError(
            f"{what}: backend='triton' takes one of float16, bfloat16, float32 for all tensors, got {named}; "
            f"convert them, or use backend='eager'"
        )


def require_device(what: str, *tensors: torch.Tensor) -> None:
    """Raise `UserError` unless Triton is installed and the tensors are on one CUDA device.

    The interpreter counts as a device: set TRITON_INTERPRET=1 before anything imports triton.
    """
    if importlib.util.find_spec("triton") is None:
        raise UserError(
            f"{what}: backend='triton' needs the package triton; pip install triton, or use backend='eager'"
        )
    devices = sorted({str(t.device) for t in tensors})
    if len(devices) > 1:
        raise UserError(f"{what}: all tensors must be on one device, got {', '.join(devices)}; move them to one")
    kind = tensors[0].device.type
    if kind != "cuda" and not (kind == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"):
        raise UserError(f"{what}: backend='triton' needs a CUDA device, got {devices[0]}; use backend='eager'")


def autocast_inputs(*tensors: torch.Tensor | None) -> tuple[Any, ...]:
    """The tensors in autocast's type, where it is on: our operators are not on its list."""
    kind = next(t for t in tensors if t is not None).device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(t if t is None else t.to(dtype) for t in tensors)


def input_precision(dtype: torch.dtype) -> str:
    """How a kernel multiplies: float32 as torch is set to, by `torch.set_float32_matmul_precision` or another switch.

    Read where all switches end: `torch.get_float32_matmul_precision` raises once the newer ones were used.
    """
    return "tf32" if dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def num_programs(device: torch.device, resident: int) -> int:
    """How many programs walk over the tiles: as many as run at once, `resident` on each multiprocessor."""
    if device.type != "cuda":
        return 3
    return resident * torch.cuda.get_device_properties(device).multi_processor_count


def shared_bytes(device: torch.device) -> int | None:
    """The shared memory that a program can have; None in the interpreter, which has no limit."""
    if device.type != "cuda":
        return None
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # pyrefly: ignore[missing-attribute]
