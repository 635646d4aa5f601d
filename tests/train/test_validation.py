"""The best epoch is chosen on validation samples, and the test samples are read once, at the end."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from tokenmix.registry import get_task
from tokenmix.train.config import TrainConfig
from tokenmix.train.record import Recorder
from tokenmix.train.run import evaluate, train
from tokenmix.train.sources import make_config
from tokenmix.train.task_data import IndexedData
from tokenmix.train.trainer import TrainingLoop

CONFIG = make_config(
    data="digits", model="vit_nano", model_kwargs={"depth": 1}, epochs=3, batch_size=64, limit=200, validation=60,
    limit_eval=100, threads=1, device="cpu", log_every=10,
)  # fmt: skip


def config(out: Path, **changes: Any) -> TrainConfig:
    return CONFIG.replace(out=out, **changes)


def result(run: Path) -> dict[str, Any]:
    return json.loads((run / "result.json").read_text())


def validations(run: Path) -> list[float]:
    with (run / "metrics.csv").open(newline="") as file:
        return [float(row["val_accuracy"]) for row in csv.DictReader(file) if row.get("val_accuracy")]


@pytest.fixture
def read_at(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Which held-out samples were read, and after how many epochs."""
    calls, epochs = [], [0]
    end = TrainingLoop.end_epoch

    def counted(self: TrainingLoop) -> None:
        end(self)
        epochs[0] += 1

    monkeypatch.setattr(TrainingLoop, "end_epoch", counted)
    for name in ("test_batches", "validation_batches"):
        whole = getattr(IndexedData, name)

        def noted(self: IndexedData, *, batch_size: int, name: str = name, whole: Any = whole) -> Any:
            calls.append((name.removesuffix("_batches"), epochs[0]))
            return whole(self, batch_size=batch_size)

        monkeypatch.setattr(IndexedData, name, noted)
    return calls


def test_the_test_samples_are_read_when_all_is_chosen(tmp_path: Path, read_at: list[tuple[str, int]]) -> None:
    found = result(train(config(tmp_path / "run"), quiet=True))
    assert read_at[:3] == [("validation", 0), ("validation", 1), ("validation", 2)]
    assert read_at[3:] == [("test", 3)] * (1 if found["best_epoch"] == 3 else 2)
    assert sum(map(sum, found["validation"]["confusion"])) == 60
    assert sum(map(sum, found["metrics"]["confusion"])) == 100


def test_what_is_kept_is_what_was_tested(tmp_path: Path) -> None:
    run = train(config(tmp_path / "run", lr=5e-2, schedule="constant", warmup_steps=0, epochs=6), quiet=True)
    found, scores = result(run), validations(run)
    assert found["best_epoch"] == len(scores) - scores[::-1].index(max(scores))
    assert found["validation"]["accuracy"] == pytest.approx(max(scores))
    assert found["validation_final"]["accuracy"] == pytest.approx(scores[-1])
    tested = evaluate(run, device="cpu")
    assert tested["samples"] == 100
    assert tested["accuracy"] == pytest.approx(found["metrics"]["accuracy"])


def test_with_nothing_held_out_the_last_epoch_is_kept(tmp_path: Path, read_at: list[tuple[str, int]]) -> None:
    run = train(config(tmp_path / "run", validation=0), quiet=True)
    found = result(run)
    assert found["best_epoch"] == 3
    assert found["metrics"] == found["final"]
    assert found["validation"] == {}
    assert read_at == [("test", 3)]
    assert validations(run) == []
    assert get_task(CONFIG.task).load_data(config(run, validation=0)).describe()["validation"] == 0


def test_a_test_that_was_cut_off_is_repeated_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = result(train(config(tmp_path / "whole"), quiet=True))
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "record_test", lambda self: (_ for _ in ()).throw(KeyError("killed")))
        with pytest.raises(KeyError):
            train(config(run), quiet=True)
    assert not (run / "result.json").exists()
    steps: list[int] = []
    monkeypatch.setattr(TrainingLoop, "advance", lambda self: steps.append(1))
    again = result(train(make_config(resume=run), quiet=True))
    assert steps == []
    for name in ("metrics", "final", "validation", "best_epoch"):
        assert again[name] == whole[name], name
