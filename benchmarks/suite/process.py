"""A case in a process of its own, so that no number depends on what ran before it."""

import multiprocessing
import os
import sys
from multiprocessing.connection import Connection

from suite.groups import cases_of
from suite.harness import Case, failure, measure
from suite.place import Place
from suite.results import Row
from tokenmix.errors import UserError

__all__ = ["keep_memory", "measured_apart", "measured_here"]


def measured_here(case: Case, place: Place, repeats: int, seconds: float) -> Row:
    """`measure` in this process; a case that raises costs the others nothing, it fails like a wrong result."""
    try:
        return measure(case, place, repeats=repeats, seconds=seconds)
    except (Exception, SystemExit) as error:
        return failure(case, place, error)


def measured_apart(case: Case, place: Place, repeats: int, seconds: float) -> Row:
    """`measure` of a case of `suite.groups` in a fresh process, which takes some seconds to start.

    Free memory that earlier cases left behind, and what the allocator learnt from them, was worth up to half of a time.
    """
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe(duplex=False)
    asked = case.group, case.name, place.device, place.dtype_name, place.threads, repeats, seconds
    process = spawn.Process(target=_measured, args=(there, *asked), daemon=True)
    process.start()
    there.close()
    try:
        return here.recv()
    except EOFError:
        process.join()
        why = "killed, as where memory runs out" if process.exitcode == -9 else f"ended with {process.exitcode}"
        return failure(case, place, RuntimeError(f"its process was {why}"))
    finally:
        process.terminate()
        process.join()


def _measured(
    answer: Connection, group: str, name: str, device: str, dtype: str, threads: int, repeats: int, seconds: float
) -> None:
    case = next(case for case in cases_of(group, device) if case.name == name)
    try:
        answer.send(measured_here(case, Place.named(device, dtype, threads), repeats, seconds))
    except (KeyboardInterrupt, BrokenPipeError):
        # Ctrl-C goes to both processes, and whoever asked says so; or nobody asks any more.
        sys.exit(130)


def keep_memory() -> None:
    """Let glibc keep what is freed, in processes that start from now on, instead of handing it back to the system.

    Raises:
        UserError: a system with another allocator.
    """
    if sys.platform != "linux":
        raise UserError("--keep-memory is for Linux, whose allocator it sets: leave it out")
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"):
        os.environ[name] = str(10**9)
