"""Recipes of detection: their settings are possible, their commands parse, their models are built as they say."""

import re
from pathlib import Path
from typing import Any

import pytest

from tokenmix import create_model
from tokenmix.lab.cli import command
from tokenmix.lab.registry import get_task
from tokenmix.lab.train.sources import list_recipes, load_recipe

ROOT = Path(__file__).parents[3]
NAMES = [name for name in list_recipes() if load_recipe(name).task in ("detection", "instance-segmentation")]


def test_there_is_one_for_every_published_detector():
    assert NAMES == ["faster_rcnn_coco_1x", "mask_rcnn_coco_1x", "retinanet_coco_1x"]


@pytest.mark.parametrize("name", NAMES)
def test_it_is_checked_and_builds_its_model(name: str):
    config = load_recipe(name)
    get_task(config.task).check(config, config.loop.batch_size)
    kwargs = {key: value for key, value in config.model.model_kwargs.items() if key != "pretrained_backbone"}
    model: Any = create_model(config.model.model, num_classes=80, device="meta", **kwargs)
    assert (model.kind.replace("-", "_") in name, model.mixer_name) == (True, "external-2d")


@pytest.mark.parametrize("name", NAMES)
def test_its_command_parses(name: str):
    text = next((ROOT / "recipes").rglob(f"{name}.toml")).read_text()
    match = re.search(r"^# +torchrun --nproc_per_node (\d+) -m tokenmix (.*)$", text, re.MULTILINE)
    assert match is not None
    config = command.parse(match[2].split()).config
    assert config.loop.devices is not None
    assert (config.loop.devices, config.loop.recipe) == (int(match[1]), name)
    assert config.loop.devices * config.loop.batch_size == 16
