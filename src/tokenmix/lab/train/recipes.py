"""Recipes: the options of a run in a TOML file, by file or by name. Options given as well override them."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenmix.errors import UserError, unknown_name
from tokenmix.files import user_path
from tokenmix.lab.train.config import CompareConfig, TrainConfig, comparison_config, default_config
from tokenmix.trust import from_file

# Next to src/ in a checkout; the wheel has none.
HOME = Path(__file__).parents[4] / "recipes"
# What a run itself decides.
NOT_HERE = ("out", "resume", "recipe", "config", "merge")


COMPARISON = "compare_"
"""How the names of the files begin that are comparisons."""


def list_recipes() -> list[str]:
    """The recipes of one run that can be given by name."""
    return [name for name in _names() if not name.startswith(COMPARISON)]


def list_comparisons() -> list[str]:
    """The comparisons that can be given by name."""
    return [name for name in _names() if name.startswith(COMPARISON)]


def _names() -> list[str]:
    return sorted({path.stem for path in HOME.rglob("*.toml")})


def load_recipe(name: str) -> TrainConfig:
    """The config of a recipe, given by name or by file.

    Raises:
        UserError: there is none, it cannot be read, or it has an option that does not exist, or a wrong value.
    """
    path = _find(name, list_recipes())
    config = read_document(_read(path), f"the recipe {path}")
    for key in NOT_HERE:
        if config.flat().get(key) is not None:
            raise UserError(f"the recipe {path}: {key!r} is only for the command line; remove it")
    return config.replace(recipe=name)


def load_comparison(name: str) -> CompareConfig:
    """The config of a comparison, given by name or by file; `UserError` as `load_recipe`."""
    path = _find(name, list_comparisons())
    values = _read(path)
    task = values.get("task", CompareConfig.task)
    try:
        if not isinstance(task, str):
            raise UserError(f"task={task!r} must be text")
        if "variants" in values:
            values.setdefault("mixers", [])
        config = comparison_config(task).replace(**from_file(values))
        for key in NOT_HERE:
            if config.flat().get(key) is not None:
                raise UserError(f"{key!r} is only for the command line; remove it")
    except UserError as error:
        raise UserError(f"the comparison {path}: {error}") from None
    return config.replace(config=name)


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except (OSError, RecursionError, ValueError) as error:  # A number of 5,000 digits is no TOMLDecodeError.
        raise UserError(f"{path} cannot be read ({error})") from None


def read_document(values: Any, where: str) -> TrainConfig:
    """A config from the values of a file, by name or in tables by part; `UserError` names the file.

    A file may be a stranger's, so all text in the config is `FromFile`.
    """
    task = values.get("task", TrainConfig.task) if isinstance(values, dict) else None
    if not isinstance(task, str):
        raise UserError(f"{where} is damaged: it has no task; restore it from a copy")
    try:
        return default_config(task).replace(**from_file(values))
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def merge_kwargs(recipe: TrainConfig, given: TrainConfig) -> TrainConfig:
    """The model's arguments name by name, if they come from a recipe: what is given wins; None leaves one out."""
    if recipe.loop.recipe is None or given.loop.resume is not None:
        return given
    own, theirs = given.model.model_kwargs, recipe.model.model_kwargs
    merged = {k: v for k, v in {**theirs, **own}.items() if k not in own or v is not None}
    return given.replace(model_kwargs=merged)


def _find(name: str, known: Sequence[str]) -> Path:
    given = user_path(name)
    by_name = (path for path in HOME.rglob("*.toml") if path.stem == name and name in known)
    candidates = [given, Path(f"{given}.toml"), *by_name]
    found = next((path for path in candidates if path.is_file()), None)
    if found is None:
        if not known:
            raise UserError(f"no recipe file {name!r}; give a TOML file (recipes by name need a checkout of tokenmix)")
        raise unknown_name("recipe", name, known)
    return found
