"""A model by name, of our registry or of timm's; and our image classifiers in timm's registry.

So `timm.create_model` and all that works by name there finds them.
"""

import inspect
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import timm
import torch
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model, resolve_pretrained_cfg
from torch import nn

from tokenmix.environment import warn_untested
from tokenmix.errors import UserError, unknown_name
from tokenmix.models.foreign import IMAGENET, load_foreign
from tokenmix.models.pretrained import by_timm, check_source, checkpoint_filter_fn, fetching
from tokenmix.registry import MODELS, TORCHVISION, Arguments, ModelEntry, is_foreign, load_object
from tokenmix.trust import from_caller, typed

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
    # What is of the preset's own backbone or embedding is not for another one.
    dropped = ("backbone_kwargs",) if "backbone" in kwargs else ()
    if kwargs.get("embedding") == "naive":
        dropped += ("stem_dim", "stage_dims", "centres", "num_neighbours")
    preset = {key: value for key, value in entry.arguments.items() if key not in dropped}
    return build(**{**preset, **kwargs})


def open_model(name: str, img_size: int | None = None) -> nn.Module:
    """A model of ours, timm's or torchvision's by name, or what a "module:factory" of the user's returns.

    Raises:
        UserError: as `create_model` and `load_foreign`.
        TypeError: an image size for a network of timm's or torchvision's that is built without one.
    """
    size: dict[str, Any] = {} if img_size is None else {"img_size": img_size}
    if not is_foreign(name):
        return create_model(name, **size)
    if name.startswith(TORCHVISION):
        side: dict[str, Any] = {} if img_size is None else {"image_size": img_size}
        return load_foreign(name, {}, **side)
    return load_foreign(name, IMAGENET, **size)


def create_on_meta(name: str, **kwargs: Any) -> nn.Module:
    """The model with shapes only."""
    with torch.device("meta"):
        return create_model(name, **kwargs)


default_cfgs: dict[str, Any] = {}
"""Read by timm when a name of this module is registered."""


def register_with_timm(entry: ModelEntry) -> None:
    """Register a model that has a `pretrained_cfg`, unless that has been done.

    timm's builder makes the preset, with the image size and number of classes of its `default_cfgs`. It is called with
    the caller's arguments, which win, and what timm passes along: `pretrained`, `pretrained_cfg`,
    `pretrained_cfg_overlay`, `cache_dir`, `features_only`, `out_indices`. `UserError` for weights that do not exist or
    cannot be fetched.
    """
    if entry.pretrained_cfg is None or entry.name in default_cfgs:
        return
    cfg = dict(entry.pretrained_cfg)
    tag = cfg.pop("tag", None)
    default_cfgs.update(generate_default_cfgs({f"{entry.name}.{tag}" if tag else entry.name: cfg}))

    def build(**kwargs: Any) -> nn.Module:
        pretrained, from_caller = kwargs.pop("pretrained", False), _from_caller(kwargs)
        if pretrained:
            overlay = kwargs.get("pretrained_cfg_overlay")
            source = resolve_pretrained_cfg(entry.name, kwargs.get("pretrained_cfg"), overlay)
            check_source(entry.name, source, kwargs.get("cache_dir"))
        with typed(from_caller), fetching(entry.name) if pretrained else nullcontext():
            return build_model_with_cfg(
                load_object(entry.build),
                entry.name,
                pretrained,
                pretrained_filter_fn=checkpoint_filter_fn,
                feature_cfg={"out_indices": 3, "feature_cls": "getter"},
                **{**entry.arguments, **kwargs},
            )

    build.__name__, build.__doc__ = entry.name, entry.about
    register_model(build)


def _from_caller(kwargs: Arguments) -> dict[str, Any]:
    """The arguments without those that timm took from a config.json of a folder or of the hub."""
    cfg, saved = kwargs.get("pretrained_cfg"), kwargs.get("pretrained_model_args", {})
    if not saved and isinstance(cfg, Mapping) and "source" in cfg:
        # Versions of timm before 1.0.31 do not say which arguments are of the file.
        return {}
    ours = {key: value for key, value in kwargs.items() if key not in saved or value is not saved[key]}
    return {key: value for key, value in ours.items() if not key.startswith("pretrained")}
