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
FAMILIES = ("mixer_net", "gmlp", "eamlp", "lavit", "eanet")
# Arguments of timm's factory, beside those of a model.
FACTORY = (
    "pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir", "features_only",
    "out_indices", "feature_cls",
)  # fmt: skip


def list_models(pattern: str = "*") -> list[str]:
    """The names of our models that match a glob, for example `list_models("eamlp*")`."""
    names = [name for family in FAMILIES for name in timm.list_models(module=family)]
    return [name for name in names if fnmatch.fnmatch(name, pattern)]


def create_model(name: str, **kwargs: Any) -> nn.Module:
    """Build one of our models, or any model of timm's, by name.

    Args:
        name: a name of `list_models()` or of `timm.list_models()`; `"local-dir:PATH"` for a folder that
            `timm.models.save_for_hf` wrote, `"hf-hub:OWNER/NAME"` for one on the hub.
        **kwargs: arguments of the model: `num_classes`, `in_chans`, `img_size`, `drop_path_rate`, ..., or of timm's
            factory: `pretrained`, `checkpoint_path`, `features_only`, `out_indices`, ... One that neither has is a
            `UserError`, never ignored.
    """
    if name.split(".")[0] not in list_models():
        if timm.is_model(name) or name.startswith(("hf-hub:", "local-dir:")):
            return timm.create_model(name, **kwargs)
        raise unknown_name("model", name, list_models())
    _check_arguments(name, kwargs)
    return timm.create_model(name, **kwargs)


def _check_arguments(name: str, kwargs: dict[str, Any]) -> None:
    model = typing.get_type_hints(model_entrypoint(name.split(".")[0]))["return"]
    accepted = {*inspect.signature(model).parameters, *FACTORY}
    unknown = sorted(set(kwargs) - accepted)
    if unknown:
        known = ", ".join(sorted(accepted))
        raise UserError(f"model {name!r} has no argument {unknown[0]!r}; it takes {known}")
