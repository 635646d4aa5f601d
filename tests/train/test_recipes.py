"""Every recipe parses, builds its model, and trains with the nano form of it on a tiny made set."""

import dataclasses
import json
import re
import tomllib
from pathlib import Path

import pytest
import torch
from PIL import Image

from tokenmix.errors import UserError
from tokenmix.lab import cli
from tokenmix.lab.cli import command
from tokenmix.lab.train.plan import make_plan, make_schedule
from tokenmix.lab.train.sources import list_recipes, load_recipe
from tokenmix.models import create_model

ROOT = Path(__file__).parents[2]
NANO = {"gmlp_imagenet": "gmlp_nano", "eamlp_384": "eamlp_nano"}
IMAGENET = 1_281_167


def file_of(name: str) -> Path:
    return next((ROOT / "recipes").rglob(f"{name}.toml"))


@pytest.fixture(scope="module")
def imagefolder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("imagenet")
    for part, count in (("train", 9), ("val", 2)):
        for label, name in enumerate(("n01", "n02")):
            for i in range(count):
                path = folder / part / name / f"{i}.JPEG"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.new("RGB", (40 + i, 50), (120 * label, 10 * i, 80)).save(path)
    return folder


def test_every_recipe_has_its_nano_form():
    known = set(list_recipes())
    files = {path.stem for path in (ROOT / "recipes").glob("*/*.toml")}
    assert known == {name for name in files if not name.startswith("compare_")}
    assert {name for name in known if load_recipe(name).task == "image-classification"} == set(NANO)


@pytest.mark.parametrize("name", NANO)
def test_it_builds_its_model_at_its_size(name: str):
    config = load_recipe(name)
    assert config.options.img_size is not None
    model = create_model(
        config.model.model,
        num_classes=1000,
        in_chans=3,
        img_size=config.options.img_size,
        device="meta",
        **config.model.model_kwargs,
    )
    images = torch.empty(2, 3, config.options.img_size, config.options.img_size, device="meta")
    assert model(images).shape == (2, 1000)


@pytest.mark.parametrize("name", NANO)
def test_every_value_has_its_mark(name: str):
    text = file_of(name).read_text()
    settings = [
        line for line in text.splitlines() if re.match(r"\w+ = ", line) and not line.startswith(("task", "model "))
    ]
    unmarked = [line for line in settings if not re.search(r"# .*(\[V2?\]|\[\?\]|\[ours\]|own colours)", line)]
    assert len(settings) > 15
    assert not unmarked


@pytest.mark.parametrize("name", NANO)
def test_its_command_is_one_that_runs(name: str):
    """The torchrun line in its head, with as many processes as the recipe is for."""
    text = file_of(name).read_text()
    match = re.search(r"^# +torchrun --nproc_per_node (\d+) -m tokenmix (.*)$", text, re.MULTILINE)
    assert match is not None
    config = command.parse(match[2].split()).config
    assert (config.loop.devices, config.loop.recipe) == (int(match[1]), name)
    assert config.model.model == load_recipe(name).model.model


@pytest.mark.parametrize("name", NANO)
def test_two_steps_of_its_nano_form(name: str, imagefolder: Path, tmp_path: Path):
    config = load_recipe(name)
    kwargs = [f"{key}={value}" for key, value in config.model.model_kwargs.items()]
    arguments = ["train", "--recipe", str(file_of(name).with_suffix("")), "--data", f"imagefolder:{imagefolder}"]
    arguments += ["--model", NANO[name], "--model-kwargs", *kwargs, "--img-size", "32", "--devices", "1"]
    arguments += ["--batch-size", "8", "--workers", "0", "--threads", "1", "--device", "cpu", "--max-steps", "2"]
    assert cli.main([*arguments, "--out", str(tmp_path / "run")]) == 0
    saved = json.loads((tmp_path / "run" / "config.json").read_text())["config"]
    saved = {name: value for part in saved.values() if isinstance(part, dict) for name, value in part.items()}
    assert json.loads((tmp_path / "run" / "result.json").read_text())["steps"] == 2
    for key in ("lr", "weight_decay", "augment", "mixup", "cutmix", "reprob", "smoothing", "opt_eps", "ema", "seed"):
        assert saved[key] == config.flat()[key], key


def rates(name: str) -> list[float]:
    """The learning rate at the start of each epoch on ImageNet."""
    config = load_recipe(name)
    plan = make_plan(config, IMAGENET, config.loop.devices or 1)
    schedule = make_schedule(
        torch.optim.SGD([torch.zeros(1)], lr=config.optim.lr), config.optim, plan.total_steps, config.loop.epochs
    )
    factor = schedule.lr_lambdas[0]
    return [config.optim.lr * factor(epoch * plan.steps_per_epoch) for epoch in range(plan.epochs + 1)]


def test_the_rates_of_gmlp():
    """10,000 steps of 4096 images are the warm-up: 32 of 300 epochs."""
    epochs = rates("gmlp_imagenet")
    assert len(epochs) == 301
    assert max(range(301), key=epochs.__getitem__) in (32, 33)
    assert epochs[300] == pytest.approx(0, abs=1e-12)


def test_the_rates_of_eamlp():
    """5 epochs of warm-up, the cosine to 300, and 10 epochs at 1e-5."""
    epochs = rates("eamlp_384")
    assert len(epochs) == 311
    assert epochs[5] == pytest.approx(1e-3)
    assert epochs[4] == pytest.approx(0.8e-3, rel=1e-3)
    assert epochs[299] > 1e-5
    assert epochs[300:] == pytest.approx([1e-5] * 11)


def test_what_is_given_beside_it_wins():
    config = command.parse(["train", "--lr", "0.5", "--recipe=eamlp_384", "--data", "digits"]).config
    assert (config.optim.lr, config.optim.weight_decay, config.data.data, config.task) == (
        0.5,
        0.03,
        "digits",
        "image-classification",
    )
    plain = command.parse(["train", "--data", "digits"]).config
    assert (plain.loop.recipe, plain.optim.weight_decay) == (None, 0.05)


def test_arguments_are_merged_name_by_name():
    words = "train --recipe eanet_voc --data voc:/x --crop 257 --model-kwargs width=32 tie=None"
    config, recipe = command.parse(words.split()).config, load_recipe("eanet_voc")
    assert config.options == dataclasses.replace(recipe.options, crop=(257,))
    assert config.model.model_kwargs == {"pretrained_backbone": True, "width": 32}
    assert command.parse(words.split()[:5]).config.model.model_kwargs == recipe.model.model_kwargs


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr = ", r"cannot be read \("),
        (
            "learning_rate = 0.1",
            "the recipe .*mine.toml: unknown option of image-classification 'learning_rate'; did you mean",
        ),
        ("out = 'x'", "the recipe .*mine.toml: 'out' is only for the command line"),
        ("[loop]\nout = 'x'", "'out' is only for the command line"),
        ("[loop]\nresume = 'x'", "'resume' is only for the command line"),
        (f"model_kwargs = {{depth = 0x{'f' * 5000}}}", "mine.toml has a whole number of more than 1,000 digits"),
        ("\ufefflr = 'x'", "lr='x' must be a number"),
    ],
)
def test_mistakes_in_a_recipe(tmp_path: Path, text: str, message: str):
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(UserError, match=message):
        load_recipe(str(tmp_path / "mine"))


def test_unknown_recipe(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["train", "--recipe", "gmlp_imagenett"]) == 2
    assert "unknown recipe 'gmlp_imagenett'; did you mean gmlp_imagenet" in capsys.readouterr().err


def test_a_pattern_that_the_shell_spelled_out(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["train", "--data", "wds:a-0.tar", "wds:a-1.tar"]) == 2
    assert "quote it" in capsys.readouterr().err


def test_recipes_are_toml_with_settings_only():
    for name in list_recipes():
        values = tomllib.loads(file_of(name).read_text())
        assert "data" not in values, "where ImageNet lies is the user's"
