"""Starts the processes of a run on one machine, as torchrun does, and returns the run's exit code."""

import functools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tokenmix.errors import UserError
from tokenmix.lab.data.fetch import log
from tokenmix.lab.train.config import TrainConfig

PATIENCE = 30.0
START = "let torchrun or --devices set the variables, or unset RANK and WORLD_SIZE for one process"


@dataclass(frozen=True)
class DistributedInfo:
    """Ranks and world sizes of this process: in the run, and on its machine."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which writes the files."""
        return self.rank == 0

    @property
    def num_nodes(self) -> int:
        return self.world_size // self.local_world_size

    def data_parallel(self, shared: int) -> tuple[int, int]:
        """Rank, and number of parts of the data, where `shared` ranks have the same images, and thus the same seed."""
        return self.rank // shared, self.world_size // shared


def distributed_info() -> DistributedInfo:
    """Rank of this process from torchrun's variables; rank 0 of 1 without them, `UserError` for invalid ones."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    missing = [name for name in names if not os.environ.get(name)]
    if missing:
        if number_in("WORLD_SIZE") > 1 or number_in("RANK") > 0:
            raise UserError(f"RANK or WORLD_SIZE asks for several processes, and {missing[0]} is not set; {START}")
        return DistributedInfo()
    here = DistributedInfo(*map(number_in, names))
    if not (0 <= here.rank < here.world_size and 0 <= here.local_rank < here.local_world_size <= here.world_size):
        given = ", ".join(f"{name}={os.environ[name]}" for name in names)
        raise UserError(f"{given} contradict each other: a rank counts from 0 and is below the size; {START}")
    return here


def number_in(variable: str) -> int:
    """The integer in an environment variable; 0 if the variable is not set."""
    text = os.environ.get(variable) or "0"
    try:
        return int(text)
    except ValueError:
        raise UserError(f"{variable}={text!r} is not a whole number; {START}") from None


def processes_to_start(config: TrainConfig) -> int:
    """Number of processes to start; 1 if this process trains."""
    distributed_info()
    if "RANK" in os.environ:
        return 1
    devices, nodes = config.loop.devices, config.loop.num_nodes
    return (devices or config.loop.token_parallel) if (nodes or 1) == 1 else 1


def launch(processes: int, arguments: Sequence[str]) -> int:
    """Run `tokenmix ARGUMENTS` in this many processes; return the exit code of the first failure, else 0.

    After a failure the other processes have some seconds to exit before they are killed.
    """
    most = max(8, os.cpu_count() or 1)
    if processes > most:
        raise UserError(f"devices={processes} would start {processes} processes on this machine; give at most {most}")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1"}
    environment = {**os.environ, **shared, "MASTER_PORT": str(port)}
    # As in torchrun; otherwise each process would use all cores.
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    # -P: a module in the current folder must not be imported instead of a library of the same name.
    command = [sys.executable, "-P", "-m", "tokenmix", *arguments]
    # Ctrl-C also reaches the processes, which save and exit. This process keeps waiting for them.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    # SIGTERM is forwarded to the processes, which save and exit.
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    running = []
    try:
        for rank in range(processes):
            place = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            heed = functools.partial(signal.signal, signal.SIGINT, signal.default_int_handler)
            running.append(subprocess.Popen(command, env=place, preexec_fn=heed))
        failed, since = 0, time.monotonic()
        while any(process.poll() is None for process in running):
            while told:
                number = told.pop()
                for process in running:
                    process.send_signal(number)
            codes = [process.poll() for process in running]
            if not failed:
                rank, failed = next(((rank, code) for rank, code in enumerate(codes) if code), (0, 0))
                since = time.monotonic()
                if failed < 0:
                    how = signal.Signals(-failed).name + " (too little memory, perhaps)" * (-failed == signal.SIGKILL)
                    place = f"process {rank} of {len(running)}"
                    log(f"{place} was ended by {how}; the others stop")
            elif time.monotonic() - since > PATIENCE:
                return failed if failed > 0 else 128 - failed
            time.sleep(0.05)
        failed = failed or next((code for code in (p.returncode for p in running) if code), 0)
        return failed if failed >= 0 else 128 - failed
    finally:
        for process in running:
            process.kill()
        signal.signal(signal.SIGINT, before)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
