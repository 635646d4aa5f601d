"""Steps of a loop timed in a process of its own, and the memory that it and its workers hold."""

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from tokenmix.errors import UserError

SAMPLE_SECONDS = 0.25


class Enough(Exception):
    """All steps to be timed are done: the loop ends here."""


@dataclass
class Clock:
    """What a loop tells after each step; the first `warm` steps do not count."""

    warm: int
    steps: int
    seen: int = -1
    units: int = 0
    start: float = 0.0
    done: Callable[[float], None] | None = None
    """Is told units a second, once the last step is done and while all of the loop's memory is still held."""

    def tick(self, units: int) -> None:
        """A step over this many images, tokens or clouds has ended; raises `Enough` after the last one."""
        self.seen += 1
        if self.seen == self.warm:
            self.start = time.perf_counter()
        elif self.seen > self.warm:
            self.units += units
        if self.seen == self.warm + self.steps:
            rate = self.units / (time.perf_counter() - self.start)
            if self.done is not None:
                self.done(rate)
            raise Enough


Loop = Callable[[Clock], None]


@dataclass(frozen=True)
class Turn:
    """Units a second, and the bytes that the process and its workers held at most."""

    rate: float
    memory: int


def turn(loop: Loop, *, warm: int, steps: int, threads: int) -> Turn:
    """Run the loop in a copy of this process, which has imported everything; pages of the imports count in shares."""
    here, there = multiprocessing.Pipe()
    # Where PyTorch has started no thread yet, a fork is safe, and costs no imports.
    child = multiprocessing.get_context("fork").Process(target=_child, args=(there, loop, warm, steps, threads))
    child.start()
    there.close()
    memory = 0
    while not here.poll(SAMPLE_SECONDS):
        memory = max(memory, _held(child.pid))
    try:
        answer = here.recv()
        memory = max(memory, _held(child.pid))
        if isinstance(answer, float):
            here.send(None)
    except EOFError:
        answer = f"the process ended without an answer, code {child.exitcode}"
    child.join()
    if not isinstance(answer, float):
        raise UserError(answer)
    return Turn(answer, memory)


def _child(answer: Connection, loop: Loop, warm: int, steps: int, threads: int) -> None:
    def done(rate: float) -> None:
        answer.send(rate)
        answer.recv()

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    clock = Clock(warm, steps, done=done)
    try:
        loop(clock)
        answer.send(f"the loop ended after {clock.seen + 1} of {warm + steps + 1} steps")
    except Enough:
        return
    except BaseException:
        answer.send(traceback.format_exc())


def _held(pid: int | None) -> int:
    """Proportional set size of a process and its descendants; 0 where the kernel does not tell."""
    held, waiting = 0, [pid]
    while waiting:
        folder = Path(f"/proc/{waiting.pop()}")
        with suppress(OSError, ValueError, IndexError):
            fields = (folder / "smaps_rollup").read_text().split()
            held += 1024 * int(fields[fields.index("Pss:") + 1])
            for thread in (folder / "task").iterdir():
                waiting += [int(one) for one in (thread / "children").read_text().split()]
    return held


@dataclass(frozen=True)
class Program:
    """What a program took: wall time, CPU time of all its threads and children, and its largest resident set."""

    seconds: float
    cpu: float
    memory: int


def program(command: list[str], environment: dict[str, str]) -> Program:
    """Run a program in silence; `UserError` if it fails."""
    start, memory = time.perf_counter(), 0
    quiet = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_WRONLY, 0) for number in (1, 2)]
    pid = os.posix_spawnp(command[0], command, {**os.environ, **environment}, file_actions=quiet)
    while True:
        # The system's own number for a process begins with that of the one which started it.
        with suppress(OSError, StopIteration):
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            memory = max(memory, 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))))
        time.sleep(0.05)
        ended, status, usage = os.wait4(pid, os.WNOHANG)
        if ended:
            break
    if os.waitstatus_to_exitcode(status):
        raise UserError(f"{' '.join(command)} ended with code {os.waitstatus_to_exitcode(status)}")
    return Program(time.perf_counter() - start, usage.ru_utime + usage.ru_stime, memory)
