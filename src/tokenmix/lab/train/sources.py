"""The config of a run: a task's defaults, a recipe or a run folder, changed by given options."""

import dataclasses
import functools
import reprlib
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from tokenmix.errors import UserError, unknown_name
from tokenmix.files import read_text, user_path
from tokenmix.lab.registry import RECIPES, TASKS, list_tasks
from tokenmix.lab.train.config import CompareConfig, TaskConfig, TrainConfig, comparison_config, default_config
from tokenmix.lab.train.folder import RunFolder, read_document
from tokenmix.lab.train.schema import check_digits
from tokenmix.registry import list_models

D = TypeVar("D", bound=TaskConfig)

# Only for the command line.
NOT_HERE = ("out", "resume", "recipe", "config", "merge")
COMPARISON = "compare_"
"""Prefix of the names of comparison files."""


def list_recipes() -> list[str]:
    """Names of the recipes of one run."""
    return sorted({path.stem for path in RECIPES.glob("*/*.toml") if not path.stem.startswith(COMPARISON)})


def list_comparisons() -> list[str]:
    """Names of the comparisons."""
    return sorted({path.stem for path in RECIPES.glob(f"*/{COMPARISON}*.toml")})


def load_recipe(name: str) -> TrainConfig:
    """The config of a recipe by name or file; `UserError` if it cannot be read or has a wrong option."""
    return _load("recipe", name, list_recipes(), default_config).replace(recipe=name)


def load_comparison(name: str, task: str | None = None) -> CompareConfig:
    """The config of a comparison by name or file; `UserError` as in `load_recipe`."""
    config = _load("comparison", name, list_comparisons(), base_comparison, task)
    if task not in (None, config.task):
        raise UserError(f"the comparison {name} is for {config.task}, got the task {task}; leave the task out")
    return config.replace(config=name)


def base_comparison(task: str, init_from: str | Path | None = None, model: str | None = None) -> CompareConfig:
    """The config that given options change: the task's defaults, or data and model of the run folder `init_from`."""
    config = comparison_config(task)
    return dataclasses.replace(config, **_of_start(config, init_from, model))


def _of_start(config: TrainConfig | CompareConfig, init_from: str | Path | None, model: str | None) -> dict[str, Any]:
    """Sections from the run folder `init_from`: its data if it has the same task, its model unless one is named."""
    source = None if init_from is None else RunFolder.of_weights(Path(init_from))
    start = None if source is None else source.saved_config
    if start is None:
        return {}
    found: dict[str, Any] = {}
    if start.task == config.task:
        found["data"] = dataclasses.replace(config.data, data=start.data.data)
    if model is None and (start.task == config.task or start.model.model in list_models(task=config.task)):
        found["model"] = start.model
        if isinstance(config, TrainConfig):  # Not which part of it was trained.
            found["swap"] = dataclasses.replace(start.swap, train_only="all")
    return found


def _load(kind: str, name: str, known: list[str], default: Callable[..., D], task: str | None = None) -> D:
    given = user_path(name)
    by_name = (path for path in RECIPES.glob("*/*.toml") if path.stem == name and name in known)
    path = next((path for path in (given, Path(f"{given}.toml"), *by_name) if path.is_file()), None)
    if path is None:
        if not known:
            raise UserError(f"no {kind} file {name!r}; give a TOML file ({kind}s by name need a checkout of tokenmix)")
        raise unknown_name(kind, name, known)
    try:
        values = tomllib.loads(read_text(path))
    except (OSError, RecursionError, ValueError) as error:  # An integer of 5,000 digits raises no TOMLDecodeError.
        raise UserError(f"{path} cannot be read ({error}); correct it, or give another file") from None
    check_digits(values, f"the {kind} {path}")
    if task is not None:
        values.setdefault("task", task)
    if "variants" in values:
        values.setdefault("mixers", [])
    if kind == "comparison" and isinstance(values.get("init_from"), str):
        default = functools.partial(default, init_from=values["init_from"], model=values.get("model"))
    config = read_document(values, f"the {kind} {path}", default)
    for key in NOT_HERE:
        if config.flat().get(key) is not None:
            raise UserError(f"the {kind} {path}: {key!r} is only for the command line; remove it")
    return config


def check_call(verb: str, task: object, config: object, kind: type[TaskConfig]) -> None:
    """Raise `UserError` unless a caller of `verb` gave a task by name, and a config of this kind, or None."""
    named = isinstance(task, str | None)
    if not named or not isinstance(config, kind | None):
        wrong = reprlib.repr(config if named else task)
        raise UserError(
            f"{verb} takes a task by name, and options by name or a {kind.__name__} as config; got {wrong}; "
            f"for example {verb}('image-classification', data='digits')"
        )
    if isinstance(task, str) and task not in TASKS:
        given = "config" if task.endswith(".toml") else "data"
        raise UserError(f"{unknown_name('task', task, list_tasks())}; or give it by name: {verb}({given}={task!r})")


def make_config(
    task: str | None = None, *, recipe: str | None = None, resume: Path | None = None, **values: Any
) -> TrainConfig:
    """The config of a run.

    Args:
        task: the task to train; default: the recipe's or saved run's task, else image classification.
        recipe: start from this recipe instead of the task's defaults.
        resume: start from the config of this run folder, and continue the run.
        values: options by name, as on the command line, for example `lr=1e-3, crop=513`.

    Raises:
        UserError: the task lacks an option, or a value has a wrong type or is out of range.
    """
    base = base_config(task, recipe, resume, values.get("init_from"), values.get("model"))
    values |= {} if resume is None else {"resume": resume}
    return merge_kwargs(base, base.replace(**values))


def base_config(
    task: str | None, recipe: str | None, resume: Path | None, init_from: Path | None, model: str | None
) -> TrainConfig:
    """The config that given options change: the saved run's, the recipe's, or the task's with what `init_from` has."""
    if resume is not None:
        return RunFolder(resume).config
    if recipe is not None:
        config = load_recipe(recipe)
        if task not in (None, config.task):
            raise UserError(f"the recipe {recipe} is for {config.task}, got the task {task}; leave the task out")
        return config
    config = default_config(task or TrainConfig.task)
    return dataclasses.replace(config, **_of_start(config, init_from, model))


def merge_kwargs(recipe: TrainConfig, given: TrainConfig) -> TrainConfig:
    """Merge model arguments by name into a recipe's: given values win, None removes an argument."""
    if recipe.loop.recipe is None or given.loop.resume is not None:
        return given
    own, theirs = given.model.model_kwargs, recipe.model.model_kwargs
    merged = {k: v for k, v in {**theirs, **own}.items() if k not in own or v is not None}
    return given.replace(model_kwargs=merged)
