"""Where a config comes from: a task's defaults, a recipe, or a saved run."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

from tokenmix.errors import UserError
from tokenmix.files import read_json
from tokenmix.lab.train.config import TrainConfig, default_config
from tokenmix.lab.train.recipes import load_recipe, merge_kwargs, read_document
from tokenmix.lab.train.schema import Range, fitted
from tokenmix.registry import list_models

# The folder in a run folder that holds the tokenizer of a text task.
TOKENIZER = "tokenizer"


def make_config(
    task: str | None = None, *, recipe: str | None = None, resume: Path | None = None, **values: Any
) -> TrainConfig:
    """The config of a run.

    Args:
        task: the task to train; image classification, or the recipe's or saved run's task, if not given.
        recipe: start from this recipe instead of the task's defaults.
        resume: start from the config of this run folder, and continue the run.
        values: options by name, as the command line has them, for example `lr=1e-3, crop=513`.

    Raises:
        UserError: an option that the task does not have, a value of another type, or outside its range.
    """
    base = base_config(task, recipe, resume, None if "model" in values else values.get("init_from"))
    values |= {} if resume is None else {"resume": resume}
    return merge_kwargs(base, base.replace(**values))


def base_config(task: str | None, recipe: str | None, resume: Path | None, init_from: Path | None) -> TrainConfig:
    """What given options change: the saved run's config, the recipe's, or the task's defaults.

    The defaults have the model, and the swap, of the run folder `init_from`, if the task trains such a model.
    """
    if resume is not None:
        return read_config(resume)
    if recipe is None:
        config = default_config(task or TrainConfig.task)
        start = None if init_from is None else config_of_source(init_from)
        if start is None or (start.task != config.task and start.model.model not in list_models(task=config.task)):
            return config
        # What the model is, and not which part of it was trained.
        return dataclasses.replace(config, model=start.model, swap=dataclasses.replace(start.swap, train_only="all"))
    config = load_recipe(recipe)
    if task not in (None, config.task):
        raise UserError(f"the recipe {recipe} is for {config.task}, got the task {task}; leave the task out")
    return config


def read_config(run: Path) -> TrainConfig:
    """The config of a run folder, with the tokenizer that the folder keeps."""
    config = saved_config(run)
    return config.replace(tokenizer=run / TOKENIZER) if (run / TOKENIZER).is_dir() else config


def saved_config(run: Path) -> TrainConfig:
    """The config of a run folder as it was written; `UserError` if it is damaged or of another version."""
    return read_document(read_part(run, "config.json").get("config"), f"{run / 'config.json'}")


def config_of_source(source: Path) -> TrainConfig | None:
    """The config of the run folder that weights come from; None for a file, or a folder of another library."""
    there = all((Path(source) / name).is_file() for name in ("config.json", "data.json"))
    return saved_config(Path(source)) if there else None


Count = Annotated[int, Range(least=0, most=2**31)]
NUMBERS = ("channels", "ignore", "num_points", "pad_token_id", "seq_len", "vocab_size")
LISTS: dict[str, Any] = {
    "classes": str,
    "part_names": str,
    "img_size": Annotated[int, Range(least=1, most=2**14)],
    "mean": Annotated[float, Range(least=-1e6, most=1e6)],
    "std": Annotated[float, Range(least=1e-6, most=1e6)],
}
"""What tasks keep of their data in data.json, as far as a task keeps it, and the types of the items of lists."""


class _Description(dict[str, Any]):
    """What is in a data.json; `UserError` for what it lacks."""

    path: Path

    def __missing__(self, name: str) -> Any:
        raise UserError(f"{self.path} is damaged: it has no {name}; put a whole one back")


def read_description(run: Path) -> dict[str, Any]:
    """A run's description of its data; `UserError` if a value has another type, or is outside its range."""
    values = _Description(read_part(run, "data.json"))
    values.path = run / "data.json"
    try:
        for name in values.keys() & NUMBERS:
            fitted(Count, values[name], name)
        for name in values.keys() & LISTS.keys():
            # A task of somebody else's may have one value instead of a list.
            for value in _items(values[name]):
                fitted(LISTS[name], value, name)
        if {"mean", "std"} <= values.keys() and len(_items(values["mean"])) != len(_items(values["std"])):
            raise UserError("mean and std must have the same length")
        if isinstance(values.get("img_size"), list) and len(values["img_size"]) != 2:
            raise UserError("img_size must be two numbers")
    except UserError as error:
        raise UserError(f"{values.path} is damaged: {error}; put a whole one back") from None
    return values


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _first_run(comparison: Path) -> Path:
    runs = (path.parent for path in comparison.rglob("config.json") if path.parent.parent.name == "runs")
    return min(runs, default=comparison / "runs" / "self-seed0")


def read_part(run: Path, name: str) -> dict[str, Any]:
    """A JSON file of a run folder; `UserError` if it is not there or damaged."""
    if not (run / name).is_file():
        if (run / "compare.json").is_file() or (run / "grid.json").is_file():
            raise UserError(f"{run} is a comparison, not a run; give one of its runs, such as {_first_run(run)}")
        raise UserError(f"{run} is not a run folder: it has no {name}; give a folder that tokenmix train wrote")
    try:
        values = read_json(run / name)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise UserError(f"{run / name} is damaged; put a whole one back, or start a new run")
    return values
