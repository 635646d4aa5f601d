"""Cells as an array job of Slurm."""

import functools
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import submitit

from tokenmix.errors import as_user_error
from tokenmix.files import Values
from tokenmix.lab.grid import Cell, Engine, Outcome, Outcomes, finish_cell
from tokenmix.lab.train.config import EngineConfig
from tokenmix.trust import safe_children

TIMEOUT = 240
"""Minutes of a job without timeout_min; a job that needs more is requeued and continues."""
POLL = 2.0
"""Seconds between queries for the state of the jobs."""


class Job:
    """A cell for submitit, which requeues it after preemption or a timeout."""

    def __call__(self, cell: Cell) -> Outcome:
        return finish_cell(cell)

    def checkpoint(self, cell: Cell) -> submitit.helpers.DelayedSubmission:
        """Requeue the same call, which continues from the run's last checkpoint."""
        return submitit.helpers.DelayedSubmission(self, cell)


def submitter(config: EngineConfig, logs: Path) -> Engine:
    """An engine that submits with these parameters; submitit's `cluster=local` runs the jobs on this machine."""
    given: Values = {"name": "tokenmix", "timeout_min": TIMEOUT, **config.slurm}
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


def on_slurm(cells: Sequence[Cell], executor: submitit.Executor) -> Outcomes:
    """All cells as one array job."""
    with safe_children():
        jobs = executor.map_array(Job(), cells)
    running = dict(zip(jobs, cells, strict=True))
    try:
        for job in submitit.helpers.as_completed(jobs, poll_frequency=POLL):
            cell, error = running.pop(job), job.exception()
            if error is None:
                yield cell, job.result()
            else:
                last = str(error).strip().splitlines()[-1]
                yield cell, f"{type(error).__name__}: {last}; the job's output is in {job.paths.stderr}"
    finally:
        for job in running:
            job.cancel()
