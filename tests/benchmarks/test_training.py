"""benchmarks/training.py: mistakes are told before anything is measured."""

from pathlib import Path

import pytest
import training


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--models", "mixer_nanno"], "did you mean mixer_nano"),
        (["--steps", "20"], "--steps must be at least 40, got 20"),
        (["--rounds", "0"], "--rounds must be at least 1"),
        (["--threads", "0"], "--threads must be at least 1"),
        (["--batch-size", "-3"], "--batch-size must be at least 1, got -3"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(training, "_measure", lambda *_: pytest.fail("measured before the mistake was told"))
    assert training.main(arguments) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_folder_that_cannot_be_is_told_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(training, "_measure", lambda *_: pytest.fail("measured before the mistake was told"))
    (tmp_path / "file").touch()
    assert training.main(["--out", str(tmp_path / "file" / "out.json")]) == 2
    assert "cannot make the folder" in capsys.readouterr().err


@pytest.mark.parametrize(("raised", "code"), [(KeyboardInterrupt(), 130), (OSError(28, "No space left on device"), 2)])
def test_an_end_before_the_end_is_one_line(
    raised: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: object) -> None:
        raise raised

    monkeypatch.setattr(training, "_measure", stop)
    assert training.main([]) == code
    assert capsys.readouterr().err.count("\n") == 1
