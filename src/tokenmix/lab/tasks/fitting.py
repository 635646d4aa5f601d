"""Whether a task trains a model, and arguments of a model that are set elsewhere."""

from collections.abc import Mapping
from typing import Any

from tokenmix.errors import UserError, unknown_name
from tokenmix.lab.registry import TASKS
from tokenmix.registry import MODELS, list_models, load_object


def task_of_model(model: str) -> str | None:
    """The tasks that train a model of the registry, as a list in words; None if there is no such model."""
    return ", ".join(MODELS[model].tasks) if model in MODELS else None


def check_model(task: str, model: str) -> None:
    """Raise `UserError` unless the model is one of the registry that this task trains."""
    if model not in list_models(task=task):
        raise incompatible_model_error(task, model)


def check_model_name(task: str, model: str) -> None:
    """The same without PyTorch, as far as that goes: where other models may be meant, the task itself decides."""
    other = TASKS[task].other_models
    if list_models(task=task) and not (other is not None and load_object(other)(model)):
        check_model(task, model)


def incompatible_model_error(task: str, model: str) -> UserError:
    """What the model is for and one that fits the task, or the nearest names if there is no such model."""
    fitting, other = list_models(task=task), task_of_model(model)
    if other is None:
        return unknown_name("model", model, fitting)
    small = next((name for name in fitting if name.endswith("_nano")), next(iter(fitting), "NAME"))
    return UserError(f"{model} is a model of {other}, not of {task}; give another, for example --model {small}")


def check_own(model_kwargs: Mapping[str, Any], elsewhere: Mapping[str, str]) -> None:
    """Raise `UserError` for an argument of the model that is set otherwise; `elsewhere` says by which option."""
    clash = next((key for key in elsewhere if key in model_kwargs), None)
    if clash is not None:
        raise UserError(f"model argument {clash}={model_kwargs[clash]!r} is set elsewhere; use {elsewhere[clash]}")
