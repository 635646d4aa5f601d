"""Grids of runs: a cell is one run, trained to its end from any state.

Engines train cells on this machine, one after another or in several processes, as tasks of a Ray cluster, or as an
array job of Slurm.
"""

import contextlib
import functools
import logging
import multiprocessing
import os
import shlex
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tokenmix.errors import UserError, as_user_error, needs
from tokenmix.files import Values, replace_file
from tokenmix.lab.train.config import CompareConfig, EngineConfig, TrainConfig
from tokenmix.lab.train.folder import RunFolder
from tokenmix.lab.train.run import finish_run
from tokenmix.layers.table import MIXERS
from tokenmix.registry import imported_plugins, load_plugin
from tokenmix.trust import only_typed, safe_children, typed_words

if TYPE_CHECKING:
    import submitit

SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Cell:
    """One run of a grid: its name for messages and `--only`, and its config with the folder in `out`.

    The process that trains it imports `plugins`, named by `--import`, and trusts the text in `typed`. If `typed` is
    None, the process trusts all text of the config that does not come from a file.
    """

    name: str
    config: TrainConfig
    plugins: tuple[str, ...] = field(default_factory=imported_plugins)
    typed: frozenset[str] | None = field(default_factory=typed_words)

    @property
    def folder(self) -> Path:
        assert self.config.loop.out is not None
        return self.config.loop.out

    @property
    def run(self) -> RunFolder:
        return RunFolder(self.folder)

    @property
    def is_finished(self) -> bool:
        return self.run.is_finished


Outcome = str | OSError
"""Error of a cell, "" for none; an `OSError`, such as a full disk, also stops the other cells."""
Outcomes = Generator[tuple[Cell, Outcome], None, None]
Engine = Callable[[Sequence[Cell]], Outcomes]
"""Trains cells to their ends and yields each when it ends. If closed early or interrupted, it stops the other cells,
which save."""


def finish_cell(cell: Cell) -> Outcome:
    """Train a cell to its end like `finish_run`, and return its error. Ctrl-C is raised after the run is saved."""
    error_file = cell.folder / "error.txt"
    try:
        for plugin in set(cell.plugins) - set(imported_plugins()):
            load_plugin(plugin)
        if cell.folder.is_dir() and not (cell.folder / "config.json").exists():
            # The run was killed before it began.
            shutil.rmtree(cell.folder)
        error_file.unlink(missing_ok=True)
        with only_typed(cell.typed):
            finish_run(cell.config, quiet=True)
    except OSError as error:
        return error
    except UserError as error:
        return str(error)
    except Exception as error:
        # A bug in one layer must not stop the other runs; its traceback is kept.
        cell.folder.mkdir(parents=True, exist_ok=True)
        replace_file(error_file, traceback.format_exc().encode())
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'see error.txt'}"
    return ""


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
        return connect(config) if config.engine == "ray" else submitter(config, logs)


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


RAY_RETRIES = 3
NO_ANSWER = "no Ray cluster answers at {}; start one with ray start --head, and give the address that it prints"
RAY_PATIENCE = 60.0
"""Seconds that Ray tasks have to save when the grid is stopped."""


def connect(config: EngineConfig) -> Engine:
    """An engine of the cluster at the address, or of a new one on this machine; `UserError` if no cluster answers.

    A task whose worker or node dies is repeated, at most `RAY_RETRIES` times, and continues from the run's checkpoint.
    """
    import ray

    ours = not ray.is_initialized()
    if ours:
        _check_address(config.address)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            # Ray's workers search the current folder before the libraries' folders.
            with safe_children(), contextlib.chdir("/"):
                ray.init(address=config.address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise UserError(f"{NO_ANSWER.format(config.address)} ({str(error).strip().splitlines()[0]})") from None
    needed = {"CPU": config.run_cpus or 1, "GPU": config.run_gpus or 0}
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not any(all(node.get(name, 0) >= number for name, number in needed.items()) for node in nodes):
        wanted = " and ".join(f"{number:g} {name}{'s' * (number != 1)}" for name, number in needed.items() if number)
        raise UserError(f"no node of the Ray cluster has {wanted}; lower --run-cpus or --run-gpus")
    return functools.partial(on_ray, needed=needed, ours=ours)


def _check_address(address: str | None) -> None:
    """Check the address first: Ray waits for minutes without a listener."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if not host:
        if address not in (None, "auto"):
            raise UserError(f"--address {address} is not of the form HOST:PORT, for example 10.0.0.1:6379, or auto")
        return
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except (OSError, ValueError) as error:
        raise UserError(f"{NO_ANSWER.format(address)} ({error})") from None


def on_ray(cells: Sequence[Cell], needed: dict[str, float], ours: bool) -> Outcomes:
    """Each cell as a task of Ray, in the current folder; closes a connection that is `ours` at the end."""
    import ray
    from ray.exceptions import RayError, RayTaskError

    # One call per worker process, so that peak memory is the run's own.
    task = ray.remote(num_cpus=needed["CPU"], num_gpus=needed["GPU"], max_retries=RAY_RETRIES, max_calls=1)(_finish)
    running = {task.remote(cell, Path.cwd()): cell for cell in cells}
    try:
        while running:
            for done in ray.wait(list(running))[0]:
                cell = running.pop(done)
                try:
                    outcome: Outcome = ray.get(done)
                except RayError as error:
                    reason = error.cause if isinstance(error, RayTaskError) else error
                    told = f"{type(reason).__name__}: {str(reason).strip().splitlines()[0]}"
                    outcome = f"{told}; the same command continues it"
                yield cell, outcome
    finally:
        for reference in running:
            ray.cancel(reference)
        if running:
            ray.wait(list(running), num_returns=len(running), timeout=RAY_PATIENCE)
        if ours:
            ray.shutdown()


def _finish(cell: Cell, folder: Path) -> Outcome:
    os.chdir(folder)
    return finish_cell(cell)


SLURM_TIMEOUT = 240
"""Minutes of a Slurm job without timeout_min; a job that needs more is requeued and continues."""
SLURM_POLL = 2.0
"""Seconds between queries for the state of the jobs."""


def submitter(config: EngineConfig, logs: Path) -> Engine:
    """An engine that submits with these parameters; submitit's `cluster=local` runs the jobs on this machine."""
    import submitit

    given: Values = {"name": "tokenmix", "timeout_min": SLURM_TIMEOUT, **config.slurm}
    given |= {"cpus_per_task": config.run_cpus or 1, "gpus_per_node": int(config.run_gpus or 0)}
    given |= {"slurm_array_parallelism": config.jobs} if config.jobs else {}
    # submitit raises RuntimeError, ValueError, NameError, TypeError and AssertionError.
    with as_user_error(f"submitit does not take --slurm {config.slurm} (", "); give KEY=VALUE of its parameters"):
        # A cluster may not pass on the environment of `safe_children`.
        python = f"{shlex.quote(sys.executable)} -P"
        cluster = given.pop("cluster", "slurm")
        executor = submitit.AutoExecutor(logs, cluster=cluster, slurm_python=python, local_python=python)
        executor.update_parameters(**given)
    return functools.partial(on_slurm, executor=executor)


def on_slurm(cells: Sequence[Cell], executor: "submitit.Executor") -> Outcomes:
    """All cells as one array job of Slurm."""
    import submitit

    class Job(submitit.helpers.Checkpointable):
        """A cell, requeued after preemption or a timeout; it continues from the run's last checkpoint."""

        def __call__(self, cell: Cell) -> Outcome:
            return finish_cell(cell)

    with safe_children():
        jobs = executor.map_array(Job(), cells)
    running = dict(zip(jobs, cells, strict=True))
    try:
        for job in submitit.helpers.as_completed(jobs, poll_frequency=SLURM_POLL):
            cell, error = running.pop(job), job.exception()
            if error is None:
                yield cell, job.result()
            else:
                last = str(error).strip().splitlines()[-1]
                yield cell, f"{type(error).__name__}: {last}; the job's output is in {job.paths.stderr}"
    finally:
        for job in running:
            job.cancel()
