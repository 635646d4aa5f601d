"""A case in a process of its own, so that no number depends on what ran before it."""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from suite.groups import cases_of
from suite.harness import Case, failure, measure
from suite.place import Place
from suite.results import Row

__all__ = ["keep_memory", "measured_apart", "measured_here"]


def measured_here(case: Case, place: Place, repeats: int, seconds: float) -> Row:
    """`measure` in this process; a case that raises costs the others nothing, it fails like a wrong result."""
    try:
        return measure(case, place, repeats=repeats, seconds=seconds)
    except Exception as error:
        return failure(case, place, error)


def measured_apart(case: Case, place: Place, repeats: int, seconds: float) -> Row:
    """`measure` of a case of `suite.groups` in a fresh process, which takes some seconds to start.

    Free memory that earlier cases left behind, and what the allocator learnt from them, was worth up to half of a time.
    """
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        asked = pool.submit(
            _measured, case.group, case.name, place.device, place.dtype_name, place.threads, repeats, seconds
        )
        try:
            return asked.result()
        except BrokenProcessPool:
            return failure(case, place, RuntimeError("its process was killed, most likely for want of memory"))


def _measured(group: str, name: str, device: str, dtype: str, threads: int, repeats: int, seconds: float) -> Row:
    case = next(case for case in cases_of(group, device) if case.name == name)
    return measured_here(case, Place.named(device, dtype, threads), repeats, seconds)


def keep_memory() -> None:
    """Let glibc keep what is freed, in processes that start from now on, instead of handing it back to the system."""
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"):
        os.environ[name] = str(10**9)
