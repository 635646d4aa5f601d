"""Models by name: ours, kept in timm's registry."""

import fnmatch
import inspect
import typing
from typing import Any

import timm
from timm.models import model_entrypoint
from torch import nn

from tokenmix.errors import UserError, unknown_name

__all__ = ["create_model", "list_models"]

# The modules of this package whose presets are registered, in the order in which they are listed.
FAMILIES = ("mixer_net", "gmlp", "eamlp")


def list_models(pattern: str = "*") -> list[str]:
    """The names of our models that match a glob, for example `list_models("eamlp*")`."""
    names = [name for family in FAMILIES for name in timm.list_models(module=family)]
    return [name for name in names if fnmatch.fnmatch(name, pattern)]


def create_model(name: str, **kwargs: Any) -> nn.Module:
    """Build one of our models, or any model of timm's, by name.

    Args:
        name: a name of `list_models()`, or of `timm.list_models()`.
        **kwargs: arguments of the model: `num_classes`, `in_chans`, `img_size`, `drop_path_rate`, ... One that it does
            not have is a `UserError`, never ignored.
    """
    if name not in list_models():
        if timm.is_model(name):
            return timm.create_model(name, **kwargs)
        raise unknown_name("model", name, list_models())
    _check_arguments(name, kwargs)
    return timm.create_model(name, **kwargs)


def _check_arguments(name: str, kwargs: dict[str, Any]) -> None:
    model = typing.get_type_hints(model_entrypoint(name))["return"]
    accepted = {*inspect.signature(model).parameters, "pretrained"}
    unknown = sorted(set(kwargs) - accepted)
    if unknown:
        known = ", ".join(sorted(accepted))
        raise UserError(f"model {name!r} has no argument {unknown[0]!r}; it takes {known}")
