"""Run folders that were damaged, or that two processes write: found, reported in one line, and repaired if possible."""

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from runs import DIGITS, Killed, stopped_at
from tokenmix.errors import UserError
from tokenmix.files import one_writer
from tokenmix.lab.train import trainer
from tokenmix.lab.train.checkpoint import read_checkpoint, read_weights, save_weights
from tokenmix.lab.train.run import evaluate, train
from tokenmix.lab.train.sources import make_config

CONFIG = make_config(
    **DIGITS,
    epochs=3,
    batch_size=32,
    limit=160,
    limit_eval=40,
    log_every=2,
    checkpoint_every=2,
)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that ended after the second checkpoint of its third epoch; `best` is that of the first or second epoch."""
    run = tmp_path_factory.mktemp("stopped") / "run"
    with stopped_at(15), pytest.raises(Killed):
        train(CONFIG.replace(out=run), quiet=True)
    return run


@pytest.fixture
def killed(stopped: Path, tmp_path: Path) -> Path:
    return shutil.copytree(stopped, tmp_path / "run")


def flip(file: Path, where: float) -> None:
    """Change one byte, which lies after this share of the file."""
    data = bytearray(file.read_bytes())
    data[int(len(data) * where)] ^= 1
    # A file of its own: checkpoints that are equal share one.
    file.unlink()
    file.write_bytes(data)


def numbers(run: Path) -> list[str]:
    return [line.split(",")[0] for line in (run / "metrics.csv").read_text().splitlines()]


@pytest.mark.parametrize("name", ["model.safetensors", "state.pt"])
def test_a_changed_byte_is_found_and_the_best_checkpoint_serves(killed: Path, name: str, capsys):
    last, best = (killed / "checkpoints" / which for which in ("last", "best"))
    assert read_checkpoint(last).progress.step == 14
    step = read_checkpoint(best).progress.step
    flip(last / name, 0.9)
    with pytest.raises(UserError, match=rf"last/{name} is damaged"):
        read_checkpoint(last)
    train(make_config(resume=killed), quiet=True)
    assert f"{name} is damaged" in (said := capsys.readouterr().err)
    assert f"continuing from the best checkpoint, of step {step}" in said
    assert json.loads((killed / "result.json").read_text())["steps"] == 15


def test_two_damaged_checkpoints_stop_the_run(killed: Path):
    for which in ("last", "best"):
        flip(killed / "checkpoints" / which / "model.safetensors", 0.9)
    with pytest.raises(UserError, match=r"last/model\.safetensors is damaged.*start a new run"):
        train(make_config(resume=killed), quiet=True)


@pytest.mark.parametrize("damage", ["missing", "shorter", "zeros"])
def test_metrics_that_a_power_cut_took_are_left_out(killed: Path, damage: str, capsys):
    file = killed / "metrics.csv"
    held = file.read_bytes()
    before = numbers(killed)
    file.unlink()
    if damage == "shorter":
        file.write_bytes(held[: len(held) // 2])
    elif damage == "zeros":
        file.write_bytes(held[: len(held) // 2] + bytes(len(held) - len(held) // 2))
    train(make_config(resume=killed), quiet=True)
    assert "metrics.csv has lost rows" in capsys.readouterr().err
    after = numbers(killed)
    assert after[0] == "step"
    kept = 0 if damage == "missing" else held[: len(held) // 2].count(b"\n") - 1
    # The row that the next step wrote, and that of the last epoch, come after what was kept.
    assert after[1:] == [*before[1 : kept + 1], "15"]


def test_values_that_are_not_finite_are_refused(killed: Path):
    weights = read_weights(killed)
    name = next(iter(weights))
    weights[name].flatten()[0] = torch.nan
    save_weights(killed / "model.safetensors", weights)
    with pytest.raises(UserError, match=rf"values in {name} that are NaN or infinite"):
        evaluate(killed, device="cpu")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("std", [0.0]),
        ("std", [-1.0]),
        ("mean", [float("nan")]),
        ("std", ["a"]),
        ("mean", None),
        ("mean", 5),
        ("img_size", 5),
        ("counts", 5),
        ("counts", {"train": {"0": [1]}}),
        ("metrics", [1]),
    ],
)
def test_a_description_of_other_types_is_refused(killed: Path, key: str, value: object):
    description = json.loads((killed / "data.json").read_text())
    (killed / "data.json").write_text(json.dumps({**description, key: value}))
    with pytest.raises(UserError, match=r"data\.json is damaged"):
        evaluate(killed, device="cpu")


def test_weights_of_others_need_no_checksum(tmp_path: Path):
    safetensors.torch.save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    assert read_weights(tmp_path)["weight"].tolist() == [1, 1]


WRITER = """
import sys
from pathlib import Path
from tokenmix.files import one_writer
with one_writer(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_writer_is_told_who_the_first_is(killed: Path, tmp_path: Path):
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(killed)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=rf"is being written by process {other.pid} on .* since 20"):
            train(make_config(resume=killed), quiet=True)
        # A process that is killed leaves no lock after.
        other.kill()
    with one_writer(killed):
        pass
    train(make_config(resume=killed), quiet=True)
    assert (killed / "result.json").exists()


@pytest.mark.parametrize("name", [".writer", ".lock", "metrics.csv", "tensorboard"])
def test_a_link_in_a_run_folder_is_not_written_through(killed: Path, tmp_path: Path, name: str):
    (tmp_path / "letters").write_text("kept")
    (killed / name).unlink(missing_ok=True)
    (killed / name).symlink_to(tmp_path / "letters")
    with pytest.raises(UserError, match=rf"{name} is a link to .*letters"):
        train(make_config(resume=killed), quiet=True)
    assert (tmp_path / "letters").read_text() == "kept"


def test_two_starts_in_one_folder(tmp_path: Path):
    run = tmp_path / "run"
    run.mkdir()
    with one_writer(run), pytest.raises(UserError, match="is being written by process"):
        train(CONFIG.replace(out=run), quiet=True)
    train(CONFIG.replace(out=run, max_steps=1), quiet=True)
    with pytest.raises(UserError, match="exists already"):
        train(CONFIG.replace(out=run), quiet=True)


def test_a_folder_renamed_in_mid_run_stops_the_run_and_nothing_is_made_in_its_place(tmp_path, monkeypatch):
    original, calls = trainer.TrainingLoop.start_batch, [0]

    def renaming(self, *args, **kwargs):
        calls[0] += 1
        if calls[0] == 7:
            (tmp_path / "run").rename(tmp_path / "other")
        return original(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(trainer.TrainingLoop, "start_batch", renaming)
        with pytest.raises(UserError, match="run was removed or renamed during the run"):
            train(CONFIG.replace(out=tmp_path / "run"), quiet=True)
    assert not (tmp_path / "run").exists()
    assert train(make_config(resume=tmp_path / "other"), quiet=True) == tmp_path / "other"
    assert len(numbers(tmp_path / "other")) == len(set(numbers(tmp_path / "other")))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_process_of_two_is_one_line_each_and_the_others_end(tmp_path, rank):
    command = [
        *(sys.executable, "-m", "tokenmix", "train", "image-classification", "--data", "digits", "--device", "cpu"),
        *("--model", "vit_nano", "--devices", "2", "--epochs", "5000", "--out", str(tmp_path / "run")),
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as whole:
        assert whole.stderr is not None
        lines = [whole.stderr.readline()]
        children = Path(f"/proc/{whole.pid}/task/{whole.pid}/children").read_text().split()
        os.kill(int(children[rank]), signal.SIGKILL)
        lines += whole.stderr.readlines()
    ours = [line for line in lines if not line.startswith(("epoch ", "tokenmix: images of "))]
    assert whole.returncode == 128 + signal.SIGKILL
    assert ours[0].startswith(f"tokenmix: process {rank} of 2 was ended by SIGKILL")
    assert all(line.startswith("tokenmix: the connection to another process") for line in ours[1:])
    assert len(ours) == (1 if rank == 0 else 2)


@pytest.mark.parametrize("part", ["tensorboard", "metrics.csv"])
def test_a_part_removed_in_mid_run_stops_the_run(tmp_path: Path, part: str, monkeypatch: pytest.MonkeyPatch):
    original = trainer.TrainingLoop.start_batch

    def removing(self):
        if self.progress.step == 3:
            (self.folder.path / part).rename(tmp_path / "removed")
        return original(self)

    monkeypatch.setattr(trainer.TrainingLoop, "start_batch", removing)
    run = tmp_path / "run"
    with pytest.raises(UserError, match=rf"{part} was removed .* continue with: tokenmix train --resume"):
        train(CONFIG.replace(out=run, logger="tensorboard"), quiet=True)
    monkeypatch.undo()
    train(make_config(resume=run), quiet=True)
    assert (run / "result.json").exists()


@pytest.mark.slow
def test_a_killed_loader_process_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    original = trainer.TrainingLoop.start_batch

    def killing(self):
        if self.progress.step == 3:
            worker = multiprocessing.active_children()[0]
            os.kill(worker.pid, signal.SIGKILL)
            worker.join()
        return original(self)

    monkeypatch.setattr(trainer.TrainingLoop, "start_batch", killing)
    with pytest.raises(UserError, match=r"a loader process has ended .*; lower --workers .* is kept"):
        # Batches enough that the loader that ends still owes one.
        train(CONFIG.replace(out=tmp_path / "run", workers=2, batch_size=8), quiet=True)
