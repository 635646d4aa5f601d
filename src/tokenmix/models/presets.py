"""How a preset becomes a model: its numbers, the caller's on top, what timm passes along taken care of."""

from collections.abc import Mapping
from typing import Any, TypeVar

from torch import nn

from tokenmix.errors import UserError

__all__ = ["create"]

Model = TypeVar("Model", bound=nn.Module)


def create(model: type[Model], name: str, numbers: Mapping[str, Any], kwargs: dict[str, Any]) -> Model:
    """Build the preset `name`. timm passes `pretrained` and its config beside the caller's arguments."""
    if kwargs.pop("pretrained", False):
        raise UserError(f"{name} has no pretrained weights; build it with pretrained=False and train it")
    for key in ("pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"):
        kwargs.pop(key, None)
    return model(**{**numbers, **kwargs})
