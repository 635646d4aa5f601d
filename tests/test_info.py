"""`tokenmix info`: sizes that are asked for, warnings, and the published figures beside those of the preset."""

import json
from typing import Any

import pytest

from tokenmix.cli import main


def told(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    assert main(["info", *args, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_published_figures_stand_beside_those_of_the_preset_whatever_size_is_asked_for(capsys):
    here = told(capsys, "gmlp_tiny", "--img-size", "64")
    assert here["image"] == [64, 64]
    assert here["preset"]["image"] == [224, 224]
    assert here["preset"]["parameters"] == pytest.approx(5.867e6, rel=0.002)
    assert here["preset"]["macs"] == pytest.approx(1.33e9, rel=0.01)
    assert here["macs"] < here["preset"]["macs"] / 8
    assert main(["info", "gmlp_tiny", "--img-size", "64"]) == 0
    assert "multiply-adds 1.4 G at 224 px published, 1.33 G here" in capsys.readouterr().out


@pytest.mark.parametrize("size", ["32x48", "32,48"])
def test_an_image_need_not_be_square(size, capsys):
    summary = told(capsys, "gmlp_nano", "--img-size", size)
    assert (summary["image"], summary["tokens"]) == ([32, 48], 8 * 12)


@pytest.mark.parametrize("size", ["large", "32x48x3", "-32", ""])
def test_a_size_that_is_none_is_one_line(size, capsys):
    assert main(["info", "gmlp_nano", f"--img-size={size}"]) == 2
    error = capsys.readouterr().err
    assert "height x width as in 224x160" in error
    assert len(error.splitlines()) == 1


def test_less_attention_that_does_not_pay_is_told_in_every_skeleton(capsys):
    (line,) = told(capsys, "mixer_nano", "--model-kwargs", "mixer=less")["warnings"]
    assert "do not pay at 64 tokens" in line
    few = told(capsys, "mixer_nano", "--model-kwargs", "mixer=less", "patch_size=8")
    assert (few["tokens"], few["warnings"]) == (16, [])
    assert told(capsys, "mixer_nano")["warnings"] == []
    (stage,) = told(capsys, "lavit_tiny", "--img-size", "256")["warnings"]
    assert "stage 3" in stage


def test_a_warning_is_one_line_in_a_narrow_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["info", "mixer_nano", "--model-kwargs", "mixer=less"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning:")]
    assert line.endswith("wider model")
