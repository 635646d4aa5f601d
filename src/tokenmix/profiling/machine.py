"""What this machine does at most, and what other programs took of it during a measurement."""

import os
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from tokenmix.profiling.measure import time_interleaved

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


BUSY = 0.2
"""CPUs that others may take beyond those that are left to them: about what an idle machine's services do."""

STAT = Path("/proc/stat")


class OtherWork:
    """CPU time that others took since this was made, on the CPUs that this process may run on. Linux only:
    elsewhere `cpus()` is None and `warning()` is empty.

        cpus = (busy time of these CPUs - this process's own) / time that has passed

    Time that a hypervisor took away counts as busy. Processes of this one count as its own once they have ended.
    """

    def __init__(self, stat: Path = STAT) -> None:
        self._stat = stat
        self._start = time.perf_counter(), self._busy(), _own()

    def cpus(self) -> float | None:
        """CPUs that others kept busy on average, since the start."""
        start, busy_before, own_before = self._start
        busy = self._busy()
        if busy is None or busy_before is None:
            return None
        passed = max(time.perf_counter() - start, 1e-9)
        return max(0.0, (busy - busy_before - (_own() - own_before)) / passed)

    def warning(self, threads: int) -> str:
        """A warning if others took CPUs that `threads` threads wanted, else ""."""
        cpus, ours = self.cpus(), len(_allowed())
        if cpus is None or cpus <= max(0, ours - threads) + BUSY:
            return ""
        return (
            f"other programs took {cpus:.1f} of {ours} CPUs meanwhile, so these times are unreliable; close them and "
            "measure again"
        )

    def _busy(self) -> float | None:
        """Seconds that the CPUs of this process have been busy since the system started."""
        try:
            lines = [line.split() for line in self._stat.read_text().splitlines() if line.startswith("cpu")]
        except OSError:
            return None
        names = {f"cpu{number}" for number in _allowed()}
        # user, nice, system, idle, iowait, irq, softirq, steal; guests are in user.
        ticks = [sum(map(int, (*fields[1:4], *fields[6:9]))) for fields in lines if fields[0] in names]
        return sum(ticks) / os.sysconf("SC_CLK_TCK") if len(ticks) == len(names) else None


def _allowed() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def _own() -> float:
    """Seconds of CPU that this process and those of its processes that have ended have taken."""
    taken = os.times()
    return taken.user + taken.system + taken.children_user + taken.children_system
