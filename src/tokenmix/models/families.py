"""Models by name, of whatever kind: classifiers from timm's registry, and the families with makers of their own."""

import importlib
import inspect
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from typing import Any, NamedTuple

import timm
from torch import nn

from tokenmix.errors import UserError, unknown_name
from tokenmix.models.registry import create_model, list_models

__all__ = ["FAMILIES", "Family", "build_model", "list_all_models", "task_of"]


class Family(NamedTuple):
    """Where a family's names are listed, where one of them is built, and what it is for.

    Attributes:
        module: that has both.
        names: function that lists them.
        create: function that builds one.
        tasks: the task of the names that match a glob; the first match counts.
    """

    module: str
    names: str
    create: str
    tasks: Mapping[str, str]

    def list_names(self) -> list[str]:
        """The names of this family."""
        return getattr(importlib.import_module(self.module), self.names)()


FAMILIES: dict[str, Family] = {
    "segmentation": Family(
        "tokenmix.tasks.segmentation.models", "list_segmenters", "create_segmenter", {"*": "semantic-segmentation"}
    ),
    "detection": Family(
        "tokenmix.tasks.detection.models",
        "list_detectors",
        "create_detector",
        {"mask_rcnn_*": "instance-segmentation", "*": "detection"},
    ),
    "points": Family(
        "tokenmix.tasks.points.models",
        "list_point_models",
        "create_point_model",
        {"*_part*": "point-segmentation", "*": "point-classification"},
    ),
    "gan": Family("tokenmix.tasks.generation.models", "list_gans", "create_gan", {"*": "image-generation"}),
}


def list_all_models() -> list[str]:
    """Classifiers, then the models of every family."""
    found = list_models()
    for family in FAMILIES.values():
        found += family.list_names()
    return found


def task_of(name: str) -> str | None:
    """The task that a model of `list_all_models()` or of timm's is for, None if there is no such model."""
    for family in FAMILIES.values():
        if name in family.list_names():
            return next(task for pattern, task in family.tasks.items() if fnmatch(name, pattern))
    return "image-classification" if timm.is_model(name) else None


def build_model(name: str, **kwargs: Any) -> nn.Module:
    """A model of `list_all_models()`, or one of timm's, by the maker of its family; `UserError` if there is none."""
    for family in FAMILIES.values():
        if name in family.list_names():
            return _create(getattr(importlib.import_module(family.module), family.create), name, kwargs)
    elsewhere = timm.is_model(name) or name.startswith(("hf-hub:", "local-dir:"))
    if not elsewhere and name.split(".")[0] not in list_models():
        raise unknown_name("model", name, list_all_models())
    return create_model(name, **kwargs)


def _create(create: Callable[..., nn.Module], name: str, kwargs: Mapping[str, Any]) -> nn.Module:
    """Call a family's maker; those that take any argument check it themselves."""
    accepted = inspect.signature(create).parameters
    unknown = next((key for key in kwargs if key not in accepted), None)
    if unknown is not None and all(p.kind is not p.VAR_KEYWORD for p in accepted.values()):
        raise UserError(f"model {name!r} has no argument {unknown!r}; it takes {', '.join(sorted(accepted))}")
    return create(name, **kwargs)
