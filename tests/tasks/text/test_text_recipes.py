"""Recipes of text: the paper's sizes are built, the commands in their heads parse, every value has its mark."""

import re
from pathlib import Path

import pytest
import torch

from tokenmix import text
from tokenmix.lab.cli import command
from tokenmix.lab.registry import get_task
from tokenmix.lab.train.sources import list_recipes, load_recipe
from tokenmix.registry import MODELS

ROOT = Path(__file__).parents[3]
TEXT_TASKS = set(MODELS["gmlp_text_nano"].tasks)
NAMES = [name for name in list_recipes() if load_recipe(name).task in TEXT_TASKS]


def test_there_are_recipes_for_every_task():
    assert {load_recipe(name).task for name in NAMES} == TEXT_TASKS


@pytest.mark.parametrize("name", NAMES)
def test_it_is_checked_and_its_model_is_built(name: str):
    config = load_recipe(name)
    task = get_task(config.task)
    task.check(config, config.loop.batch_size)
    data = {"vocab_size": 32_000, "pad_token_id": 0, "seq_len": config.options.seq_len}
    if config.task == "text-classification":
        data["classes"] = ["no", "yes"]
    with torch.device("meta"):
        model = task.build_model(config, data)
    assert model.config.max_position_embeddings == config.options.seq_len
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    if name == "gmlp_mlm_base":
        assert millions == pytest.approx(130.1, rel=0.002)
    assert text.create_config(config.model.model).hidden_size == 512


@pytest.mark.parametrize("name", NAMES)
def test_its_command_parses(name: str):
    head = next((ROOT / "recipes").rglob(f"{name}.toml")).read_text().replace(" \\\n#", "")
    match = re.search(r"^# +(?:torchrun --nproc_per_node (\d+) -m )?tokenmix (train .*)$", head, re.MULTILINE)
    assert match is not None
    config = command.parse(match[2].split()).config
    assert config.loop.recipe == name
    assert config.loop.devices == (int(match[1]) if match[1] else None)


@pytest.mark.parametrize("name", NAMES)
def test_every_value_has_its_mark(name: str):
    lines = next((ROOT / "recipes").rglob(f"{name}.toml")).read_text().splitlines()
    settings = [x for x in lines if re.match(r"\w+ = ", x) and not x.startswith(("task", "model "))]
    assert len(settings) > 10
    assert not [line for line in settings if not re.search(r"# .*(\[V2\]|\[\?\]|\[ours\])", line)]
