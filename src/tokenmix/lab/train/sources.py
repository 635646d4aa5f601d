"""Where a config comes from: a task's defaults, a recipe, or a run folder; and which run a file was written for.

config.json has a random id of the run. Weights, checkpoints and result.json repeat the id; weights and checkpoints also
have the SHA-256 of the run's settings and of data.json. Nothing depends on where the folder is, so it can be copied and
moved as a whole.
"""

import dataclasses
import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from tokenmix.errors import UserError, unknown_name
from tokenmix.files import read_json, user_path
from tokenmix.lab.data.fetch import log
from tokenmix.lab.train.config import CompareConfig, TrainConfig, comparison_config, default_config
from tokenmix.lab.train.schema import Range, fitted
from tokenmix.registry import list_models
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
    return sorted({path.stem for path in HOME.glob("*/*.toml")})


def load_recipe(name: str) -> TrainConfig:
    """The config of a recipe, given by name or by file.

    Raises:
        UserError: there is none, it cannot be read, or it has an option that does not exist, or a wrong value.
    """
    path = _find(name, list_recipes(), "recipe")
    config = read_document(_read(path), f"the recipe {path}")
    for key in NOT_HERE:
        if config.flat().get(key) is not None:
            raise UserError(f"the recipe {path}: {key!r} is only for the command line; remove it")
    return config.replace(recipe=name)


def load_comparison(name: str) -> CompareConfig:
    """The config of a comparison, given by name or by file; `UserError` as `load_recipe`."""
    path = _find(name, list_comparisons(), "comparison")
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
        raise UserError(f"{path} cannot be read ({error}); correct it, or give another file") from None


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


def _find(name: str, known: Sequence[str], kind: str) -> Path:
    given = user_path(name)
    by_name = (path for path in HOME.glob("*/*.toml") if path.stem == name and name in known)
    candidates = [given, Path(f"{given}.toml"), *by_name]
    found = next((path for path in candidates if path.is_file()), None)
    if found is None:
        if not known:
            raise UserError(f"no {kind} file {name!r}; give a TOML file ({kind}s by name need a checkout of tokenmix)")
        raise unknown_name(kind, name, known)
    return found


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


ID = "run_id"


def identity_of(run: Path) -> dict[str, str]:
    """Id of a run folder, and SHA-256 of its settings and of data.json; empty for a folder that has no id."""
    try:
        setup, data = read_json(run / "config.json"), read_json(run / "data.json")
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(setup, dict) or not isinstance(setup.get(ID), str):
        return {}
    return {ID: setup[ID], "config_sha256": sha256_of(_settings(setup.get("config"))), "data_sha256": sha256_of(data)}


def _settings(config: Any) -> Any:
    """The settings of a config in JSON that decide what is learned; data may have moved, and is compared by itself."""
    if not isinstance(config, dict):
        return config
    parts = {name: part if isinstance(part, dict) else {name: part} for name, part in config.items()}
    free = {*TrainConfig().marked("free"), "data"}
    return {name: {key: value for key, value in part.items() if key not in free} for name, part in parts.items()}


def sha256_of(value: Any) -> str:
    """SHA-256 of a value for JSON, whatever its layout in a file."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def check_identity(found: Mapping[str, Any], run: Path, file: Path) -> None:
    """Raise `UserError` if a file of a run folder was written for another run; a line names what was edited since.

    Args:
        found: what the file says of its run; it may say no more than the id.
        run: the run folder.
        file: for the message.
    """
    own = identity_of(run)
    if own and found.get(ID) != own[ID]:
        raise UserError(
            f"{file} was not written by the run {run}; put the run's own file back, or start from these weights with "
            "--init-from FILE"
        )
    for edited in edited_files(found, own):
        log(f"{run / edited} was edited after {file.name} was written")


def edited_files(found: Mapping[str, Any], own: Mapping[str, str]) -> list[str]:
    """Which of config.json and data.json, whose SHA-256 `own` has, are others than those that `found` has."""
    return [
        f"{name}.json"
        for name in ("config", "data")
        if f"{name}_sha256" in found and found[f"{name}_sha256"] != own.get(f"{name}_sha256")
    ]


def read_result(run: Path) -> dict[str, Any]:
    """result.json of a run folder; `UserError` if it is damaged, or was written for another run."""
    result, own = read_part(run, "result.json"), identity_of(run)
    if own and result.get(ID) != own[ID]:
        raise UserError(f"{run / 'result.json'} was not written by this run; put the run's own back")
    return result
