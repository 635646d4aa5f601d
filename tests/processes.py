"""Programs in processes of their own, forked from one that has imported PyTorch, as its import costs more."""

import multiprocessing
import os
import subprocess
import sys
from multiprocessing.context import ForkServerProcess
from pathlib import Path

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tokenmix.lab.train.run", "tokenmix.lab.cli", "pytest"])


def _run(program: str, arguments: tuple[str, ...], environment: dict[str, str], output: Path) -> None:
    os.setsid()
    for stream in (1, 2):
        os.dup2(os.open(output / str(stream), os.O_WRONLY | os.O_CREAT), stream)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[1:] = arguments
    exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})


def start(program: str, *arguments: str, output: Path, **environment: str) -> ForkServerProcess:
    """A process that leads its group and writes its streams 1 and 2 into files of these names."""
    output.mkdir(exist_ok=True)
    process = FORKS.Process(target=_run, args=(program, arguments, {**os.environ, **environment}, output))
    process.start()
    return process


def finish(process: ForkServerProcess, output: Path) -> subprocess.CompletedProcess[str]:
    """The exit code and what was written, after four minutes at most."""
    process.join(240)
    process.kill()
    process.join()
    out, err = ((output / str(stream)).read_text() for stream in (1, 2))
    return subprocess.CompletedProcess((), process.exitcode or 0, out, err)
