"""The best epoch is chosen on validation samples, and the test samples are read once, at the end."""

import csv
import json
from math import nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runs import DIGITS
from tokenmix.files import to_json
from tokenmix.lab.cli import main
from tokenmix.lab.registry import get_task
from tokenmix.lab.tasks.classification.task import ImageClassification
from tokenmix.lab.train.config import TrainConfig
from tokenmix.lab.train.record import Recorder, _as_good
from tokenmix.lab.train.run import evaluate, train
from tokenmix.lab.train.sources import make_config
from tokenmix.lab.train.task import IndexedData
from tokenmix.lab.train.trainer import TrainingLoop

CONFIG = make_config(
    **DIGITS,
    epochs=3,
    batch_size=64,
    limit=200,
    validation=60,
    limit_eval=100,
    log_every=10,
)


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


@pytest.mark.parametrize(
    ("scores", "best"),
    [([nan, 0.5, 0.4], 2), ([0.5, nan, nan], 1), ([nan, nan, 0.1], 3), ([nan, nan, nan], 3), ([0.5, nan, 0.5], 3)],
)
@pytest.mark.parametrize("through_json", [False, True])
def test_an_epoch_without_a_score_never_stays_the_best(scores: list[float], best: int, through_json: bool) -> None:
    """A checkpoint in JSON has None where the score was NaN."""
    task, kept = SimpleNamespace(monitor="accuracy", mode="max"), None
    for epoch, score in enumerate(scores, 1):
        results = {"accuracy": score}
        if kept is None or _as_good(task, results, kept[1]):  # type: ignore[arg-type]
            kept = epoch, json.loads(to_json(results)) if through_json else results
    assert kept is not None
    assert kept[0] == best


def test_a_score_that_is_not_defined_is_null_in_every_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    end = ImageClassification.on_validation_epoch_end

    def undefined(self: ImageClassification) -> None:
        end(self)
        self.results["accuracy"] = nan

    monkeypatch.setattr(ImageClassification, "on_validation_epoch_end", undefined)
    run = train(config(tmp_path / "run", epochs=2), quiet=True)
    files = list(run.rglob("*.json"))
    assert len(files) >= 5
    for file in files:
        json.loads(file.read_text(), parse_constant=lambda word, file=file: pytest.fail(f"{file} has {word}"))
    assert result(run)["metrics"]["accuracy"] is None
    assert result(run)["best_epoch"] == 2
    assert main(["eval", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["accuracy"] is None
