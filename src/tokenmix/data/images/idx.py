"""The idx format of MNIST and its relatives: two zero bytes, a type, the number of axes, their lengths, the values."""

import gzip
import math
import struct
from pathlib import Path

import torch
from torch import Tensor

from tokenmix.errors import UserError

__all__ = ["parse_idx", "read_idx"]

UNSIGNED_BYTE = 0x08


def read_idx(path: str | Path) -> Tensor:
    """The uint8 tensor of an idx file, gzipped or not; `UserError` naming the file if it is none."""
    raw = Path(path).read_bytes()
    try:
        return parse_idx(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
    except (EOFError, OSError, ValueError) as error:
        raise UserError(f"{path} is no readable idx file ({error}); remove it and fetch it again") from None


def parse_idx(raw: bytes) -> Tensor:
    """The uint8 tensor of an idx file's bytes; `ValueError` if they are none."""
    if len(raw) < 4 or raw[:2] != b"\0\0":
        raise ValueError("it does not start with the idx magic number")
    kind, axes = raw[2], raw[3]
    if kind != UNSIGNED_BYTE:
        raise ValueError(f"type 0x{kind:02x} instead of unsigned bytes")
    start = 4 + 4 * axes
    if axes == 0 or len(raw) < start:
        raise ValueError("its head is cut off")
    shape = struct.unpack(f">{axes}I", raw[4:start])
    if len(raw) - start != math.prod(shape):
        raise ValueError(f"{len(raw) - start} values for shape {shape}")
    # The copy gives a tensor that owns its memory: the bytes are read-only.
    return torch.frombuffer(bytearray(raw[start:]), dtype=torch.uint8).reshape(shape)
