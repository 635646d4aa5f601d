"""Engines by name, and engines of this machine: cells one after another, or in several processes."""

import functools
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from tokenmix.errors import needs
from tokenmix.lab.grid import Cell, Engine, Outcome, Outcomes, finish_cell
from tokenmix.lab.train.config import CompareConfig, EngineConfig
from tokenmix.layers.table import MIXERS
from tokenmix.registry import imported_plugins
from tokenmix.trust import safe_children

SPAWN = multiprocessing.get_context("spawn")


def parallel_runs(config: CompareConfig, runs: int) -> int:
    """Number of these runs that train concurrently here, each in its own process; 0 for one after another.

    Default: one per core. 0 if a GPU trains, or if a mixer is registered in this process only.
    """
    if config.engine.engine != "local" or config.engine.jobs is not None:
        return config.engine.jobs or 0
    plugins = {module.removesuffix(".py").rpartition("/")[2] for module in imported_plugins()}
    modules = [MIXERS[name].layer.__module__ for name in config.mixers if name in MIXERS]
    here = [name for name in modules if name.partition(".")[0] != "tokenmix" and name not in plugins]
    device = config.loop.device
    on_cpu = device == "cpu" or (device == "auto" and not torch.cuda.is_available())
    cores = min(os.cpu_count() or 1, runs)
    return cores if cores > 1 and on_cpu and not here and config.loop.threads is None else 0


def make_engine(config: EngineConfig, logs: Path, jobs: int) -> Engine:
    """The engine of a config, with output in `logs`; `UserError` if its package or cluster is not available."""
    if config.engine == "local":
        return functools.partial(in_processes, jobs=jobs) if jobs else in_turn
    with needs(f"--engine {config.engine}"):
        if config.engine == "ray":
            from tokenmix.lab.grid.on_ray import connect

            return connect(config)
        from tokenmix.lab.grid.on_slurm import submitter

        return submitter(config, logs)


def in_turn(cells: Sequence[Cell]) -> Outcomes:
    """Train one cell after another in this process."""
    for cell in cells:
        yield cell, finish_cell(cell)


def in_processes(cells: Sequence[Cell], jobs: int) -> Outcomes:
    """Train each cell in its own process, `jobs` at a time."""
    threads, started = max(1, (os.cpu_count() or 1) // jobs), list[BaseProcess]()
    with ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(_in_own_process, cell, threads, started): cell for cell in cells}
        try:
            for future in as_completed(running):
                yield running[future], future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            while not all(future.done() for future in running):
                # A process that is just starting is found in the next round.
                while started:
                    started.pop().terminate()
                time.sleep(0.1)


def _in_own_process(cell: Cell, threads: int, started: list[BaseProcess]) -> Outcome:
    ours, theirs = SPAWN.Pipe(duplex=False)
    process = SPAWN.Process(target=_work, args=(theirs, cell, threads))
    with safe_children():
        # The child must not run the caller's script again, which may lack a main guard.
        main = sys.modules["__main__"]
        kept = {name: vars(main).pop(name) for name in ("__file__", "__spec__") if name in vars(main)}
        main.__spec__ = None
        try:
            process.start()
        finally:
            vars(main).update(kept)
    started.append(process)
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        process.join()
        code = process.exitcode or 0
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"its process {how}; the same command continues it"
    finally:
        process.join()


def _work(pipe: Connection, cell: Cell, threads: int) -> None:
    # A process in its own group gets no Ctrl-C from the terminal: it is asked to stop once, and saves.
    os.setpgrp()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    try:
        pipe.send(finish_cell(cell))
    except KeyboardInterrupt:
        sys.exit(130)


def _end_with_parent() -> None:
    """Stop and save when the parent process is gone, for any reason."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
