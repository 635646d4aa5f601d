"""A run that is asked for again is left, continues or starts anew, whichever its folder needs."""

import json
import shutil

import pytest
import safetensors.torch
import torch

from runs import DIGITS, Killed, stopped_at
from tokenmix.errors import UserError
from tokenmix.lab.cli import main
from tokenmix.lab.train.plan import fit_to_ranks
from tokenmix.lab.train.run import finish_run
from tokenmix.lab.train.sources import make_config
from verbs import refused

CONFIG = make_config(
    **DIGITS,
    epochs=2,
    batch_size=8,
    limit=24,
    limit_eval=10,
    checkpoint_every=2,
)


def test_a_run_comes_to_its_end_whatever_is_there(tmp_path):
    whole = finish_run(CONFIG.replace(out=tmp_path / "whole"), quiet=True)
    written = (whole / "result.json").stat().st_mtime_ns
    assert finish_run(CONFIG.replace(out=whole, log_every=7), quiet=True) == whole
    assert (whole / "result.json").stat().st_mtime_ns == written
    for batch, goes_on in ((2, False), (4, True)):  # before the first checkpoint, after that of step 2
        config = CONFIG.replace(out=tmp_path / f"stopped-{batch}")
        with stopped_at(batch), pytest.raises(Killed):
            finish_run(config, quiet=True)
        assert (tmp_path / f"stopped-{batch}" / "checkpoints" / "last").exists() == goes_on
        run = finish_run(config, quiet=True)
        one, two = (safetensors.torch.load_file(folder / "model.safetensors") for folder in (whole, run))
        assert all(torch.equal(one[key], two[key]) for key in one)


def test_a_folder_of_another_run_is_refused(tmp_path):
    config = CONFIG.replace(max_steps=1, out=tmp_path / "run")
    run = finish_run(config, quiet=True)
    # Without a number of epochs the run's own holds.
    assert finish_run(config.replace(epochs=None), quiet=True) == run
    with pytest.raises(UserError, match=r"run holds a run with max_steps=1 instead of None; remove it, or give"):
        finish_run(config.replace(max_steps=None), quiet=True)
    shutil.move(run / "config.json", tmp_path)
    with pytest.raises(UserError, match="exists already"):
        finish_run(config, quiet=True)
    assert json.loads((run / "result.json").read_text())["steps"] == 1


def test_the_command_continues_by_itself_where_torchrun_restarts(tmp_path, monkeypatch, capsys):
    words = [
        "train",
        "--data",
        "digits",
        "--model-kwargs",
        "depth=1",
        "--epochs",
        "2",
        "--batch-size",
        "8",
        "--limit",
        "24",
    ]
    words += ["--limit-eval", "10", "--threads", "1", "--device", "cpu", "--checkpoint-every", "2"]
    run = tmp_path / "run"
    with stopped_at(4), pytest.raises(Killed):
        finish_run(CONFIG.replace(out=run), quiet=True)
    assert "exists already" in refused(capsys, *words, "--out", str(run))
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    assert main([*words, "--out", str(run)]) == 0
    assert f"{run} continues from step 3 of 6, 1 x 8 images a step" in capsys.readouterr().err
    written = (run / "result.json").stat().st_mtime_ns
    assert main([*words, "--out", str(run)]) == 0
    assert (run / "result.json").stat().st_mtime_ns == written
    assert "holds a run with lr=0.002 instead of 0.1" in refused(capsys, *words, "--out", str(run), "--lr", "0.1")


@pytest.mark.parametrize(("processes", "batch"), [(2, 9), (3, 6), (6, 3), (4, None)])
def test_a_step_takes_as_many_samples_whatever_the_processes(monkeypatch, processes: int, batch: int | None):
    config = CONFIG.replace(batch_size=6, devices=1, num_nodes=3)
    assert fit_to_ranks(config) == config  # Without torchrun.
    for name, value in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", processes), ("LOCAL_WORLD_SIZE", 1)):
        monkeypatch.setenv(name, str(value))
    if batch is None:
        with pytest.raises(
            UserError, match=r"takes 18 samples a step \(3 processes of 6\), which 4 processes cannot share"
        ):
            fit_to_ranks(config)
    else:
        assert fit_to_ranks(config) == config.replace(batch_size=batch, num_nodes=processes)
        # Where the samples do not fill a batch, a step has fewer.
        assert fit_to_ranks(config, 12) == config.replace(batch_size=12 // processes, num_nodes=processes)


def test_it_needs_a_folder():
    with pytest.raises(UserError, match="needs a folder"):
        finish_run(CONFIG)
