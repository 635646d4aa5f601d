"""The recipes' tables are those of the results that stand next to them, and their runs are taken up, never mixed."""

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tokenmix.errors import UserError
from tokenmix.lab.train.sources import make_config

RECIPES = Path(__file__).parents[2] / "recipes"
# What of a recipe's results its tables are made of; no name for all of them.
PARTS: dict[str, tuple[str, ...]] = {
    "text.text_nano": (),
    "points.points_nano": ("rows", "cost"),
    "generation.generation_nano": ("rows", "costs"),
    "detection.detection_nano": ("rows",),
    "segmentation.segmentation_nano": (),
}
if (RECIPES / "classification" / "plateau.json").exists():
    PARTS["classification.plateau"] = ()


@pytest.fixture
def recipe(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(RECIPES.parent))
    return importlib.import_module(f"recipes.{request.param}")


@pytest.mark.parametrize("recipe", PARTS, indirect=True)
def test_a_table_says_what_was_found(recipe: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = json.loads(Path(str(recipe.__file__)).with_suffix(".json").read_text())
    monkeypatch.setattr(recipe, "environment", lambda: found["environment"])
    parts = [found[part] for part in PARTS[recipe.__name__.removeprefix("recipes.")]] or [found]
    told = recipe.markdown(*parts, found["command"])
    assert told == Path(str(recipe.__file__)).with_suffix(".md").read_text()


@pytest.mark.parametrize("recipe", ["over_seeds"], indirect=True)
def test_mean_and_spread_over_seeds(recipe: ModuleType) -> None:
    assert recipe.over_seeds([1.0, 2.0, 6.0]) == {"mean": 3.0, "deviation": 7**0.5, "runs": [1.0, 2.0, 6.0]}
    assert recipe.shown(recipe.over_seeds([1.0, 2.0, 6.0]), 2) == "3.00 ± 2.65"
    assert recipe.shown(recipe.over_seeds([0.25]), 1) == "0.2"


@pytest.mark.parametrize("recipe", ["text.text_nano"], indirect=True)
def test_a_task_that_logs_its_gates_takes_what_masked_lm_takes(recipe: ModuleType) -> None:
    config = make_config(
        task="watched-lm", data="english", **{**recipe.SHARED, "model": "gmlp_text_nano", "seq_len": 32}
    )
    recipe.WatchedLM.check(config, 32)
    with pytest.raises(UserError, match="vit_nano is a model of image-classification"):
        recipe.WatchedLM.check(config.replace(model="vit_nano"), 32)
