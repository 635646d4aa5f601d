"""One command in a process of its own: forked, so that PyTorch is imported once, and limited in time and memory."""

import functools
import importlib
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Literal

SECONDS, WAIT, BYTES = 20, 120, 3 * 2**29


@dataclass(frozen=True)
class Outcome:
    """What a command did.

    Attributes:
        code: its exit code; negative for the signal that ended it.
        output: stdout and stderr, at most the last 4,000 characters.
        seconds: of the CPU, since other programs may slow the clock; what hangs is killed, and has the code -9.
        memory: bytes above those of the process before the command.
    """

    code: int
    output: str
    seconds: float
    memory: int

    @property
    def verdict(self) -> Literal["clean", "refused", "failed"]:
        """Whether it did its work, or refused it in one line; anything else is a failure."""
        slow, large = self.seconds > SECONDS, self.memory > BYTES
        if slow or large or "Traceback (most recent call last)" in self.output:
            return "failed"
        if self.code == 0:
            return "clean"
        last = self.output.rstrip("\n").rpartition("\n")[2]
        return "refused" if self.code == 2 and last.startswith("tokenmix: ") else "failed"


def run_command(arguments: Sequence[str], folder: Path) -> Outcome:
    """Run `tokenmix ARGUMENTS` in a folder; it and whatever it starts are killed after two minutes."""
    return _clean_process().submit(_fork, arguments, folder).result()


@functools.cache
def _clean_process() -> ProcessPoolExecutor:
    """A process that has imported PyTorch and computed nothing: after a backward pass, as of another test, autograd
    refuses to work in a fork."""
    imported = ("tokenmix.lab.train.run",)
    return ProcessPoolExecutor(1, get_context("spawn"), initializer=importlib.import_module, initargs=imported)


def _fork(arguments: Sequence[str], folder: Path) -> Outcome:
    sys.stdout.flush()
    with tempfile.TemporaryFile() as output:
        before = _resident()
        child = os.fork()
        if child == 0:
            _become(arguments, folder, output.fileno())
        status, usage = _wait(child, time.perf_counter())
        output.seek(0)
        text = output.read().decode(errors="replace")
    code = os.waitstatus_to_exitcode(status)
    return Outcome(code, text[-4000:], usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 - before)


def _become(arguments: Sequence[str], folder: Path, output: int) -> None:
    code = 1
    try:
        os.setsid()
        os.chdir(folder)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        from tokenmix.lab.cli import main

        code = main(list(arguments))
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(child: int, start: float) -> tuple[int, resource.struct_rusage]:
    while time.perf_counter() - start < WAIT:
        ended, status, usage = os.wait4(child, os.WNOHANG)
        if ended:
            _kill_group(child)
            return status, usage
        time.sleep(0.005)
    _kill_group(child)
    _, status, usage = os.wait4(child, 0)
    return status, usage


def _kill_group(child: int) -> None:
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        return


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
