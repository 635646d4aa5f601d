"""Recipes of image generation: their settings are possible, their commands parse, every value has its mark."""

import re
from pathlib import Path

import pytest

from tokenmix.lab.cli import command
from tokenmix.lab.registry import get_task
from tokenmix.lab.train.sources import list_recipes, load_recipe

ROOT = Path(__file__).parents[3]
NAMES = [name for name in list_recipes() if load_recipe(name).task == "image-generation"]


def test_there_is_one_for_every_published_size():
    assert {name: load_recipe(name).options.img_size for name in NAMES} == {
        "sagan_cifar10": 32,
        "sagan_tiny_imagenet": 64,
        "sagan_imagenet128": 128,
    }


@pytest.mark.parametrize("name", NAMES)
def test_it_is_checked_and_each_part_of_its_batch_is_the_published_one(name):
    config = load_recipe(name)
    task = get_task(config.task)
    task.check(config, config.loop.batch_size)
    assert config.loop.batch_size // config.optim.d_steps == (64 if name == "sagan_cifar10" else 256)
    assert config.loop.max_steps is not None
    images = {"sagan_cifar10": 50_000, "sagan_tiny_imagenet": 100_000, "sagan_imagenet128": 1_281_167}[name]
    assert config.loop.epochs * (images // config.loop.batch_size) >= config.loop.max_steps


@pytest.mark.parametrize("name", NAMES)
def test_its_command_parses(name):
    text = next((ROOT / "recipes").rglob(f"{name}.toml")).read_text()
    match = re.search(r"^# +tokenmix (train .*)$", text, re.MULTILINE)
    assert match is not None
    assert command.parse(match[1].split()).config.loop.recipe == name


@pytest.mark.parametrize("name", NAMES)
def test_every_value_has_its_mark(name):
    lines = next((ROOT / "recipes").rglob(f"{name}.toml")).read_text().splitlines()
    settings = [line for line in lines if re.match(r"\w+ = ", line) and not line.startswith(("task", "model "))]
    assert len(settings) > 10
    assert not [line for line in settings if not re.search(r"# .*(\[V\]|\[\?\]|\[ours\])", line)]
