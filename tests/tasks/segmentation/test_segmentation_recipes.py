"""Recipes of segmentation: their settings are possible, their commands parse, the published one says what it is."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from tokenmix import create_model
from tokenmix.lab.cli import command
from tokenmix.lab.registry import get_task
from tokenmix.lab.train.sources import list_recipes, load_recipe

ROOT = Path(__file__).parents[3]
NAMES = [name for name in list_recipes() if load_recipe(name).task == "semantic-segmentation"]
IMAGES = {"eanet_voc": 10_582, "eanet_ade20k": 20_210, "eanet_cityscapes": 2_975}


def test_there_is_one_for_every_published_set():
    assert set(NAMES) == set(IMAGES)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_checked_and_its_steps_come_before_its_epochs(name):
    config = load_recipe(name)
    get_task(config.task).check(config, config.loop.batch_size)
    assert (config.optim.opt, config.optim.schedule, config.optim.warmup_steps, config.optim.clip_grad) == (
        "momentum",
        "poly",
        0,
        None,
    )
    assert config.loop.max_steps is not None
    assert config.loop.devices is not None
    steps = config.loop.epochs * (IMAGES[name] // (config.loop.batch_size * config.loop.devices))
    assert config.loop.max_steps <= steps < 1.02 * config.loop.max_steps
    kwargs = {key: value for key, value in config.model.model_kwargs.items() if key != "pretrained_backbone"}
    model = create_model(config.model.model, device="meta", **kwargs)
    assert model.feature_info[-1]["reduction"] == 8


def test_the_published_numbers():
    config = load_recipe("eanet_voc")
    assert config.loop.devices is not None
    assert (config.loop.batch_size * config.loop.devices, config.optim.lr, config.optim.weight_decay) == (
        16,
        9e-3,
        1e-4,
    )
    settings = config.options
    assert settings.crop == (513,)
    assert (min(settings.train_scales), max(settings.train_scales), len(settings.train_scales)) == (0.5, 2.0, 16)
    assert settings.bias_lr == 2.0


@pytest.mark.parametrize("name", NAMES)
def test_its_command_parses(name):
    text = next((ROOT / "recipes").rglob(f"{name}.toml")).read_text()
    match = re.search(r"^# +torchrun --nproc_per_node (\d+) -m tokenmix (.*)$", text, re.MULTILINE)
    assert match is not None
    config = command.parse(match[2].split()).config
    assert (config.loop.devices, config.loop.recipe) == (int(match[1]), name)


def test_the_published_evaluation_parses(tmp_path):
    text = next((ROOT / "recipes").rglob("eanet_voc.toml")).read_text()
    match = re.search(r"^# +tokenmix (eval .*)$", text, re.MULTILINE)
    assert match is not None
    saved = {"config": dataclasses.asdict(load_recipe("eanet_voc"))}
    (tmp_path / "config.json").write_text(json.dumps(saved))
    options = command.parse(match[1].replace("RUN", str(tmp_path)).split()).options
    assert (options.scales, options.mirror, options.way) == ((0.5, 0.75, 1, 1.25, 1.5, 1.75), "yes", "auto")
