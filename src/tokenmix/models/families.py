"""Models by name, of whatever kind: classifiers from timm's registry, and the families with makers of their own."""

import importlib
from typing import Any, NamedTuple

import timm
from torch import nn

from tokenmix.errors import unknown_name
from tokenmix.models.registry import create_model, list_models

__all__ = ["FAMILIES", "Family", "build_model", "list_all_models"]


class Family(NamedTuple):
    """Where a family's names are listed, and where one of them is built."""

    module: str
    names: str
    create: str


FAMILIES: dict[str, Family] = {
    "segmentation": Family("tokenmix.models.segmentation", "list_segmenters", "create_segmenter"),
    "detection": Family("tokenmix.models.detection", "list_detectors", "create_detector"),
    "gan": Family("tokenmix.models.gan", "list_gans", "create_gan"),
}


def list_all_models() -> list[str]:
    """Classifiers, then the models of every family."""
    found = list_models()
    for family in FAMILIES.values():
        found += getattr(importlib.import_module(family.module), family.names)()
    return found


def build_model(name: str, **kwargs: Any) -> nn.Module:
    """A model of `list_all_models()`, or one of timm's, by the maker of its family; `UserError` if there is none."""
    for family in FAMILIES.values():
        module = importlib.import_module(family.module)
        if name in getattr(module, family.names)():
            return getattr(module, family.create)(name, **kwargs)
    elsewhere = timm.is_model(name) or name.startswith(("hf-hub:", "local-dir:"))
    if not elsewhere and name.split(".")[0] not in list_models():
        raise unknown_name("model", name, list_all_models())
    return create_model(name, **kwargs)
