"""Measured peaks of this machine: bytes and multiply-adds per second with the threads in use."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from tokenmix.profiling.speed import time_interleaved

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
SIDE = {"cpu": 1536, "cuda": 8192}
REPEATS = 9
LONG = 0.05
"""Seconds of a product that is not tried at a larger size."""


@dataclass(frozen=True)
class Ceilings:
    """Bytes a second of a triad, and multiply-adds a second of a matrix product of the type that was asked for."""

    bytes_per_second: float
    macs_per_second: float
    threads: int
    dtype: str
    array_bytes: int
    side: int


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """The best of a few runs of each, a second or two in all.

    The triad c = a + 2 b reads two arrays and writes one, each larger than the last-level cache; the reading of lines
    that are written into is not counted, as in STREAM. The product is of two square matrices.
    """
    size = _array_bytes(device)
    a, b, c = (torch.ones(size // 4, device=device) for _ in range(3))
    triad = _least_seconds(partial(torch.add, a, b, alpha=2.0, out=c), device)
    side, product = SIDE[device.type] // 8, 0.0
    while product < LONG and side < SIDE[device.type]:
        side *= 2
        left, right, out = torch.ones(3, side, side, device=device, dtype=dtype)
        product = _least_seconds(partial(torch.mm, left, right, out=out), device)
    threads, name = torch.get_num_threads(), str(dtype).removeprefix("torch.")
    return Ceilings(3 * size / triad, side**3 / product, threads, name, size, side)


def _array_bytes(device: torch.device) -> int:
    """Twice the last-level cache; 64 MiB to 256 MiB."""
    if device.type == "cuda":
        return 1 << 30
    sizes = [_bytes(file.read_text()) for file in CACHES.glob("index*/size")]
    return min(256 << 20, max(64 << 20, 2 * max(sizes, default=0)))


def _bytes(text: str) -> int:
    number, unit = text.strip()[:-1], text.strip()[-1:]
    return int(number) << {"K": 10, "M": 20, "G": 30}[unit] if unit in "KMG" else int(text)


def _least_seconds(fn: partial[object], device: torch.device) -> float:
    # The first run, which is not timed, also maps the pages.
    return min(time_interleaved({"": fn}, repeats=REPEATS, warmup=1, device=device)[""].runs)
