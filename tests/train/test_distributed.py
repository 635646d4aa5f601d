"""Two processes on the CPU (gloo) do what one does with batches twice as large; what stops one stops both.

One pair of processes runs all of `WORKER`, since starting a pair takes longer than its training.
"""

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from predictions import check_predictions
from processes import finish, start
from runs import last_weights, numbers
from tokenmix.errors import UserError
from tokenmix.lab.train.launch import launch, processes_to_start
from tokenmix.lab.train.plan import seed_everything
from tokenmix.lab.train.run import evaluate, train
from tokenmix.lab.train.sources import make_config

# Without dropout, which each process draws for itself. 21 test images do not divide by two: with batches of 10 one
# process has one batch more. One thread: sums of float32 differ by their order alone.
CONFIG = make_config(
    data="digits",
    model="vit_nano",
    model_kwargs={"depth": 2},
    epochs=2,
    batch_size=10,
    accumulate=2,
    limit=170,
    limit_eval=21,
    threads=1,
    device="cpu",
    log_every=2,
    checkpoint_every=3,
    lr=1e-3,
)

WORKER = """
import dataclasses, errno, json, os, signal, sys
from pathlib import Path
from tokenmix.errors import UserError
from tokenmix.lab.registry import get_task
from tokenmix.lab.train import checkpoint, trainer
from tokenmix.lab.train.sources import make_config
from tokenmix.lab.train.distributed import distributed_info, process_group
from tokenmix.lab.train.run import train

out, config = Path(sys.argv[1]), make_config(**json.loads(sys.argv[2]))
outcomes = {}

def attempt(name, **changes):
    try:
        train(config.replace(out=out / name, **changes), quiet=True)
        outcomes[name] = "done"
    except (UserError, SystemExit, KeyboardInterrupt) as error:
        outcomes[name] = f"{type(error).__name__}: {error}"

class Killed(BaseException):
    pass

def killed_and_resumed(name, **changes):
    before, calls = trainer.TrainingLoop.start_batch, [0]
    def raising(self, *args):
        calls[0] += 1
        if calls[0] == 9:
            raise Killed
        before(self, *args)
    trainer.TrainingLoop.start_batch = raising
    try:
        train(config.replace(out=out / name, **changes), quiet=True)
    except Killed:
        outcomes[name] = "killed"
    trainer.TrainingLoop.start_batch = before
    train(make_config(resume=out / name), quiet=True)

def nan_in_one_process():
    kind, calls = get_task(config.task), [0]
    loss = kind.loss
    def broken(self, batch):
        calls[0] += 1
        value, logs = loss(self, batch)
        return (value * float("nan") if calls[0] == 10 and distributed_info().rank == 1 else value), logs
    kind.loss = broken
    attempt("nan")
    kind.loss = loss

def disk_full_on_the_third_checkpoint():
    before, calls = checkpoint.save_checkpoint, [0]
    def full(*args):
        calls[0] += 1
        if calls[0] == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(args[0]))
        before(*args)
    checkpoint.save_checkpoint = full
    attempt("full")
    checkpoint.save_checkpoint = before

def one_process_is_told_to_end():
    before = trainer.TrainingLoop.start_batch
    def told(self, *args):
        if distributed_info().rank == 1 and self.progress.step == 4:
            signal.raise_signal(signal.SIGTERM)
        before(self, *args)
    trainer.TrainingLoop.start_batch = told
    attempt("told")
    trainer.TrainingLoop.start_batch = before

with process_group("cpu"):
    attempt("ddp")
    attempt("fsdp", strategy="fsdp")
    killed_and_resumed("ddp-again")
    killed_and_resumed("fsdp-again", strategy="fsdp")
    attempt("checkpointed", grad_checkpointing=True, model_kwargs={"depth": 2, "drop_rate": 0.1}, ema=0.9)
    nan_in_one_process()
    attempt("fsdp-ema", strategy="fsdp", ema=0.9)
    disk_full_on_the_third_checkpoint()
    one_process_is_told_to_end()
    attempt("too-large", batch_size=100, accumulate=100)
(out / f"outcomes-{distributed_info().rank}.json").write_text(json.dumps(outcomes))
"""


def environment(**extra: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", **extra}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the runs of two processes."""
    out = tmp_path_factory.mktemp("two")
    values = json.dumps(dataclasses.asdict(CONFIG.replace(logger="tensorboard")))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": "2"}
    outputs = [out / f"output-{rank}" for rank in "01"]
    started = [
        start(WORKER, str(out), values, output=output, **shared, LOCAL_WORLD_SIZE="2", RANK=rank, LOCAL_RANK=rank)
        for rank, output in zip("01", outputs)
    ]
    for process, output in zip(started, outputs):
        done = finish(process, output)
        assert done.returncode == 0, done.stderr[-4000:]
    return out


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run in one process, with batches twice as large."""
    return train(CONFIG.replace(batch_size=20, out=tmp_path_factory.mktemp("one") / "run"), quiet=True)


def outcome(two: Path, rank: int) -> dict[str, str]:
    return json.loads((two / f"outcomes-{rank}.json").read_text())


def result(run: Path) -> dict[str, Any]:
    return json.loads((run / "result.json").read_text())


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_equal_one(one: Path, two: Path, strategy: str):
    """Global batch b is the same set of images: process r takes every second of them, and gradients are averaged.

    AdamW divides by the root of small squares, so that float32's rounding grows to 1e-4 within 16 steps; the weights
    themselves move by 1e-2.
    """
    expected, trained = last_weights(one), last_weights(two / strategy)
    assert expected.keys() == trained.keys()
    for key, value in expected.items():
        torch.testing.assert_close(trained[key], value, rtol=1e-3, atol=3e-4, msg=lambda m, key=key: f"{key}: {m}")
    for ours, theirs in zip(numbers(two / strategy), numbers(one), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3)
    for key in ("steps", "images", "parameters", "macs", "best_epoch"):
        assert result(two / strategy)[key] == result(one)[key], key
    assert sum(map(sum, result(two / strategy)["metrics"]["confusion"])) == 21
    check_predictions(two / strategy, {"accuracy", "balanced_accuracy", "ece", "loss"})


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_checkpoints_are_whole_and_resuming_is_bit_equal(two: Path, one: Path, strategy: str):
    assert outcome(two, 0)[f"{strategy}-again"] == outcome(two, 1)[f"{strategy}-again"] == "killed"
    whole, again = two / strategy, two / f"{strategy}-again"
    assert all(torch.equal(value, last_weights(again)[key]) for key, value in last_weights(whole).items())
    assert numbers(again) == numbers(whole)
    states = [
        torch.load(run / "checkpoints" / "last" / "state.pt", weights_only=True)["optimizers"][0]["state"]
        for run in (whole, one)
    ]
    assert [v["exp_avg"].shape for v in states[0].values()] == [v["exp_avg"].shape for v in states[1].values()]
    assert {type(v["exp_avg"]) for v in states[0].values()} == {torch.Tensor}


def test_one_process_writes_and_the_folder_serves_one_process(two: Path):
    run = two / "ddp"
    assert len(list((run / "tensorboard").iterdir())) == 1
    config = json.loads((run / "config.json").read_text())["config"]
    assert [config["loop"][name] for name in ("devices", "num_nodes", "batch_size")] == [2, 1, 10]
    again = evaluate(run, device="cpu")
    assert again["loss"] == pytest.approx(result(run)["metrics"]["loss"], rel=1e-5)
    assert again["confusion"] == result(run)["metrics"]["confusion"]
    with pytest.raises(UserError, match="is finished"):
        train(make_config(resume=run))


def test_the_average_is_kept_and_blocks_may_be_computed_again(two: Path):
    assert outcome(two, 0)["checkpointed"] == outcome(two, 1)["checkpointed"] == "done"
    averaged = safetensors.torch.load_file(two / "checkpointed" / "model.safetensors")
    assert any(not torch.equal(value, averaged[key]) for key, value in last_weights(two / "checkpointed").items())


def test_each_process_draws_its_own_dropout():
    drawn = []
    for rank in ({}, {"rank": 0}, {"rank": 1}, {"rank": 2}):
        seed_everything(3, 1, 2, **rank)
        drawn.append(torch.rand(1).item())
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) == 3


def test_a_loss_that_is_no_number_in_one_process_stops_both(two: Path):
    assert outcome(two, 0)["nan"].startswith("UserError: the loss is nan at step 5")
    assert "continue with: tokenmix train --resume" in outcome(two, 0)["nan"]
    assert outcome(two, 1)["nan"] == "PeerFailure: 2"
    assert all(value.isfinite().all() for value in last_weights(two / "nan").values())


def test_a_full_disk_stops_both(two: Path):
    assert outcome(two, 0)["full"].startswith("DiskError: No space left on device")
    assert "the checkpoint of step 6 is kept" in outcome(two, 0)["full"]
    assert outcome(two, 1)["full"] == "PeerFailure: 2"


def test_sigterm_to_one_process_saves_and_stops_both(two: Path):
    kept = "KeyboardInterrupt: tokenmix: interrupted; the checkpoint of step 5 is kept, continue with: tokenmix train"
    assert outcome(two, 0)["told"].startswith(kept)
    assert outcome(two, 1)["told"] == "PeerFailure: 130"


def test_sigterm_to_the_command_reaches_its_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    started = tmp_path / "process"
    started.write_text(f"""#!/bin/sh
trap 'exit 130' TERM
touch {tmp_path}/up$RANK
while :; do sleep 0.05; done
""")
    started.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(started))

    def send_when_up():
        while not all((tmp_path / f"up{rank}").exists() for rank in (0, 1)):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=send_when_up).start()
    assert launch(2, []) == 130


def test_a_mistake_is_told_by_one_process(two: Path):
    assert outcome(two, 0)["fsdp-ema"].startswith("UserError: ema keeps a whole copy of the weights")
    assert outcome(two, 0)["too-large"].startswith("UserError: 170 training images are fewer than the 200 parts")
    assert outcome(two, 1)["fsdp-ema"] == outcome(two, 1)["too-large"] == "PeerFailure: 2"
    assert not (two / "too-large").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"devices": 2}, "2 processes are requested and 1 run; start them .* torchrun --nproc_per_node 2 -m tokenmix"),
        ({"devices": 8, "num_nodes": 2}, "16 processes .* --nnodes 2 .* --nproc_per_node 8"),
        ({"strategy": "fsdp"}, "strategy fsdp needs several processes; give --devices 2"),
        ({"devices": 0}, "devices must be at least 1"),
    ],
)
def test_one_process_where_several_are_meant(tmp_path: Path, changes: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        train(CONFIG.replace(out=tmp_path / "run", **changes))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_command_starts_stops_and_takes_up_two_processes(tmp_path: Path):
    """`--devices 2` on a terminal: Ctrl-C reaches all, the run is saved once, `--resume` starts two again."""
    run, log = tmp_path / "run", tmp_path / "stderr"
    command = [sys.executable, "-m", "tokenmix", "train"]
    settings = [
        "--data",
        "digits",
        "--model-kwargs",
        "depth=1",
        "--limit",
        "200",
        "--limit-eval",
        "50",
        "--log-every",
        "5",
    ]
    settings += ["--batch-size", "16", "--epochs", "20", "--devices", "2", "--device", "cpu", "--threads", "1"]
    with log.open("w") as file:
        started = subprocess.Popen(
            [*command, *settings, "--out", str(run)], stderr=file, env=environment(), start_new_session=True
        )
        while not (run / "metrics.csv").exists() or len((run / "metrics.csv").read_text().splitlines()) < 4:
            assert started.poll() is None, log.read_text()
            time.sleep(0.02)
        os.killpg(started.pid, signal.SIGINT)
        assert started.wait(60) == 130, log.read_text()
    said = log.read_text()
    assert "Traceback" not in said
    assert said.count("interrupted; the checkpoint of step") == said.count("stopping after this step") == 1
    done = subprocess.run(
        [*command, "--resume", str(run)], capture_output=True, text=True, env=environment(), timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert (result(run)["steps"], result(run)["images"]) == (120, 120 * 32)


@pytest.mark.slow
def test_a_mistake_with_two_processes_is_one_line(tmp_path: Path):
    command = [sys.executable, "-m", "tokenmix", "train", "--data", "digits", "--devices", "2", "--device", "cpu"]
    done = subprocess.run(
        [*command, "--strategy", "fsdp", "--ema", "0.9", "--out", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=120,
    )
    assert done.returncode == 2
    assert (
        done.stderr
        == "tokenmix: ema keeps a whole copy of the weights, which fsdp avoids; leave --ema out or use ddp\n"
    )


def test_a_storm_of_processes_is_refused():
    with pytest.raises(UserError, match="devices=1000000 would start 1000000 processes"):
        launch(1_000_000, ["train"])


def test_modules_in_the_current_folder_are_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("tokenmix", "rich", "numbers"):
        (tmp_path / f"{name}.py").write_text("import pathlib; pathlib.Path('imported').touch()")
    monkeypatch.chdir(tmp_path)
    assert launch(2, ["list", "tasks"]) == 0
    assert not (tmp_path / "imported").exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"RANK": "x"}, "RANK='x' is not a whole number; let torchrun or --devices"),
        ({"WORLD_SIZE": "2.5"}, "WORLD_SIZE='2.5' is not a whole number"),
        ({"RANK": "2"}, "RANK=2, LOCAL_RANK=0, WORLD_SIZE=2, .* contradict each other"),
        ({"RANK": "-1"}, "contradict each other"),
        ({"LOCAL_RANK": ""}, "asks for several processes, and LOCAL_RANK is not set; let torchrun"),
        ({"LOCAL_WORLD_SIZE": "3"}, "contradict each other"),
        ({"WORLD_SIZE": "0"}, "contradict each other"),
        ({"MASTER_PORT": "x"}, "process 0 of 2 cannot join the others at '127.0.0.1:x', which MASTER_ADDR and MASTER"),
        ({"MASTER_PORT": "99999"}, "cannot join the others at '127.0.0.1:99999'"),
        ({"MASTER_PORT": ""}, "cannot join the others at '127.0.0.1:'"),
        ({"MASTER_ADDR": ""}, "cannot join the others at ':29511'"),
    ],
)
def test_wrong_variables_of_the_launcher_are_one_line(
    given: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sound = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511",
    }
    for name, value in (sound | given).items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    config = make_config(data="digits", model="vit_nano", device="cpu", out=tmp_path / "run")

    def start() -> None:
        processes_to_start(config)  # The command asks before Lightning is imported.
        train(config)

    with pytest.raises(UserError, match=message):
        start()
    assert not (tmp_path / "run").exists()
