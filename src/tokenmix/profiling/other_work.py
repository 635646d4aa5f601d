"""CPU time that other programs took during a measurement, whose times are unreliable then."""

import os
import time
from pathlib import Path

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
