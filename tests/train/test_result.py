"""What `tokenmix.train` and `tokenmix.inspect` return in Python."""

import csv
import inspect
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import get_type_hints

import pytest
from matplotlib.figure import Figure
from PIL import Image
from torch import nn

import tokenmix
from tokenmix.lab.registry import TASKS
from tokenmix.lab.train import make_config
from tokenmix.lab.train.config import TaskConfig, TrainConfig, comparison_config, default_config
from tokenmix.lab.train.options import CompareOptions, TrainOptions
from tokenmix.lab.train.result import RunResult
from tokenmix.lab.train.schema import Section


def hints_of(config: TaskConfig) -> dict[str, object]:
    parts = [part for part in vars(config).values() if isinstance(part, Section)]
    hints = [get_type_hints(type(part)) for part in (config, *parts)]
    return {name: hint for one in hints for name, hint in one.items() if name in config.flat()}


SETTINGS = {"model": "vit_nano", "data": "digits", "max_steps": 40, "limit_eval": 100, "batch_size": 64}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return tokenmix.train(**SETTINGS, out=tmp_path_factory.mktemp("runs") / "one", log_every=5, quiet=True)


def test_the_numbers_are_those_of_the_folder(run: RunResult):
    told = json.loads((run.path / "result.json").read_text())
    assert run.metrics == told["metrics"]
    assert run.best == told["metrics"]["accuracy"]
    assert f"{run.best:.4f}" in str(run)
    with open(run.path / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    history = run.history()
    assert [row["step"] for row in history] == [float(row["step"]) for row in rows]
    assert {row["val_accuracy"] is None for row in history} == {True, False}
    pandas = pytest.importorskip("pandas")
    assert isinstance(run.to_pandas(), pandas.DataFrame)
    assert len(run.to_pandas()) == len(rows)


def test_figure_notebook_and_model(run: RunResult):
    figure = run.plot()
    assert isinstance(figure, Figure)
    assert [axes.get_ylabel() for axes in figure.axes] == ["training loss", "validation accuracy"]
    assert "<td>accuracy</td>" in run._repr_html_()
    assert not run.model.training


def test_options_replace_those_of_a_config(tmp_path: Path):
    config = make_config(**{**SETTINGS, "max_steps": 2})
    run = tokenmix.train(config=config, out=tmp_path / "other", validation=0, seed=3, quiet=True)
    saved = json.loads((run.path / "config.json").read_text())["config"]
    assert (saved["loop"]["seed"], saved["loop"]["max_steps"]) == (3, 2)
    # Without validation samples there is one panel.
    assert len(run.plot().axes) == 1
    with pytest.raises(tokenmix.UserError, match="is finished"):
        tokenmix.train(resume=run.path, quiet=True)


@pytest.mark.parametrize(
    ("function", "options", "of_task"),
    [(tokenmix.train, TrainOptions, default_config), (tokenmix.compare, CompareOptions, comparison_config)],
)
def test_editors_complete_all_options(
    function: Callable[..., object], options: type, of_task: Callable[[str], TaskConfig]
):
    ours = [task.name for task in TASKS if task.task.startswith("tokenmix.")]
    known: dict[str, list[object]] = {"task": [str]}
    for name, hint in (item for task in ours for item in hints_of(of_task(task)).items()):
        known.setdefault(name, []).append(hint)
    known["img_size"] += known.pop("img_sizes", [])
    arguments, hints = inspect.signature(function).parameters, get_type_hints(options)
    assert not hints.keys() & arguments.keys()
    assert {*arguments, *hints} - {"quiet", "options", "config"} == known.keys() - {"config"}
    for name, hint in hints.items():
        several = "Sequence" in str(hint) and "tuple" in str(known[name])
        assert several or hint in known[name] or (hint, known[name][0]) == (str | Path | None, Path | None), name


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tokenmix.train("digits"), r"unknown task 'digits'; .*; or give it by name: train\(data='digits'\)"),
        (lambda: tokenmix.compare("mine.toml"), r"unknown task 'mine.toml'; .* compare\(config='mine.toml'\)"),
        (lambda: tokenmix.train(TrainConfig()), r"takes a task by name.*got TrainConfig\(.{,40}; for example"),
        (lambda: tokenmix.compare(5, config="compare_swap"), r"takes a task by name.*got 5; for example"),
        (lambda: tokenmix.train(dta="digits"), r"did you mean data"),
        (lambda: tokenmix.train(model=nn.Linear(1, 1)), r"model takes a name, got a Linear.*module:factory"),
        (lambda: tokenmix.inspect(nn.Linear(1, 1)), r"got a Linear; .*attention_maps"),
        (lambda: tokenmix.optimize(None, None), r"got NoneType"),
    ],
)
def test_a_mistake_is_one_line(call, message: str):
    with pytest.raises(tokenmix.UserError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("values", [{"metrics": [1]}, {"monitor": 5}, {"metrics": {"accuracy": "x"}}, {"seconds": "x"}])
def test_a_result_of_other_types_is_damaged(run: RunResult, tmp_path: Path, values: dict[str, object]):
    shutil.copytree(run.path, tmp_path / "run")
    file = tmp_path / "run" / "result.json"
    whole = json.loads(file.read_text())
    file.write_text(json.dumps({**whole, **values}))
    with pytest.raises(tokenmix.UserError):
        str(RunResult(file.parent))
    file.write_text(json.dumps({**whole, "metrics": {"accuracy": None}}))
    assert "test accuracy nan" in str(RunResult(file.parent))
    (file.parent / "metrics.csv").write_text("step,loss\n1,x\n")
    with pytest.raises(tokenmix.UserError, match=r"metrics\.csv is damaged \(.*could not convert"):
        RunResult(file.parent).history()


def test_inspect_returns_maps_numbers_and_figures(run: RunResult, tmp_path: Path):
    file = tmp_path / "a.png"
    Image.linear_gradient("L").resize((40, 30)).save(file)
    found = tokenmix.inspect(run.path, file)
    assert len(found.maps) == len(found.blocks) == 4
    assert [*found.figures] == ["block-00", "block-01", "block-02", "block-03", "depth"]
    assert found.plot() is found.figures["depth"]
    with pytest.raises(tokenmix.UserError, match="did you mean block-00"):
        found.plot("block00")
    assert "<td>blocks.0.mixer</td>" in found._repr_html_()
    assert found.answer is not None
    assert not list(tmp_path.glob("*/"))
    assert found.path is None
    assert len(repr(found)) < 300, "without maps"
    assert found.best is not None
    assert found.best["entropy"] == min(block["entropy"] for block in found.blocks)
    saved = tokenmix.inspect(run.path, file, out=tmp_path / "out").path
    assert saved is not None
    written = json.loads((saved / "numbers.json").read_text())
    assert [block["entropy"] for block in written["blocks"]] == [block["entropy"] for block in found.blocks]
    pytest.importorskip("pandas")
    assert found.to_pandas()["entropy"].between(0, 1).all()
