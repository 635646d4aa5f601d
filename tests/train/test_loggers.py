"""Trackers get what metrics.csv gets, offline; a resumed run goes on in them."""

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from runs import DIGITS, stopped_at
from tokenmix.errors import UserError
from tokenmix.lab.cli import main
from tokenmix.lab.train.run import train
from tokenmix.lab.train.sources import make_config

SHORT: dict[str, Any] = {
    **DIGITS,
    "epochs": 2,
    "batch_size": 16,
    "limit": 64,
    "limit_eval": 16,
    "log_every": 1,
    "checkpoint_every": 1,
    "validation": 16,
}


def rows(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def stopped_and_resumed(run: Path, logger: Any) -> None:
    """A run that stops before its fourth batch, and is resumed."""
    with stopped_at(4, error=UserError("stopped")), pytest.raises(UserError, match="stopped"):
        train(make_config(**SHORT, logger=logger, out=run), quiet=True)
    note = run / "logger.json"
    first = note.read_text() if note.exists() else None
    train(make_config(resume=run), quiet=True)
    assert (note.read_text() if note.exists() else None) == first


def test_tensorboard_has_the_rows_of_metrics_csv(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = tmp_path / "run"
    stopped_and_resumed(run, "tensorboard")
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    losses = {one.step: one.value for one in events.Scalars("train/loss")}
    assert losses == pytest.approx({int(row["step"]): float(row["train_loss"]) for row in rows(run)})
    evaluated = [one.value for one in events.Scalars("val/accuracy")]
    assert evaluated == pytest.approx([float(row["val_accuracy"]) for row in rows(run) if row["val_accuracy"]])


def test_mlflow_has_the_rows_of_metrics_csv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    store = f"file:{tmp_path / 'mlruns'}"
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    run = tmp_path / "run"
    stopped_and_resumed(run, "mlflow")
    client = mlflow.tracking.MlflowClient(store)
    found = client.get_run(json.loads((run / "logger.json").read_text())["id"])
    assert found.info.status == "FINISHED"
    assert found.info.run_name == "run"
    assert found.data.params["model_kwargs"] == "{'depth': 1}"
    losses = {one.step: one.value for one in client.get_metric_history(found.info.run_id, "train/loss")}
    assert losses == {int(row["step"]): float(row["train_loss"]) for row in rows(run)}
    evaluated = [one.value for one in client.get_metric_history(found.info.run_id, "val/accuracy")]
    assert evaluated == [float(row["val_accuracy"]) for row in rows(run) if row["val_accuracy"]]


@pytest.mark.slow
def test_wandb_has_the_rows_of_metrics_csv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    logged: list[dict[str, Any]] = []
    log = wandb.Run.log

    def noted(self: Any, data: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        logged.append(data)
        log(self, data, *args, **kwargs)

    monkeypatch.setattr(wandb.Run, "log", noted)
    run = tmp_path / "run"
    stopped_and_resumed(run, "wandb")
    losses = {row["step"]: row["train/loss"] for row in logged}
    assert losses == {int(row["step"]): float(row["train_loss"]) for row in rows(run)}
    name = json.loads((run / "logger.json").read_text())["id"]
    kept = sorted((tmp_path / "wandb").glob(f"offline-run-*-{name}/run-{name}.wandb"))
    assert kept, "what `wandb sync` sends later"
    assert wandb.run is None


def test_a_tracker_that_is_missing_or_cannot_start_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "train",
        "image-classification",
        "--data",
        "digits",
        "--max-steps",
        "1",
        "--limit",
        "200",
        "--device",
        "cpu",
        "--out",
        str(tmp_path / "run"),
        "--logger",
    ]
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "wandb", None)
        assert main([*words, "wandb"]) == 2
    assert capsys.readouterr().err == "tokenmix: --logger wandb needs wandb: pip install 'tokenmix[wandb]'\n"
    assert not (tmp_path / "run").exists()
    assert main([*words, "neptune"]) == 2
    assert "--logger" in capsys.readouterr().err
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nowhere://at.all")
    assert main([*words, "mlflow"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "--logger mlflow cannot start" in error
    assert "set MLFLOW_TRACKING_URI to a server" in error
    assert not (tmp_path / "run").exists(), "the corrected command starts"
