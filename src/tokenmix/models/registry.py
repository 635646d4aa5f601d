"""A model by name: of the registry, or of timm's."""

import inspect
from typing import Any

import timm
import torch
from torch import nn

from tokenmix.environment import warn_untested
from tokenmix.errors import UserError, unknown_name
from tokenmix.models.pretrained import by_timm
from tokenmix.models.timm_registry import register_with_timm
from tokenmix.registry import MODELS, load_object
from tokenmix.trust import from_caller

# Arguments of timm's factory, next to those of a model.
FACTORY = (
    "pretrained",
    "pretrained_cfg",
    "pretrained_cfg_overlay",
    "checkpoint_path",
    "cache_dir",
    "features_only",
    "out_indices",
    "feature_cls",
)


@from_caller
def create_model(name: str, **kwargs: Any) -> nn.Module:
    """Build a model of `list_models()`, or any of timm's, by name.

    Args:
        name: a name of `list_models()` or of `timm.list_models()`; `"local-dir:PATH"` for a folder that
            `timm.models.save_for_hf` wrote, `"hf-hub:OWNER/NAME"` for one on the hub.
        **kwargs: arguments of the model: `num_classes`, `in_chans`, `img_size`, `mixer`, ...; of an image classifier
            also of timm's factory: `pretrained`, `checkpoint_path`, `features_only`, `out_indices`, ... One that the
            model does not have is a `UserError`, never ignored.

    Raises:
        UserError: no such model or argument; or a file, such as the config of a run folder, names a mixer of somebody
            else's, a model of the hub or of a folder, or a place of weights.
    """
    warn_untested()
    if not isinstance(name, str):
        raise UserError(f"a model is built by its name, one of tokenmix.list_models(), got {name!r}")
    architecture = name.split(".")[0]
    if architecture not in MODELS:
        if timm.is_model(name) or name.startswith(("hf-hub:", "local-dir:")):
            return by_timm(name, **kwargs)
        raise unknown_name("model", name, MODELS.names())
    entry = MODELS[architecture]
    build = load_object(entry.build)
    in_timm = entry.pretrained_cfg is not None
    parameters = inspect.signature(build).parameters
    accepted = {*parameters, *(FACTORY if in_timm else ())}
    unknown = sorted(set(kwargs) - accepted)
    if unknown and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        raise UserError(f"model {name!r} has no argument {unknown[0]!r}; it takes {', '.join(sorted(accepted))}")
    if in_timm:
        register_with_timm(entry)
        return by_timm(name, **kwargs)
    preset = dict(entry.arguments)
    if "backbone" in kwargs:
        # They are of the preset's own backbone.
        preset.pop("backbone_kwargs", None)
    return build(**{**preset, **kwargs})


def create_on_meta(name: str, **kwargs: Any) -> nn.Module:
    """The model with shapes only."""
    with torch.device("meta"):
        return create_model(name, **kwargs)
