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
        optim: dataclass of optimiser and learning rate, where the task does without some of the usual ones.
        defaults: values of options that this task starts from, `model` and `data` above all; a task without them has to
            be given these two.
        skeleton: the model of a comparison; that of `defaults` if empty.
        other_models: function of a name that returns whether it may be a model that the task takes though the registry
            does not have it.
    """

    task: Target
    options: Target = "tokenmix.lab.train.config:TaskOptions"
    optim: Target = "tokenmix.lab.train.config:OptimConfig"
    defaults: Arguments = field(default_factory=dict)
    skeleton: str = ""
    other_models: Target | None = None


Kind = Literal["images", "classes", "boxes", "masks", "clouds", "parts", "corpus", "labelled-text", "questions"]
"""What a data set holds: labelled images, images with a class for each pixel, with boxes or with masks of objects,
point clouds with a class or with parts, running text, labelled texts, questions about texts."""


@dataclass(frozen=True, kw_only=True)
class DataEntry(Entry):
    """A data set, or a layout of files on the user's disk.

    Attributes:
        name: what `--data` begins with.
        kinds: what it holds; a task reads those that it can learn from.
        about: how much there is, in what layout, and megabytes to fetch; for files of the user's it begins with
            `name:PATH`.
        load: the reader, called with a `tokenmix.lab.data.DataRequest`. It returns what `load_images`, `load_scenes` or
            their like are written for: `ImageData`, `SceneData`, `PointData`, `Corpus`, `LabelledData` or
            `QuestionData`.
        licence: of the content.
        origin: where it comes from, in the order of trying.
        variant: what follows the name and a colon. A path must; patterns of shards must; a number or a name, which the
            reader checks, may.
        stored: names in the cache; empty if nothing is fetched.
        img_size: side of labelled images in pixels, unless another is asked for; None if only the reader knows it.
    """

    kinds: tuple[Kind, ...]
    load: Target
    licence: str = "yours"
    origin: str = "your disk"
    variant: Literal["none", "path", "shards", "number", "name"] = "none"
    stored: tuple[str, ...] = ()
    img_size: int | None = None


def _load() -> None:
    """Import what registers: our own packages, and the installed plug-ins."""
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
    """Make a data set known as `--data NAME`; the arguments are the attributes of `DataEntry`.

    Raises:
        UserError: another data set has the name.
    """
    DATA_SETS.register(DataEntry(**locals()))


RECIPES = Path(__file__).parents[3] / "recipes"
"""In a checkout, its recipes; the wheel has none."""


def register_recipes() -> None:
    """Register the data sets of a checkout's recipes, a package that is imported by its file and not by `sys.path`.

    A folder of the user's may be called `recipes` too, or as another folder of the checkout.
    """
    name, file = "recipes.datasets", RECIPES / "datasets" / "__init__.py"
    if name in sys.modules or not file.is_file():
        return
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=[str(file.parent)])
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])


def list_tasks() -> list[str]:
    """The names of the tasks."""
    return TASKS.names()


def get_task(name: str) -> Any:
    """The class of a task; `UserError` with the nearest names if there is none."""
    return load_object(TASKS[name].task)


def check_model(task: str, model: str) -> None:
    """Raise `UserError` unless the task trains this model, without PyTorch; of others that it may take it decides."""
    if not model:
        raise UserError(f"{task} has no default model; give --model with a name of: tokenmix list models")
    fitting, other = list_models(task=task), TASKS[task].other_models
    if fitting and model not in fitting and not (other is not None and load_object(other)(model)):
        raise incompatible_model_error(task, model)


def incompatible_model_error(task: str, model: str) -> UserError:
    """What the model is for and one that fits the task, or the nearest names if there is no such model."""
    fitting = list_models(task=task)
    if model not in MODELS:
        return unknown_name("model", model, fitting)
    small = next((name for name in fitting if name.endswith("_nano")), next(iter(fitting), "NAME"))
    trained = ", ".join(MODELS[model].tasks)
    return UserError(f"{model} is a model of {trained}, not of {task}; give another, for example --model {small}")
