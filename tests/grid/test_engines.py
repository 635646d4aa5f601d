"""Every engine trains a grid's cells to the same ends, also where one is killed on the way."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from tokenmix.errors import UserError
from tokenmix.lab.compare.compare import compare
from tokenmix.lab.compare.results import load_results
from tokenmix.lab.grid import Cell, finish_cell, in_processes, in_turn, make_engine
from tokenmix.lab.train.config import CompareConfig, EngineConfig
from tokenmix.lab.train.sources import make_config

PLUGIN = Path(__file__).parents[1] / "plugins" / "toy_net.py"
NET = {"embed_dim": 16, "depth": 1, "num_heads": 2}
DIGITS: dict[str, Any] = {
    "data": "digits",
    "limit": 64,
    "limit_eval": 20,
    "validation": 16,
    "batch_size": 16,
    "epochs": 2,
    "threads": 1,
    "device": "cpu",
}
LONG = {"epochs": 40, "checkpoint_every": 5}


def cells(out: Path, number: int = 2, **changes: Any) -> list[Cell]:
    settings = {**DIGITS, "model": "mixer_nano", "model_kwargs": NET, **changes}
    return [Cell(f"c{seed}", make_config(out=out / f"c{seed}", seed=seed, **settings)) for seed in range(number)]


def weights(run: Path) -> dict[str, str]:
    """The hash of each tensor of the kept and of the last weights; the order in a file's header is by chance."""
    files = (run / "model.safetensors", run / "checkpoints" / "last" / "model.safetensors")
    return {
        f"{i}:{name}": hashlib.sha256(tensor.tobytes()).hexdigest()
        for i, file in enumerate(files)
        for name, tensor in load_file(file).items()
    }


def scores(run: Path) -> dict[str, Any]:
    result = json.loads((run / "result.json").read_text())
    return {name: result[name] for name in ("metrics", "final", "validation", "steps", "best_epoch")}


def kill_in_mid_run(run: Path, number: signal.Signals) -> threading.Thread:
    """Signal the process that trains the run, once it has a checkpoint."""

    def kill() -> None:
        while not (run / "checkpoints" / "last" / "meta.json").exists():
            time.sleep(0.05)
        os.kill(int((run / ".writer").read_text().split()[1]), number)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    return thread


def test_a_failure_is_an_outcome_and_costs_no_other_cell(tmp_path: Path) -> None:
    good, bad = cells(tmp_path)
    bad = Cell("bad", bad.config.replace(batch_size=1000, accumulate=1000))
    outcomes = {cell.name: outcome for cell, outcome in in_turn([bad, good])}
    assert "1000 parts of a step" in str(outcomes["bad"])
    assert outcomes["c0"] == ""
    assert good.is_finished
    before = (good.folder / "result.json").stat().st_mtime_ns
    assert finish_cell(good) == ""
    assert (good.folder / "result.json").stat().st_mtime_ns == before
    assert "lr=0.002 instead of 0.1" in str(finish_cell(Cell("c0", good.config.replace(lr=0.1))))
    full = Cell("full", good.config.replace(out=Path("/proc/1/nowhere")))
    assert isinstance(finish_cell(full), OSError)


@pytest.mark.slow
def test_processes_end_as_one_process_does_and_a_dead_one_continues(tmp_path: Path) -> None:
    alone, apart = cells(tmp_path / "alone", **LONG), cells(tmp_path / "apart", **LONG)
    assert [outcome for _, outcome in in_turn(alone)] == ["", ""]
    killer = kill_in_mid_run(apart[0].folder, signal.SIGKILL)
    outcomes = {cell.name: outcome for cell, outcome in in_processes(apart, jobs=2)}
    killer.join()
    assert outcomes == {"c0": "its process was ended by SIGKILL; the same command continues it", "c1": ""}
    assert {cell.name: outcome for cell, outcome in in_processes(apart, jobs=2)} == {"c0": "", "c1": ""}
    for one, other in zip(alone, apart):
        assert weights(one.folder) == weights(other.folder)
        assert scores(one.folder) == scores(other.folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "number"),
    [("--jobs 2", signal.SIGINT), ("--jobs 2", signal.SIGKILL), ("--engine ray", signal.SIGINT)],
)
def test_runs_save_when_the_program_ends(tmp_path: Path, engine: str, number: signal.Signals) -> None:
    # With a mixer that each process has to import as the program did; no checkpoint is due before the end of 646 steps.
    words = (
        f"tokenmix --import {PLUGIN} compare {engine} --mixers toy-roll --data digits --batch-size 2 --log-every 1 "
        f"--model-kwargs embed_dim=16 depth=4 num_heads=2 --checkpoint-every 100000 --device cpu --out {tmp_path}/out"
    ).split()
    process = subprocess.Popen([sys.executable, "-P", "-m", *words], stderr=subprocess.PIPE, text=True)
    run = tmp_path / "out" / "runs" / "toy-roll-seed0"
    while not (run / "metrics.csv").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(number)
    _, error = process.communicate()
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert "interrupted: 0 of 2 runs are finished; the same command again continues from here" in error
    # The process of a killed program ends a little later; it holds the folder until then.
    while (run / ".writer").exists():
        time.sleep(0.1)
    step = json.loads((run / "checkpoints" / "last" / "meta.json").read_text())["progress"]["step"]
    assert 0 < step < 646


def comparison(out: Path, **changes: Any) -> CompareConfig:
    values = {**DIGITS, "model_kwargs": NET, "mixers": ("self", "external"), "controls": False, "out": out}
    return CompareConfig().replace(**{**values, **changes})


def untimed(out: Path) -> Any:
    """What a report says, without times, memory and the folder."""
    results = load_results(out / "results.json")
    runs = {
        (variant.name, run.seed): (run.status, run.score, run.confusion, run.score_curve.values, run.loss_curve.values)
        for variant in results.variants
        for run in variant.runs
    }
    counts = [(variant.name, variant.parameters, variant.macs) for variant in results.variants]
    config = {name: value for name, value in results.config.items() if name != "out"}
    return runs, counts, config, results.seen, results.data, results.examples, results.skeleton


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a Ray cluster of two nodes with a CPU each, simulated on this machine."""
    pytest.importorskip("ray")
    # On a busy machine its workers, 15 nicer than other processes, would hardly come on.
    monkeypatch.setenv("RAY_worker_niceness", "0")
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    try:
        cluster.add_node(**node)
        yield cluster.address
    finally:
        cluster.shutdown()


@pytest.mark.slow
def test_on_ray_a_killed_worker_continues_and_the_report_is_the_local_one(
    tmp_path: Path, two_nodes: str, capsys: pytest.CaptureFixture[str]
) -> None:
    local = compare(config=comparison(tmp_path / "local", **LONG), quiet=True).path
    config = comparison(tmp_path / "ray", **LONG, engine="ray", address=two_nodes)
    killer = kill_in_mid_run(tmp_path / "ray" / "runs" / "self-seed0", signal.SIGKILL)
    compare(config=config)
    killer.join()
    assert "[2/2]" in capsys.readouterr().out
    for mixer in ("self", "external"):
        one, other = (out / "runs" / f"{mixer}-seed0" for out in (local, tmp_path / "ray"))
        assert weights(one) == weights(other)
        assert scores(one) == scores(other)
    command = json.loads((tmp_path / "ray/runs/self-seed0/config.json").read_text())["command"]
    assert "default_worker.py" in command[0], "trained by a worker of Ray"
    assert untimed(local) == untimed(tmp_path / "ray")


@pytest.mark.slow
def test_on_ray_what_no_node_has_is_refused(two_nodes: str) -> None:
    import ray

    with pytest.raises(UserError, match=r"no node of the Ray cluster has \d CPUs? and 3 GPUs"):
        make_engine(EngineConfig(engine="ray", address=two_nodes, run_gpus=3), Path(), 0)
    ray.shutdown()


@pytest.mark.parametrize(
    ("address", "message"),
    [("127.0.0.1:1", "no Ray cluster answers at 127.0.0.1:1; start one with ray start"), ("here", "HOST:PORT")],
)
def test_where_no_ray_answers_is_one_line(address: str, message: str) -> None:
    pytest.importorskip("ray")
    with pytest.raises(UserError, match=message):
        make_engine(EngineConfig(engine="ray", address=address), Path(), 0)


@pytest.mark.slow
def test_on_slurm_a_preempted_job_is_queued_again_and_continues(tmp_path: Path) -> None:
    submitit = pytest.importorskip("submitit")
    alone, queued = cells(tmp_path / "alone", 1, **LONG), cells(tmp_path / "queued", 1, **LONG)
    bad = Cell("bad", queued[0].config.replace(batch_size=1000, accumulate=1000, out=tmp_path / "queued" / "bad"))
    assert [outcome for _, outcome in in_turn(alone)] == [""]
    engine = make_engine(EngineConfig(engine="slurm", slurm={"cluster": "local"}), tmp_path / "jobs", 0)
    # What Slurm sends a job that it takes the node from.
    preemption = kill_in_mid_run(queued[0].folder, signal.SIGUSR2)
    outcomes = {cell.name: outcome for cell, outcome in engine([*queued, bad])}
    preemption.join()
    assert outcomes["c0"] == ""
    assert "1000 parts of a step" in str(outcomes["bad"])
    logs = "".join(file.read_text() for file in (tmp_path / "jobs").glob("*_log.*"))
    assert "preempted" in logs
    assert "Requeued" in logs
    assert submitit
    assert weights(alone[0].folder) == weights(queued[0].folder)
    assert scores(alone[0].folder) == scores(queued[0].folder)


def test_slurm_without_slurm_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("submitit")
    with pytest.raises(UserError, match=r"submitit does not take --slurm .*srun"):
        make_engine(EngineConfig(engine="slurm"), tmp_path, 0)
    with pytest.raises(UserError, match=r"submitit does not take --slurm .*partitoin"):
        make_engine(EngineConfig(engine="slurm", slurm={"cluster": "local", "partitoin": "gpu"}), tmp_path, 0)


@pytest.mark.parametrize(("engine", "module"), [("ray", "ray"), ("slurm", "submitit")])
def test_an_engine_without_its_package_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, engine: Any, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=rf"--engine {engine} needs {module}: pip install 'tokenmix\[{engine}\]'"):
        make_engine(EngineConfig(engine=engine), tmp_path, 0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"engine": "rai"}, "engine='rai' is not valid; give one of local, ray, slurm"),
        ({"address": "auto"}, "address='auto' needs --engine ray, got local"),
        ({"engine": "ray", "jobs": 2}, "jobs=2 needs --engine local or slurm, got ray"),
        ({"run_gpus": 1.0}, "needs --engine ray or slurm"),
    ],
)
def test_settings_of_another_engine_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        EngineConfig(**values)
