"""Cells as tasks of a Ray cluster."""

import contextlib
import functools
import logging
import os
import socket
from collections.abc import Sequence
from pathlib import Path

import ray
from ray.exceptions import RayError, RayTaskError

from tokenmix.errors import UserError
from tokenmix.lab.grid import Cell, Engine, Outcome, Outcomes, finish_cell
from tokenmix.lab.train.config import EngineConfig
from tokenmix.trust import safe_children

RETRIES = 3
NO_ANSWER = "no Ray cluster answers at {}; start one with ray start --head, and give the address that it prints"
PATIENCE = 60.0
"""Seconds that tasks have to save when the grid is stopped."""


def connect(config: EngineConfig) -> Engine:
    """An engine of the cluster at the address, or of a new one on this machine; `UserError` if no cluster answers.

    A task whose worker or node dies is repeated, at most `RETRIES` times, and continues from the run's checkpoint.
    """
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
    """Each cell as a task, in this process's current folder; a connection that is `ours` is closed at the end."""
    # One call per worker process, so that peak memory is the run's own.
    task = ray.remote(num_cpus=needed["CPU"], num_gpus=needed["GPU"], max_retries=RETRIES, max_calls=1)(_finish)
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
            ray.wait(list(running), num_returns=len(running), timeout=PATIENCE)
        if ours:
            ray.shutdown()


def _finish(cell: Cell, folder: Path) -> Outcome:
    os.chdir(folder)
    return finish_cell(cell)
