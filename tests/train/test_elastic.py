"""Nodes of torchrun that are lost and come back, here agents on one machine: runs continue by themselves."""

import contextlib
import csv
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from runs import last_weights

STEPS = 48
TRAIN = [
    "train",
    "--data",
    "digits",
    "--model",
    "vit_nano",
    "--model-kwargs",
    "depth=1",
    "--device",
    "cpu",
    "--threads",
    "1",
    "--batch-size",
    "6",
    "--limit",
    "432",
    "--limit-eval",
    "30",
    "--validation",
    "30",
    "--epochs",
    "2",
    "--lr",
    "1e-3",
    "--log-every",
    "1",
    "--checkpoint-every",
    "5",
]
# The run waits at the step that the file `hold` names, until the file is gone or the run is asked to stop.
PLUGIN = """
import contextlib, pathlib, time
from tokenmix.lab.train import trainer

before = trainer.TrainingLoop.start_batch

hold = pathlib.Path(__file__).with_name("hold")

def held(self, *args):
    with contextlib.suppress(FileNotFoundError):
        while self.progress.step >= int(hold.read_text()) and not self.request.asked:
            time.sleep(0.1)
    before(self, *args)

trainer.TrainingLoop.start_batch = held
"""


class Nodes:
    """Agents of one job; those that still run are ended with the test."""

    def __init__(self, folder: Path, nodes: str) -> None:
        self.folder, self.run, self.nodes = folder, folder / "run", nodes
        self.agents: list[subprocess.Popen[bytes]] = []
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        (folder / "held.py").write_text(PLUGIN)

    def start(self) -> int:
        """One more agent; the first one hosts the rendezvous."""
        agent = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes",
            self.nodes,
            "--nproc-per-node",
            "1",
            "--max-restarts",
            "5",
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            f"127.0.0.1:{self.port}",
            "--rdzv-conf",
            f"is_host={int(not self.agents)},last_call_timeout=3",
            "--monitor-interval",
            "0.5",
            "-m",
            "tokenmix",
            "--import",
            str(self.folder / "held.py"),
            *TRAIN,
            "--out",
            str(self.run),
        ]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        # Else torch 2.14.1 does not say where to meet to a node that comes later.
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        with (self.folder / f"log-{len(self.agents)}").open("wb") as log:
            self.agents.append(subprocess.Popen(agent, stdout=log, stderr=log, env=environment, start_new_session=True))
        return len(self.agents) - 1

    def lose(self, number: int) -> None:
        """End an agent and its process, as a machine that is switched off."""
        agent = self.agents[number]
        for child in children(agent.pid):
            os.kill(child, signal.SIGKILL)
        agent.kill()
        agent.wait()

    def hold(self, step: int) -> None:
        """Let the run wait at this step."""
        beside = self.folder / "hold.new"
        beside.write_text(str(step))
        beside.replace(self.folder / "hold")

    def release(self) -> None:
        """Let the run continue to its end."""
        (self.folder / "hold").unlink()

    def ended(self) -> bool:
        return all(agent.poll() is not None for agent in self.agents)

    def said(self) -> str:
        return "".join(path.read_text() for path in sorted(self.folder.glob("log-*")))

    def wait_for(self, what: Callable[[], bool], seconds: float = 600) -> None:
        end = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < end, self.said()[-6000:]
            time.sleep(0.1)

    def step(self) -> int:
        """The last step in metrics.csv."""
        try:
            with (self.run / "metrics.csv").open(newline="") as file:
                return max(int(row["step"]) for row in csv.DictReader(file))
        except (OSError, ValueError, TypeError):
            return 0

    def continued(self) -> list[tuple[int, int, int]]:
        """Step, processes and batch size of each line that says that the run continues."""
        found = re.findall(rf"continues from step (\d+) of {STEPS}, (\d) x (\d+) images a step", self.said())
        return sorted((int(step), int(processes), int(batch)) for step, processes, batch in found)


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@contextlib.contextmanager
def nodes(folder: Path, count: str) -> Iterator[Nodes]:
    folder.mkdir()
    job = Nodes(folder, count)
    try:
        yield job
    finally:
        for number, agent in enumerate(job.agents):
            if agent.poll() is None:
                job.lose(number)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of three nodes of which none is lost."""
    with nodes(tmp_path_factory.mktemp("elastic") / "whole", "3") as job:
        for _ in range(3):
            job.start()
        job.wait_for(job.ended)
        assert [agent.returncode for agent in job.agents] == [0, 0, 0], job.said()[-6000:]
        assert job.continued() == []
        return job.run


def assert_like(run: Path, whole: Path) -> None:
    """The same but for rounding: three gradients are summed in an order that a restart changes."""
    trained = last_weights(run)
    for key, value in last_weights(whole).items():
        torch.testing.assert_close(trained[key], value, rtol=1e-3, atol=3e-4, msg=lambda m, key=key: f"{key}: {m}")
    result = json.loads((run / "result.json").read_text())
    assert (result["steps"], result["images"]) == (STEPS, STEPS * 18)


@pytest.mark.slow
def test_three_nodes_wait_for_one_that_was_lost(whole: Path, tmp_path: Path):
    """`--nnodes 3`: the others wait; with it they continue from the last checkpoint."""
    with nodes(tmp_path / "job", "3") as job:
        job.hold(12)
        for _ in range(3):
            job.start()
        job.wait_for(lambda: job.step() == 12)
        job.lose(2)
        job.release()
        job.start()
        job.wait_for(job.ended)
        assert [agent.returncode for agent in job.agents] == [0, 0, -signal.SIGKILL, 0], job.said()[-6000:]
        assert job.continued() == [(10, 3, 6)]
        assert_like(job.run, whole)


@pytest.mark.slow
def test_two_of_three_nodes_continue_until_the_third_is_back(whole: Path, tmp_path: Path):
    """`--nnodes 2:3`: a step takes the same images in two processes as in three."""
    with nodes(tmp_path / "job", "2:3") as job:
        job.hold(12)
        for _ in range(3):
            job.start()
        job.wait_for(lambda: job.step() == 12)
        job.lose(1)
        job.hold(24)
        job.wait_for(lambda: job.step() == 24)
        assert job.continued() == [(10, 2, 9)]
        job.start()
        job.wait_for(lambda: len(job.continued()) == 2)
        job.release()
        job.wait_for(job.ended)
        assert [agent.returncode for agent in job.agents] == [0, -signal.SIGKILL, 0, 0], job.said()[-6000:]
        # The two were asked to stop and saved: no step was lost.
        assert job.continued() == [(10, 2, 9), (25, 3, 6)]
        assert_like(job.run, whole)
