"""The int8 copy of a run's model by the command."""

import json
from pathlib import Path

import pytest

from tokenmix.lab.cli import main
from tokenmix.lab.train.run import evaluate, train
from tokenmix.lab.train.sources import make_config


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a minute's work on the embedded digits, cut short."""
    out = tmp_path_factory.mktemp("runs") / "digits"
    config = make_config(task="image-classification", model="gmlp_nano", data="digits", out=out, epochs=1, limit=640)
    return train(config, quiet=True)


def test_eval_in_int8_is_near_that_in_float32(run: Path) -> None:
    plain, eight = evaluate(run, device="cpu"), evaluate(run, optimized="int8")
    assert eight["optimize"] == "int8"
    assert eight["samples"] == plain["samples"]
    assert eight["loss"] == pytest.approx(plain["loss"], abs=0.02)
    assert eight["loss"] != plain["loss"], "the float32 model was evaluated"


def test_the_command_says_which_weights(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(run), "--optimize", "int8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["optimize"] == "int8"
