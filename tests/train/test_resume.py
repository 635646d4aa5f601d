"""A run that was killed continues bit for bit as if it had not been."""

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import safetensors.torch
import torch

from processes import finish, start
from runs import Killed, rows, stopped_at
from tokenmix.errors import UserError
from tokenmix.lab import cli
from tokenmix.lab.tasks.classes import ClassTask
from tokenmix.lab.train import record, trainer
from tokenmix.lab.train import run as runs
from tokenmix.lab.train.export import export_to_hub
from tokenmix.lab.train.sources import make_config

# Everything that keeps a state: dropout, stochastic depth, mixup, EMA, accumulation over an epoch of 5 steps.
CONFIG = make_config(
    data="digits",
    model="vit_nano",
    model_kwargs={"depth": 1, "drop_rate": 0.1, "drop_path_rate": 0.2},
    epochs=3,
    batch_size=32,
    accumulate=2,
    limit=170,
    limit_eval=40,
    mixup=0.4,
    cutmix=0.5,
    ema=0.9,
    threads=1,
    device="cpu",
    log_every=3,
    checkpoint_every=2,
)


def assert_equal_runs(run: Path, other: Path) -> None:
    for name in ("model.safetensors", "checkpoints/last/model.safetensors", "checkpoints/best/model.safetensors"):
        one, two = (safetensors.torch.load_file(folder / name) for folder in (run, other))
        assert one.keys() == two.keys()
        for key in one:
            assert torch.equal(one[key], two[key]), (name, key)
    assert rows(run) == rows(other)
    one, two = (json.loads((folder / "result.json").read_text()) for folder in (run, other))
    for key in ("metrics", "final", "validation", "best_epoch", "steps", "images"):
        assert one[key] == two[key], key


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, uninterrupted."""
    return runs.train(CONFIG.replace(out=tmp_path_factory.mktemp("whole") / "run"), quiet=True)


@pytest.mark.parametrize(
    ("where", "hook", "count"),
    [
        (trainer.TrainingLoop, "start_batch", 6),  # in the second half of an accumulated step
        (trainer.TrainingLoop, "start_batch", 11),  # the first batch of the second epoch
        (trainer.TrainingLoop, "start_batch", 16),  # past the checkpoints of both epochs
        (record.Recorder, "record_evaluation", 2),  # in an evaluation
        (trainer.TrainingLoop, "save_epoch", 2),  # evaluated, row written, not saved
        (trainer.TrainingLoop, "test", 1),  # trained to the end, not tested
    ],
)
def test_resume_is_bit_equal(whole, tmp_path, where, hook, count):
    run = tmp_path / "run"
    with stopped_at(count, hook, where), pytest.raises(Killed):
        runs.train(CONFIG.replace(out=run), quiet=True)
    runs.train(make_config(resume=run), quiet=True)
    assert_equal_runs(whole, run)


SIGNALLED = """
import os, signal, sys
from processes import finish, start
from tokenmix.lab import cli
from tokenmix.lab.train import trainer
ready = trainer.TrainingLoop.advance
def send(self, *args):
    ready(self, *args)
    if self.progress.step == {step} and self.progress.batch % 2 == 0:
        os.killpg(os.getpgrp(), signal.{name})
trainer.TrainingLoop.advance = send
sys.exit(cli.main(sys.argv[1:]))
"""
ARGUMENTS = [
    "train",
    "image-classification",
    "--data",
    "digits",
    "--model",
    "vit_nano",
    "--model-kwargs",
    "depth=1",
    "drop_rate=0.1",
    "drop_path_rate=0.2",
    "--epochs",
    "3",
    "--batch-size",
    "32",
    "--accumulate",
    "2",
    "--limit",
    "170",
    "--limit-eval",
    "40",
    "--mixup",
    "0.4",
    "--cutmix",
    "0.5",
    "--ema",
    "0.9",
    "--threads",
    "1",
    "--device",
    "cpu",
    "--log-every",
    "3",
    "--checkpoint-every",
    "2",
]


def signalled(name: str, step: int, run: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """A run all of whose processes are sent a signal, as by a terminal or by what manages a cluster's jobs."""
    output = run.with_name("output")
    program = SIGNALLED.format(name=name, step=step)
    return finish(start(program, *ARGUMENTS, "--out", str(run), *more, output=output), output)


@pytest.mark.slow
def test_sigkill_in_mid_epoch(whole, tmp_path):
    run = tmp_path / "run"
    done = signalled("SIGKILL", 8, run)
    assert done.returncode == -signal.SIGKILL, done.stderr
    meta = json.loads((run / "checkpoints" / "last" / "meta.json").read_text())
    assert (meta["progress"]["step"], meta["progress"]["epoch"]) == (6, 1), "step 7 and 8 must have been lost"
    assert cli.main(["train", "--resume", str(run)]) == 0
    assert_equal_runs(whole, run)


@pytest.mark.one_fast
@pytest.mark.parametrize(("name", "workers"), [("SIGINT", "0"), ("SIGTERM", "1")])
def test_a_run_that_is_told_to_stop_saves_and_says_how_to_go_on(whole, tmp_path, name, workers):
    run = tmp_path / "run"
    done = signalled(name, 7, run, "--workers", workers)
    assert done.returncode == 130, done.stderr
    meta = json.loads((run / "checkpoints" / "last" / "meta.json").read_text())
    assert meta["progress"]["step"] == 7, "the step in which it was reported is saved"
    assert f"tokenmix train --resume {run}" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    damaged = shutil.copytree(run, tmp_path / "damaged")
    del meta["sha256"]
    for change, message in (({"best": {}}, "no accuracy of its best epoch"), ({"best_epoch": 99}, "beyond its config")):
        told = {**meta, "progress": {**meta["progress"], **change}}
        (damaged / "checkpoints" / "last" / "meta.json").write_text(json.dumps(told))
        with pytest.raises(UserError, match=message):
            runs.train(make_config(resume=damaged), quiet=True)
    runs.train(make_config(resume=run), quiet=True)
    assert_equal_runs(whole, run)


def test_a_finished_run_is_not_resumed(whole):
    with pytest.raises(UserError, match=r"is finished; evaluate it with: tokenmix eval"):
        runs.train(make_config(resume=whole))


def test_resume_needs_a_run_and_a_checkpoint(tmp_path, whole):
    with pytest.raises(UserError, match=r"is not a run folder: it has no config\.json"):
        runs.train(make_config(resume=tmp_path))
    with pytest.raises(UserError, match=rf"best is not a run folder: it has no config\.json; give {whole}$"):
        runs.train(make_config(resume=whole / "checkpoints" / "best"))
    (tmp_path / "config.json").write_bytes((whole / "config.json").read_bytes())
    with pytest.raises(UserError, match="stopped before its first checkpoint"):
        runs.train(make_config(resume=tmp_path))


def test_resume_takes_the_runs_own_settings(tmp_path, whole):
    (tmp_path / "config.json").write_bytes((whole / "config.json").read_bytes())
    with pytest.raises(UserError, match=r"own lr=0\.002; leave lr=0\.1 out"):
        runs.train(make_config(resume=tmp_path, lr=0.1))


def test_ctrl_c_twice_keeps_the_checkpoint_before(tmp_path, monkeypatch):
    """The second Ctrl-C is an ordinary KeyboardInterrupt."""
    # A shell starts what runs in the background with Ctrl-C ignored, these tests too.
    before = signal.default_int_handler
    inherited, step = signal.signal(signal.SIGINT, before), trainer.TrainingLoop.start_batch

    def pressed_twice(self, *args):
        if self.progress.step == 3:
            # os.kill may reach another thread, and two signals that wait there are one.
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        step(self, *args)

    monkeypatch.setattr(trainer.TrainingLoop, "start_batch", pressed_twice)
    run = tmp_path / "run"
    try:
        with pytest.raises(KeyboardInterrupt, match="interrupted; the checkpoint of step 2 is kept, continue with"):
            runs.train(CONFIG.replace(out=run), quiet=True)
        assert signal.getsignal(signal.SIGINT) is before
    finally:
        signal.signal(signal.SIGINT, inherited)


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_processes_that_load_images_say_nothing_at_ctrl_c(capfd: pytest.CaptureFixture[str]):
    with trainer.StopRequest() as request:
        child = multiprocessing.get_context("fork").Process(target=press_ctrl_c)
        child.start()
        child.join()
        assert child.exitcode == 0
        assert capfd.readouterr().err == ""
        press_ctrl_c()
        assert request.asked
    assert "stopping after this step" in capfd.readouterr().err


@pytest.mark.parametrize(("stored", "kept"), [({"monitor": "accuracy"}, "accuracy"), ({}, "loss")])
def test_a_run_keeps_its_metric_when_another_becomes_usual(tmp_path, monkeypatch, stored, kept):
    """Folders of earlier versions store no metric."""
    run = tmp_path / "run"
    with stopped_at(6), pytest.raises(Killed):
        runs.train(CONFIG.replace(out=run), quiet=True)
    setup = json.loads((run / "config.json").read_text())
    assert setup.pop("monitor") == "accuracy"
    (run / "config.json").write_text(json.dumps(setup | stored))
    monkeypatch.setattr(ClassTask, "usual_monitor", lambda self: "loss")
    runs.train(make_config(resume=run), quiet=True)
    assert json.loads((run / "result.json").read_text())["monitor"] == kept
    monkeypatch.undo()
    assert f"the best by {kept} on" in (Path(export_to_hub(run)) / "README.md").read_text()


def test_an_optimiser_that_adds_a_setting_in_its_first_step_resumes(tmp_path):
    """As LAMB's count of steps."""
    config = CONFIG.replace(opt="lamb", epochs=1, checkpoint_every=1)
    whole = runs.train(config.replace(out=tmp_path / "whole"), quiet=True)
    assert json.loads((whole / "config.json").read_text())["step_size"] == 32
    with stopped_at(6), pytest.raises(Killed):
        runs.train(config.replace(out=tmp_path / "run"), quiet=True)
    runs.train(make_config(resume=tmp_path / "run"), quiet=True)
    assert_equal_runs(whole, tmp_path / "run")
