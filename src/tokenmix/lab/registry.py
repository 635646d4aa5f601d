"""Registries of tasks and data sets by name. Each is registered once, by the package that defines it."""

import importlib
import importlib.util
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tokenmix.errors import UserError, unknown_name
from tokenmix.registry import MODELS, Arguments, Entry, Registry, Target, list_models, load_object, load_plugins


@dataclass(frozen=True, kw_only=True)
class TaskEntry(Entry):
    """A task.

    Attributes:
        name: for example `semantic-segmentation`.
        about: one line for `tokenmix list tasks`.
        task: its `TaskModule` class.
        options: dataclass of the task's own options, a `TaskOptions` of lab/train/config.py in a module without
            PyTorch.
        optim: dataclass of optimiser and learning rate, if the task lacks some of the usual options.
        defaults: default values of options, above all `model` and `data`; users must give these two if they have no
            default.
        skeleton: the model of a comparison; that of `defaults` if empty.
        other_models: function of a name that returns whether the task may take a model outside the registry.
    """

    task: Target
    options: Target = "tokenmix.lab.train.config:TaskOptions"
    optim: Target = "tokenmix.lab.train.config:OptimConfig"
    defaults: Arguments = field(default_factory=dict)
    skeleton: str = ""
    other_models: Target | None = None


Kind = Literal["images", "classes", "boxes", "masks", "clouds", "parts", "corpus", "labelled-text", "questions"]
"""Content of a data set: labelled images; images with a class per pixel, boxes or masks of objects; point clouds with
a class or with parts; running text, labelled texts, questions about texts."""


@dataclass(frozen=True, kw_only=True)
class DataEntry(Entry):
    """A data set, or a layout of files on the user's disk.

    Attributes:
        name: prefix of the value of `--data`.
        kinds: its content; a task reads the kinds that it can learn from.
        about: size, layout, and megabytes to fetch; for users' files it begins with `name:PATH`.
        load: the reader, called with a `tokenmix.lab.data.DataRequest`. It returns `ImageData`, `SceneData`,
            `PointData`, `Corpus`, `LabelledData` or `QuestionData`, as for `load_images`, `load_scenes` and the like.
        licence: licence of the content.
        origin: sources, in the order of trying.
        variant: text after the name and a colon. Required for a path and patterns of shards; optional for a number or a
            name, which the reader checks.
        stored: names in the cache; empty if nothing is fetched.
        img_size: default side of labelled images in pixels; None if only the reader knows it.
    """

    kinds: tuple[Kind, ...]
    load: Target
    licence: str = "yours"
    origin: str = "your disk"
    variant: Literal["none", "path", "shards", "number", "name"] = "none"
    stored: tuple[str, ...] = ()
    img_size: int | None = None

    @property
    def size(self) -> tuple[int, int] | None:
        """Default (height, width) of labelled images."""
        return None if self.img_size is None else (self.img_size, self.img_size)


def _load() -> None:
    for package in ("tokenmix.lab.data", "tokenmix.lab.tasks"):
        importlib.import_module(package)
    load_plugins()


TASKS: Registry[TaskEntry] = Registry("task", _load)
DATA_SETS: Registry[DataEntry] = Registry("data set", _load)


def register_dataset(
    name: str,
    load: Target,
    *,
    kinds: tuple[Kind, ...] = ("images",),
    about: str = "",
    licence: str = "yours",
    origin: str = "your disk",
    variant: Literal["none", "path", "shards", "number", "name"] = "none",
    stored: tuple[str, ...] = (),
    img_size: int | None = None,
) -> None:
    """Register a data set as `--data NAME` with the attributes of `DataEntry`; `UserError` if the name is in use."""
    DATA_SETS.register(DataEntry(**locals()))


RECIPES = Path(__file__).parents[3] / "recipes"
"""Recipes of a checkout; the wheel has none."""


def register_recipes() -> None:
    """Register the data sets of a checkout's recipes, by file, since users' folders may have the same name."""
    name, file = "recipes.datasets", RECIPES / "datasets" / "__init__.py"
    if name in sys.modules or not file.is_file():
        return
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=[str(file.parent)])
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])


def list_tasks() -> list[str]:
    """Names of the tasks."""
    return TASKS.names()


def get_task(name: str) -> Any:
    """The class of a task; `UserError` with the nearest names for an unknown one."""
    return load_object(TASKS[name].task)


def check_model(task: str, model: str) -> None:
    """Raise `UserError` unless the task trains this model, or may take it from elsewhere; without PyTorch."""
    if not model:
        raise UserError(f"{task} has no default model; give --model with a name of: tokenmix list models")
    fitting, other = list_models(task=task), TASKS[task].other_models
    if fitting and model not in fitting and not (other is not None and load_object(other)(model)):
        raise incompatible_model_error(task, model)


def incompatible_model_error(task: str, model: str) -> UserError:
    """The error for a model that the task does not train: its tasks and a fitting model, or the nearest names."""
    fitting = list_models(task=task)
    if model not in MODELS:
        other = "; a function or class of yours is module:NAME" if TASKS[task].other_models else ""
        return UserError(f"{unknown_name('model', model, fitting)}{other}")
    small = next((name for name in fitting if name.endswith("_nano")), next(iter(fitting), "NAME"))
    trained = ", ".join(MODELS[model].tasks)
    return UserError(f"{model} is a model of {trained}, not of {task}; give another, for example --model {small}")
