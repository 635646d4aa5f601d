"""Recipes: the settings of a run in a TOML file, by file or by name. What is given on the command line wins."""

import dataclasses
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenmix.errors import UserError, unknown_name
from tokenmix.train.config import TrainConfig

__all__ = ["list_recipes", "load_recipe", "merge_kwargs", "recipe_values"]

# In the wheel, and beside src/ in a checkout.
HOMES = (Path(__file__).parents[1] / "recipes", Path(__file__).parents[3] / "recipes")
# What a run itself decides.
NOT_HERE = ("out", "resume", "recipe")


def list_recipes() -> list[str]:
    """The recipes that can be given by name."""
    return sorted({path.stem for home in HOMES for path in home.rglob("*.toml")})


def load_recipe(name: str) -> TrainConfig:
    """The config of a recipe, given by name or by file.

    Raises:
        UserError: there is none, it cannot be read, or it has a setting that does not exist.
    """
    return TrainConfig(**_values(name))


def recipe_values(argv: Sequence[str]) -> dict[str, Any]:
    """The settings of the recipe that a command line names; {} if it names none."""
    for word, following in zip(argv, [*argv[1:], ""]):
        if word == "--recipe" and following:
            return _values(following)
        if word.startswith("--recipe="):
            return _values(word.partition("=")[2])
    return {}


def merge_kwargs(recipe: Mapping[str, Any], given: TrainConfig) -> dict[str, dict[str, Any]]:
    """The model's and the task's arguments name by name: the recipe's, and what is given wins; None leaves one out."""
    merged = {}
    for name in ("model_kwargs", "task_kwargs"):
        own = getattr(given, name)
        merged[name] = {k: v for k, v in {**recipe.get(name, {}), **own}.items() if k not in own or v is not None}
    return merged


def _values(name: str) -> dict[str, Any]:
    path = _find(name)
    try:
        values = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"the recipe {path} cannot be read ({error})") from None
    known = {field.name for field in dataclasses.fields(TrainConfig)} - set(NOT_HERE)
    for key in values:
        if key not in known:
            raise unknown_name(f"setting in the recipe {path}:", key, known)
    # TOML has no null.
    return {**{key: None if value == "none" else value for key, value in values.items()}, "recipe": name}


def _find(name: str) -> Path:
    given = Path(name).expanduser()
    by_name = (path for home in HOMES for path in home.rglob("*.toml") if path.stem == name)
    candidates = [given, given.with_name(f"{given.name}.toml"), *by_name]
    found = next((path for path in candidates if path.is_file()), None)
    if found is None:
        raise unknown_name("recipe", name, list_recipes())
    return found
