"""A run knows its own files: weights, checkpoints and results of another run, or of another type, are refused."""

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from runs import DIGITS, Killed, stopped_at
from tokenmix.errors import UserError
from tokenmix.lab.train.checkpoint import read_checkpoint, save_checkpoint, save_weights
from tokenmix.lab.train.export import export_to_hub
from tokenmix.lab.train.folder import RunFolder
from tokenmix.lab.train.run import evaluate, predict, train
from tokenmix.lab.train.sources import make_config

CONFIG = make_config(
    **DIGITS,
    epochs=1,
    batch_size=16,
    limit=48,
    limit_eval=16,
    log_every=1,
    checkpoint_every=1,
    ema=0.9,
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two finished runs that differ in their seed, and one that was stopped after its second step."""
    folder = tmp_path_factory.mktemp("runs")
    train(CONFIG.replace(out=folder / "one"), quiet=True)
    train(CONFIG.replace(out=folder / "two", seed=5), quiet=True)
    with stopped_at(3), pytest.raises(Killed):
        train(CONFIG.replace(out=folder / "cut"), quiet=True)
    return folder


@pytest.fixture
def copied(runs: Path, tmp_path: Path) -> Path:
    return shutil.copytree(runs, tmp_path / "elsewhere")


@pytest.fixture(autouse=True)
def never_blocks() -> Iterator[None]:
    """A reader that waits for a pipe is ended after a minute."""

    def fail(*_: object) -> None:
        raise AssertionError("blocked")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def edit(file: Path, change: Callable[[Any], object]) -> None:
    value = json.loads(file.read_text())
    change(value)
    file.write_text(json.dumps(value))


def changed(run: Path, change: Callable[[Tensor], Tensor], name: str = "model.safetensors", **how: Any) -> None:
    weights = safetensors.torch.load_file(run / name)
    (run / name).unlink()
    safetensors.torch.save_file({key: change(value) for key, value in weights.items()}, run / name, **how)


def test_a_folder_works_wherever_it_is_and_its_name_is_in_no_file(copied: Path) -> None:
    assert evaluate(copied / "one")["samples"] == 16
    train(make_config(resume=(copied / "cut").rename(copied / "moved")), quiet=True)
    assert RunFolder(copied / "moved").result["steps"]
    assert RunFolder(copied / "one").identity["run_id"] != RunFolder(copied / "two").identity["run_id"]


def test_weights_of_another_run_are_refused(copied: Path) -> None:
    shutil.copy(copied / "two" / "model.safetensors", copied / "one")
    for use in (evaluate, lambda run: train(CONFIG.replace(init_from=run, out=copied / "new"), quiet=True)):
        with pytest.raises(UserError, match=r"model\.safetensors was not written by the run .*--init-from FILE"):
            use(copied / "one")
    # A file by itself is what the user says that it is.
    train(CONFIG.replace(init_from=copied / "one" / "model.safetensors", out=copied / "new"), quiet=True)


def test_weights_without_an_origin_are_refused_in_a_run_folder(copied: Path) -> None:
    changed(copied / "one", lambda value: value)
    with pytest.raises(UserError, match="was not written by the run"):
        evaluate(copied / "one")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_another_type_are_refused(copied: Path, dtype: torch.dtype) -> None:
    weights = safetensors.torch.load_file(copied / "one" / "model.safetensors")
    (copied / "one" / "model.safetensors").unlink()
    save_weights(
        copied / "one" / "model.safetensors",
        {k: v.to(dtype) for k, v in weights.items()},
        RunFolder(copied / "one").identity,
    )
    with pytest.raises(UserError, match=rf"other type: .* {dtype} for torch\.float32"):
        evaluate(copied / "one")


def test_a_run_in_bfloat16_reads_its_own_weights(tmp_path: Path) -> None:
    run = train(CONFIG.replace(out=tmp_path / "run", precision="bf16"), quiet=True)
    weights = safetensors.torch.load_file(run / "model.safetensors")
    assert {value.dtype for value in weights.values()} == {torch.bfloat16}
    assert evaluate(run)["samples"] == 16


def test_a_file_of_another_checkpoint_is_found(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    last = copied / "cut" / "checkpoints" / "last"
    (last / "model.safetensors").unlink()
    shutil.copy(copied / "one" / "checkpoints" / "last" / "model.safetensors", last)
    with pytest.raises(UserError, match="damaged: its values are not those of this checkpoint"):
        read_checkpoint(last)
    shutil.rmtree(last)
    shutil.copytree(copied / "one" / "checkpoints" / "last", last)
    with pytest.raises(UserError, match=r"the checkpoint in .* is of another run"):
        train(make_config(resume=copied / "cut"), quiet=True)


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("optim", "ema", None),
        ("optim", "opt", "sgd"),
        ("optim", "lr", 0.1),
        ("options", "teacher", "ONE"),
        ("loop", "seed", 7),
        ("model", "model_kwargs", {"depth": 1, "mlp_ratio": 4.0}),
    ],
)
def test_an_edited_config_is_refused_at_resume_and_named_otherwise(
    copied: Path, part: str, name: str, value: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    value = str(copied / "one") if value == "ONE" else value
    for run in ("cut", "one"):
        edit(copied / run / "config.json", lambda setup: setup["config"][part].update({name: value}))
    with pytest.raises(UserError, match=r"config\.json is not as it was when the run was started"):
        train(make_config(resume=copied / "cut"), quiet=True)
    assert not (copied / "cut" / "result.json").exists()
    if name in ("lr", "seed"):
        evaluate(copied / "one")
        assert "config.json was edited after model.safetensors was written" in capsys.readouterr().err


def test_a_missing_data_json_is_named(copied: Path) -> None:
    (copied / "cut" / "data.json").unlink()
    with pytest.raises(UserError, match=r"cut has no data\.json; restore it from a copy"):
        train(make_config(resume=copied / "cut"), quiet=True)


def test_a_config_is_checked_before_the_checkpoint_is_read(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit(copied / "cut" / "config.json", lambda setup: setup["config"]["loop"].update(devices=4))
    monkeypatch.setattr("tokenmix.lab.train.run.read_latest_checkpoint", pytest.fail)
    with pytest.raises(UserError, match=r"4 processes are requested and 1 run; start them .* torchrun"):
        train(make_config(resume=copied / "cut"), quiet=True)


def test_where_and_how_fast_may_be_edited(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(copied / "cut" / "config.json", lambda setup: setup["config"]["loop"].update(log_every=5, out="elsewhere"))
    train(make_config(resume=copied / "cut"), quiet=True)
    assert "edited" not in capsys.readouterr().err


@pytest.mark.parametrize(("name", "value"), [("ema", None), ("opt", "sgd")])
def test_a_state_of_other_options_is_one_line(copied: Path, name: str, value: Any) -> None:
    # As in a folder of an earlier version, whose checkpoints do not say which config they are of.
    run = copied / "cut"
    edit(run / "config.json", lambda setup: (setup["config"]["optim"].update({name: value}), setup.pop("run_id")))
    save_checkpoint(run / "checkpoints" / "last", replace(read_checkpoint(run / "checkpoints" / "last"), run={}))
    with pytest.raises(UserError, match=r"of a run with other options than config\.json has"):
        train(make_config(resume=run), quiet=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("std", [1e-300]),
        ("std", [1e300]),
        ("mean", [1e30]),
        ("mean", [float("nan")]),
        ("std", [1e-7]),
        ("crop_pct", "x"),
    ],
)
def test_absurd_statistics_are_refused(copied: Path, name: str, value: object) -> None:
    edit(copied / "one" / "data.json", lambda data: data.update({name: value}))
    with pytest.raises(UserError, match=r"data\.json is damaged"):
        evaluate(copied / "one")


def test_outputs_that_are_not_finite_are_refused(copied: Path) -> None:
    run, file = copied / "one", copied / "one" / "model.safetensors"
    weights = {key: value * 1e30 for key, value in safetensors.torch.load_file(file).items()}
    save_weights(file, weights, RunFolder(run).identity)
    from PIL import Image

    Image.new("L", (8, 8), 128).save(copied / "image.png")
    for use in (evaluate, lambda run: predict(run, [copied / "image.png"])):
        with pytest.raises(UserError, match="gives outputs that are NaN or infinite"):
            use(run)


def test_results_of_another_run_or_without_their_keys_are_refused(copied: Path) -> None:
    shutil.copy(copied / "two" / "result.json", copied / "one")
    with pytest.raises(UserError, match=r"result\.json was not written by this run"):
        export_to_hub(copied / "one")
    for key in ("metrics", "images_per_second", "environment", "seconds"):
        edit(copied / "two" / "result.json", lambda result, key=key: result.pop(key))
        with pytest.raises(UserError, match=r"result\.json (is damaged: it has no|or config\.json .* lacks)"):
            export_to_hub(copied / "two")
    assert not (copied / "two" / "hub").exists()


PARTS = [
    "config.json",
    "data.json",
    "metrics.csv",
    "checkpoints/last/state.pt",
    "checkpoints/last/meta.json",
    "checkpoints/last/model.safetensors",
]


@pytest.mark.parametrize("name", PARTS)
def test_a_pipe_in_a_run_folder_is_refused_at_resume(copied: Path, name: str) -> None:
    file = copied / "cut" / name
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(UserError):
        train(make_config(resume=copied / "cut"), quiet=True)


@pytest.mark.parametrize("name", ["config.json", "data.json", "model.safetensors", "result.json"])
def test_a_pipe_in_a_finished_run_is_refused(copied: Path, name: str) -> None:
    file = copied / "one" / name
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(UserError, match="has not finished" if name == "result.json" else rf"{name} is "):
        export_to_hub(copied / "one")


def test_a_start_in_a_folder_that_is_being_written_says_by_whom(copied: Path) -> None:
    from tokenmix.files import one_writer

    with one_writer(copied / "cut"), pytest.raises(UserError, match=rf"is being written by process {os.getpid()} on"):
        train(CONFIG.replace(out=copied / "cut"), quiet=True)
    with pytest.raises(UserError, match="exists already; continue it with"):
        train(CONFIG.replace(out=copied / "cut"), quiet=True)


def test_a_large_size_in_data_json_is_refused_before_the_model_is_built(copied: Path, monkeypatch: pytest.MonkeyPatch):
    edit(copied / "one" / "data.json", lambda data: data.update(img_size=[16000, 16000]))
    built = []
    tensor = torch.nn.Parameter.__new__
    monkeypatch.setattr(
        torch.nn.Parameter,
        "__new__",
        lambda cls, data=None, *args, **kwargs: (
            built.append(0 if data is None or data.is_meta else data.numel()) or tensor(cls, data, *args, **kwargs)
        ),
    )
    with pytest.raises(UserError, match="is for another model than this"):
        evaluate(copied / "one")
    assert max(built, default=0) < 10_000_000
