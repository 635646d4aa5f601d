"""benchmarks/training.py: mistakes are reported before anything is measured."""

import json
from pathlib import Path

import numpy as np
import pytest
import training

from suite import command


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--models", "mixer_nanno"], "did you mean mixer_nano"),
        (["--augment", "none", "lihgt"], "unknown augmentation 'lihgt'"),
        (["--data", "nope"], "unknown data set 'nope'"),
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--processes", "1", "0"], "--processes must be at least 1, got 0"),
        (["--rounds", "0"], "--rounds must be at least 1"),
        (["--threads", "0"], "--threads must be at least 1"),
        (["--batch-size", "-3"], "--batch-size must be at least 1, got -3"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(training, "_measure", lambda *_: pytest.fail("measured before the mistake was reported"))
    assert training.main(arguments) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_folder_that_cannot_be_is_told_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(training, "_measure", lambda *_: pytest.fail("measured before the mistake was reported"))
    (tmp_path / "file").touch()
    assert training.main(["--out", str(tmp_path / "file" / "out.json")]) == 2
    assert "cannot make the folder" in capsys.readouterr().err


def test_ctrl_c_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "_check", lambda _: None)
    monkeypatch.setattr(training, "_measure", stop)
    assert training.main([]) == 130
    assert capsys.readouterr().err.count("\n") == 1


def test_a_full_disk_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(training, "_check", lambda _: None)
    both = training.Comparison.of([1.0], [1.0])
    monkeypatch.setattr(training, "_measure", lambda *_: training.Row("a", "none", 1, both, both))
    monkeypatch.setattr(command, "replace_file", refuse)
    assert training.main(["--out", str(tmp_path / "out.json")]) == 2
    assert "(No space left on device): free space on the disk" in capsys.readouterr().err


def test_the_median_ratio_and_its_spread() -> None:
    noise = np.random.default_rng(0).normal(size=(2, 400))
    found = training.Comparison.of((1 + 0.01 * noise[0]).tolist(), (1.25 + 0.01 * noise[1]).tolist())
    assert found.ratio == pytest.approx(0.8, abs=0.005)
    assert found.low < found.ratio < found.high
    assert found.high - found.low < 0.01
    # A slow pair of turns in fifty moves neither.
    slowed = training.Comparison.of([*found.bare, *[9.0] * 8], [*found.trainer, *[9.0] * 8])
    assert slowed.ratio == pytest.approx(found.ratio, rel=0.002)


@pytest.mark.slow
def test_both_take_their_turns_in_one_run(tmp_path: Path) -> None:
    small = ["--models", "mixer_nano", "--augment", "none", "--data", "digits", "--batch-size", "8"]
    assert training.main([*small, "--steps", "2", "--rounds", "3", "--out", str(tmp_path / "out.json")]) == 0
    (row,) = json.loads((tmp_path / "out.json").read_text())["rows"]
    for part in (row["wall"], row["cpu"]):
        assert (len(part["bare"]), len(part["trainer"])) == (3, 3)
        assert min(part["bare"] + part["trainer"]) > 0
        assert part["low"] <= part["ratio"] <= part["high"]
