"""Triton's availability, and tile sizes; equal shapes get equal sizes, so results are bitwise equal."""

import importlib.util
import os
from dataclasses import dataclass, replace

import torch

from tokenmix.errors import UserError

MAX_SLOTS = 256
KERNEL_TYPES = (torch.float16, torch.bfloat16, torch.float32)


def require_triton(what: str, *tensors: torch.Tensor | None, mask: torch.Tensor | None = None) -> None:
    """Raise `UserError` unless Triton can run `what` on these tensors: one CUDA device, one dtype.

    The interpreter counts as a device: set TRITON_INTERPRET=1 before anything imports triton.
    """
    given = [t for t in tensors if t is not None]
    if importlib.util.find_spec("triton") is None:
        raise UserError(
            f"{what}: backend='triton' needs the package triton; pip install triton, or use backend='eager'"
        )
    devices = sorted({str(t.device) for t in (*given, *([] if mask is None else [mask]))})
    if len(devices) > 1:
        raise UserError(f"{what}: all tensors must be on one device, got {', '.join(devices)}; move them to one")
    kind = given[0].device.type
    if kind != "cuda" and not (kind == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"):
        raise UserError(f"{what}: backend='triton' needs a CUDA device, got {devices[0]}; use backend='eager'")
    types = {t.dtype for t in given}
    if len(types) > 1 or not types <= set(KERNEL_TYPES):
        named = ", ".join(sorted(str(t).removeprefix("torch.") for t in types))
        raise UserError(
            f"{what}: backend='triton' takes one of float16, bfloat16, float32 for all tensors, got {named}; "
            f"convert them, or use backend='eager'"
        )


def empty_like_heads(query: torch.Tensor, width: int) -> torch.Tensor:
    """An uninitialised (..., N, width) in the memory layout of a query (B, H, N, d)."""
    shape = *query.shape[:-1], width
    if query.dim() == 4 and query.stride(1) < query.stride(2):
        return torch.empty_permuted(shape, (0, 2, 1, 3), dtype=query.dtype, device=query.device)
    return query.new_empty(shape)


def input_precision(dtype: torch.dtype) -> str:
    """Multiplication mode of a kernel: for float32 that of `torch.set_float32_matmul_precision` or a newer switch."""
    return "tf32" if dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def num_programs(device: torch.device, resident: int) -> int:
    """Number of concurrent programs: `resident` on each multiprocessor."""
    return 3 if device.type != "cuda" else resident * torch.cuda.get_device_properties(device).multi_processor_count


def shared_bytes(device: torch.device) -> int | None:
    """Shared memory available to a program; None in the interpreter, which has no limit."""
    if device.type != "cuda":
        return None
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # pyrefly: ignore[missing-attribute]


@dataclass(frozen=True)
class Tiles:
    """Tokens and largest column block of a tile (powers of two), and launch parameters."""

    tokens: int
    columns: int
    warps: int
    stages: int
    programs: int
    """Concurrent programs per multiprocessor."""


# By maximum slots and bytes per number, so that a tile fits in registers. Up to 64 columns in half precision, no kernel
# spills when compiled for sm_90 with any number of slots, or for sm_80 with 64. Shared memory is below sm_80's 163 KiB
# everywhere. `programs` fits the registers and shared memory of sm_90.
_FORWARD = {
    (64, 2): Tiles(tokens=64, columns=64, warps=4, stages=3, programs=4),
    (128, 2): Tiles(tokens=64, columns=64, warps=8, stages=2, programs=2),
    (256, 2): Tiles(tokens=64, columns=64, warps=8, stages=2, programs=1),
    (64, 4): Tiles(tokens=32, columns=32, warps=8, stages=1, programs=1),
    (128, 4): Tiles(tokens=16, columns=32, warps=8, stages=1, programs=1),
    (256, 4): Tiles(tokens=16, columns=16, warps=8, stages=1, programs=1),
}
_BACKWARD = _FORWARD | {
    (64, 2): Tiles(tokens=64, columns=64, warps=4, stages=2, programs=2),
    (128, 2): Tiles(tokens=32, columns=64, warps=4, stages=2, programs=2),
    (256, 2): Tiles(tokens=32, columns=64, warps=8, stages=1, programs=1),
}
# 256 slots need 116 KiB backward; sm_86, sm_89 and sm_120 have 99 KiB. This variant spills.
_BACKWARD_SMALL = _BACKWARD | {(256, 2): Tiles(tokens=32, columns=32, warps=8, stages=1, programs=1)}


def padded_size(size: int, largest: int) -> int:
    """The next power of two, at least 16 (a tensor core's size) and at most `largest`."""
    return min(max(16, 1 << (size - 1).bit_length()), largest)


def tiles_of(width: int, slots: int, itemsize: int, *, backward: bool = False, shared: int | None = None) -> Tiles:
    """Tiles of a pass; backward also keeps a memory's gradient, slots x columns in float32, in `shared` bytes."""
    table = _FORWARD
    if backward:
        table = _BACKWARD_SMALL if shared is not None and shared < 116 * 1024 else _BACKWARD
    tiles = table[max(64, padded_size(slots, MAX_SLOTS)), itemsize]
    # Without prefetching, because further column blocks would be prefetched as well.
    return tiles if width <= tiles.columns else replace(tiles, stages=1)
