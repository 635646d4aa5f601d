"""No picture of the pages is older than what it shows: docs/stamps.py says what it was made from."""

import importlib
import importlib.util
import json
import re
import shlex
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

import tokenmix
from test_docs import misuse, unknown
from tokenmix.profiling.machine import peak_memory

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
# The command itself draws it; the page names the command.
BY_COMMAND = {"cost.svg"}


@pytest.fixture
def program(monkeypatch):
    """A program of docs by its name."""
    monkeypatch.syspath_prepend(DOCS)
    for package in ("matplotlib", "scipy", "lightning"):
        pytest.importorskip(package)
    return importlib.import_module


@pytest.fixture
def stamps() -> dict[str, object]:
    return json.loads((DOCS / "figures.json").read_text())


def tables() -> ModuleType:
    """docs/benchmarks.py, whose name a package of the repository has too."""
    spec = importlib.util.spec_from_file_location("docs_benchmarks", DOCS / "benchmarks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_picture_has_its_program(program, stamps) -> None:
    made = {*program("figures").FIGURES, *program("answers").PICTURES, "probe.png", "benchmarks.png"}
    assert {*stamps} == made
    assert {file.name for file in (DOCS / "images").iterdir()} == made | BY_COMMAND


def test_drawings_have_the_numbers_of_today(program, stamps) -> None:
    figures, numbers = program("figures"), program("stamps").numbers
    for name in figures.FIGURES.keys() - figures.NETWORKS.keys():
        drawn = numbers(figures.FIGURES[name](None))
        shown = stamps[name]
        assert len(drawn) == len(shown), name
        for line, before in zip(drawn, shown, strict=True):
            assert line == pytest.approx(before, rel=0.02, abs=0.01), f"draw again: python docs/figures.py {name}"


def test_maps_are_of_networks_of_today(program, stamps) -> None:
    of_networks = program("trained").of_networks
    for name, networks in program("figures").NETWORKS.items():
        assert stamps[name] == of_networks(networks), f"train and draw again: python docs/figures.py {name}"


def test_predictions_are_of_runs_of_today(program, stamps) -> None:
    answers = program("answers")
    for name, (_, folders) in answers.PICTURES.items():
        assert stamps[name] == answers.of_runs(folders), f"draw again: python docs/answers.py FOLDER {name}"


def test_the_costs_have_the_memory_of_today() -> None:
    """Peak memory as drawn, of four mixers: a doubling has the same length everywhere. Times are the machine's."""
    drawn = re.findall(r'd="(M [^"z]*)"', (DOCS / "images" / "cost.svg").read_text())
    paths = [[float(y) for y in re.findall(r"[\d.]+ ([\d.]+)", path)] for path in drawn]
    heights = np.array([path for path in paths if len(path) == 4][4:])
    doublings = np.empty((4, 2))
    for i, name in enumerate(["self", "external", "multihead-external", "less"]):
        for j, size in enumerate([196, 784]):
            layer = tokenmix.create_mixer(name, 256, num_tokens=size)
            with torch.inference_mode():
                doublings[i, j] = np.log2(peak_memory(partial(layer, torch.randn(1, size, 256))))
    # External attention has memory in proportion to its tokens.
    length = (heights[1, 0] - heights[1, -1]) / np.log2(4096 / 196)
    levels = doublings + heights[:, :2] / length
    assert np.abs(levels - levels.mean()).max() < 0.2, "draw again: docs/guides/cost.md has the command"


def test_the_commands_of_the_runs_exist(program) -> None:
    for command in program("answers").RUNS.values():
        words = tuple(shlex.split(command)[1:])
        assert not misuse(words), command
        assert not unknown(words), command


def test_charts_have_the_committed_results(program, stamps) -> None:
    digest = program("stamps").digest
    assert stamps["benchmarks.png"] == digest(tables().table()), "draw again: python docs/benchmarks.py"
    probe = json.loads((ROOT / "dev" / "probe.json").read_text())
    assert stamps["probe.png"] == digest(probe), "draw again: python docs/probe.py"


def test_a_change_of_the_data_is_seen_and_a_comment_is_not(program, tmp_path, monkeypatch) -> None:
    """The digest of a run is that of its recipe's values."""
    answers = program("answers")
    monkeypatch.setattr(answers, "RECIPES", tmp_path)
    recipe = tmp_path / "compare_climates.toml"
    recipe.write_text("epochs = 5\n")
    before = answers.of_runs(["climates"])
    recipe.write_text("# five are enough\nepochs = 5\n")
    assert answers.of_runs(["climates"]) == before
    recipe.write_text("epochs = 6\n")
    assert answers.of_runs(["climates"]) != before
