"""What is registered outside the package is known to every verb, and asked in its own words."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

import tokenmix
from tokenmix.errors import UserError
from tokenmix.lab.registry import DATA_SETS, TASKS
from tokenmix.layers import create_mixer
from tokenmix.registry import MODELS, load_plugin
from verbs import printed, refused

PLUGINS = Path(__file__).parent / "plugins"
TASK = ["--import", str(PLUGINS / "toy_brightness.py")]
NET = ["--import", str(PLUGINS / "toy_net.py")]
LEVELS = ["--import", str(PLUGINS / "toy_levels.py")]
DIGITS = ["--data", "digits", "--max-steps", "3", "--batch-size", "16", "--limit", "60", "--limit-eval", "20"]

pytestmark = pytest.mark.usefixtures("own_names")


def test_they_are_listed_and_counted(capsys) -> None:
    assert "brightness" not in TASKS
    assert "brightness" in printed(capsys, *TASK, "list", "tasks")
    rows = json.loads(printed(capsys, *TASK, *NET, "list", "models", "--json"))
    assert {"name": "toy_line", "task": "brightness", "about": "a weighted mean"} in rows
    assert "toy_net" in [row["name"] for row in rows]
    assert "toy-roll" in printed(capsys, *NET, "list", "mixers")
    assert json.loads(printed(capsys, *TASK, "info", "toy_line", "--json"))["parameters"] == 9
    net = json.loads(printed(capsys, *NET, "info", "toy_net", "--img-size", "8", "--json"))
    assert net["parameters"] == sum(p.numel() for p in tokenmix.create_model("toy_net", img_size=8).parameters())
    assert "toy_line is a model of brightness, not of detection" in refused(
        capsys, *TASK, "train", "detection", "--model", "toy_line"
    )
    assert "has no argument 'depth'; it takes bias, width" in refused(
        capsys, *TASK, "info", "toy_line", "--model-kwargs", "depth=2"
    )


def test_the_task_answers_for_the_programs(capsys, tmp_path) -> None:
    words = ["brightness", "--model", "toy_line", "--batch-size", "16"]
    assert "no attention" in refused(capsys, *TASK, "compare", *words)
    (tmp_path / "x.png").touch()
    assert "toy_line is of brightness; inspect works" in refused(
        capsys, *TASK, "inspect", "toy_line", str(tmp_path / "x.png"), "--out", str(tmp_path / "maps")
    )
    assert "a model of brightness, whose cost is counted by: tokenmix info toy_line" in refused(
        capsys, *TASK, "cost", "toy_line"
    )


@pytest.mark.slow
def test_a_task_of_ones_own_trains(capsys, tmp_path) -> None:
    run, row = str(tmp_path / "run"), tmp_path / "row.txt"
    row.write_text("0.5 " * 8)
    words = ["--model", "toy_line", "--max-steps", "8", "--batch-size", "16", "--lr", "0.1", "--out", run]
    printed(capsys, *TASK, "train", "brightness", *words)
    assert json.loads(printed(capsys, *TASK, "eval", run, "--json"))["mse"] < 0.5
    (answer,) = json.loads(printed(capsys, *TASK, "predict", run, str(row), "--json"))
    assert isinstance(answer["brightness"], float)
    assert f"{run} is of brightness; inspect works" in refused(capsys, *TASK, "inspect", run, str(row))


def test_a_data_set_of_ones_own_is_listed_and_registered_once(capsys) -> None:
    row = json.loads(printed(capsys, *LEVELS, "list", "data", "--json"))[-1]
    assert row == {
        "name": "toy-levels",
        "kinds": ["images"],
        "about": "20 grey levels",
        "licence": "CC0",
        "origin": "here",
        "cached": True,
    }
    assert printed(capsys, *LEVELS, "data", "get", "toy-levels") == "toy\n"
    with pytest.raises(UserError, match="the data set 'toy-levels' is registered already"):
        DATA_SETS.register(replace(DATA_SETS["toy-levels"], licence="MIT"))


def test_a_data_set_of_ones_own_is_trained_on(capsys, tmp_path) -> None:
    run, picture = tmp_path / "run", tmp_path / "grey.png"
    Image.new("L", (8, 8), 180).save(picture)
    words = [
        "--model",
        "mixer_nano",
        "--data",
        "toy-levels",
        "--max-steps",
        "2",
        "--batch-size",
        "4",
        "--device",
        "cpu",
    ]
    printed(capsys, *LEVELS, "train", "image-classification", *words, "--out", str(run))
    described = json.loads((run / "data.json").read_text())
    assert (described["source"], described["train"], described["classes"]) == ("toy", 12, ["dark", "bright"])
    assert json.loads(printed(capsys, *LEVELS, "eval", str(run), "--json"))["samples"] == 8
    (answer,) = json.loads(printed(capsys, *LEVELS, "predict", str(run), str(picture), "--json"))
    assert answer["label"] in ("dark", "bright")


@pytest.mark.slow
def test_a_classifier_of_ones_own_trains_and_is_looked_into(capsys, tmp_path) -> None:
    run, picture = str(tmp_path / "run"), tmp_path / "grey.png"
    Image.new("L", (8, 8), 90).save(picture)
    printed(capsys, *NET, "train", "image-classification", "--model", "toy_net", *DIGITS, "--out", run)
    assert 0 <= json.loads(printed(capsys, *NET, "eval", run, "--json"))["accuracy"] <= 1
    (answer,) = json.loads(printed(capsys, *NET, "predict", run, str(picture), "--json"))
    assert 0 < answer["probability"] <= 1
    printed(capsys, *NET, "inspect", run, str(picture), "--out", str(tmp_path / "maps"))
    (block,) = json.loads((tmp_path / "maps" / "numbers.json").read_text())["blocks"]
    assert block["kind"] == "tokens"
    (cost, *_) = json.loads(printed(capsys, *NET, "cost", "toy_net", "--img-size", "16", "--json"))["rows"]
    assert cost["name"] == "toy_net"


@pytest.mark.slow
def test_mixers_of_ones_own_are_compared(capsys, tmp_path) -> None:
    out = str(tmp_path / "out")
    words = ["--data", "toy-levels", "--max-steps", "3", "--batch-size", "4", "--out", out]
    printed(capsys, *NET, *LEVELS, "compare", "--mixers", "toy-roll,toy_net:Roll,self", *words)
    results = json.loads((Path(out) / "results.json").read_text())
    assert [variant["name"] for variant in results["variants"]] == ["toy-roll", "toy_net:Roll", "self", "identity"]
    assert all(run["status"] == "finished" for variant in results["variants"] for run in variant["runs"])


def test_a_mixer_goes_by_its_name_or_by_its_class(capsys) -> None:
    load_plugin(str(PLUGINS / "toy_net.py"))
    x = torch.randn(2, 5, 6)
    named, classed = (create_mixer(name, 6) for name in ("toy-roll", "toy_net:Roll"))
    assert torch.equal(named(x), classed(x))
    assert "toy-roll" in tokenmix.list_mixers()
    assert tokenmix.create_model("mixer_nano", mixer="toy_net:Roll").mixer_name == "toy_net:Roll"
    assert json.loads(printed(capsys, "cost", "toy_net:Roll", "--tokens", "4,8", "--dim", "8", "--json"))["rows"]
    for name, words in (
        ("toy_net:Rol", "unknown class in module 'toy_net'"),
        ("no_module:Roll", "cannot import 'no_module'"),
        ("toy_net:Unmixed", "is not a mixer: derive its class from tokenmix.layers.Mixer"),
        ("toy-rol", "did you mean toy-roll"),
    ):
        with pytest.raises(UserError, match=words):
            create_mixer(name, 6)
    with pytest.raises(UserError, match="the mixer 'self' is registered already"):
        tokenmix.register_mixer("self", type(named))
    # A notebook cell that runs again.
    path = {"__module__": "toy_net", "__qualname__": "Roll", "__doc__": "Rolled again."}
    again = type("Roll", (type(named),), path)
    tokenmix.register_mixer("toy-roll", again)
    assert type(create_mixer("toy-roll", 6)) is again
    tokenmix.register_mixer("toy-roll", type(named))


def test_a_plugin_that_cannot_be_imported_is_one_line(capsys, tmp_path) -> None:
    broken = tmp_path / "broken_plugin.py"
    broken.write_text("1 / 0\n")
    assert "ZeroDivisionError" in refused(capsys, "--import", str(broken), "list", "tasks")
    assert "no file" in refused(capsys, "--import", str(tmp_path / "gone.py"), "list", "tasks")
    assert "no_such_plugin cannot be imported" in refused(capsys, "--import=no_such_plugin", "list", "tasks")
    assert "--import needs" in refused(capsys, "--import")
    hiding = tmp_path / "json.py"
    hiding.write_text("")
    assert "would hide the module 'json'" in refused(capsys, "--import", str(hiding), "list", "tasks")


def test_an_installed_package_is_found_by_its_entry_point(tmp_path) -> None:
    info = tmp_path / "toy_pack-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-pack\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[tokenmix.plugins]\ntoy = toy_rows\n")
    (tmp_path / "toy_rows.py").write_text(
        "from dataclasses import replace\nfrom tokenmix.registry import MODELS\n"
        "MODELS.register(replace(MODELS['vit_nano'], name='toy_vit'))\n"
    )
    path = os.pathsep.join(map(str, (tmp_path, Path(tokenmix.__file__).parents[1])))
    done = subprocess.run(
        [sys.executable, "-c", "import tokenmix; print(tokenmix.list_models('toy*'))"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "['toy_vit']", done.stderr


def test_recipes_of_a_checkout_need_no_search_path(tmp_path) -> None:
    for name in ("recipes", "benchmarks"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("class Mine: ...\n")
    # A loader process that is a new interpreter gets the data by pickle, of which the first module is the loader.
    code = (
        "import tokenmix.lab.data.indexed, sys; from recipes.datasets.images.composed import Composer; "
        f"assert {str(PLUGINS.parents[1])!r} not in sys.path; import benchmarks; benchmarks.Mine"
    )
    paths = [str(Path(tokenmix.__file__).parents[1]), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    for words in (["-c", code], ["-m", "tokenmix", "list", "data"]):
        done = subprocess.run(
            [sys.executable, "-P", *words], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    assert "blue-marble" in done.stdout


def test_a_model_with_a_pretrained_cfg_is_timms_too() -> None:
    import timm

    from tokenmix.models import register_with_timm
    from tokenmix.registry import ModelEntry

    entry = ModelEntry(
        name="toy_thin",
        tasks=("image-classification",),
        about="a thin gMLP",
        build="tokenmix.models.gmlp:GMLP",
        arguments={"embed_dim": 16, "depth": 1},
        pretrained_cfg={"input_size": (3, 32, 32), "num_classes": 4},
    )
    MODELS.register(entry)
    assert tokenmix.create_model("toy_thin").num_classes == 4
    register_with_timm(entry)
    assert timm.create_model("toy_thin", num_classes=2).num_classes == 2
