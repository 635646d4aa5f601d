"""What to say of a model that a task cannot train, and of arguments of a model that are set elsewhere."""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenmix.errors import UserError, unknown_name
from tokenmix.models.families import task_of
from tokenmix.registry import TEXT_TASKS

__all__ = ["check_own", "unfit", "what_for"]


def what_for(model: str) -> str | None:
    """What a model is for: its task, of a text model all of text's; None if there is no such model."""
    # A task on images does without transformers until it has to tell a name of text apart.
    from tokenmix.tasks.text import models as text

    return f"text ({', '.join(sorted(TEXT_TASKS))})" if model in text.list_configs() else task_of(model)


def unfit(kind: str, model: str, task: str, fitting: Sequence[str]) -> UserError:
    """The error that tells what the model is for and one that fits, or the nearest names if there is no such model.

    Args:
        kind: what a model of this task is called.
        model: the name that was given.
        task: the name of the task.
        fitting: the names that it takes.
    """
    other = what_for(model)
    if other is None:
        return unknown_name(kind, model, fitting)
    small = next((name for name in fitting if name.endswith("_nano")), fitting[0])
    return UserError(f"{model} is a model of {other}, not of {task}; give another, for example --model {small}")


def check_own(model_kwargs: Mapping[str, Any], elsewhere: Mapping[str, str]) -> None:
    """Raise `UserError` for an argument of the model that is set otherwise; `elsewhere` says by which option."""
    clash = next((key for key in elsewhere if key in model_kwargs), None)
    if clash is not None:
        raise UserError(f"model argument {clash}={model_kwargs[clash]!r} is set elsewhere; use {elsewhere[clash]}")
