"""Our image classifiers in timm's registry: `timm.create_model` and all that works by name there finds them."""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from timm.models import build_model_with_cfg, generate_default_cfgs, register_model, resolve_pretrained_cfg
from torch import nn

from tokenmix.models.pretrained import check_source, checkpoint_filter_fn, fetching
from tokenmix.registry import ModelEntry, load_object
from tokenmix.trust import typed

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
        with typed(_from_caller(kwargs)):
            return build_here(kwargs)

    def build_here(kwargs: dict[str, Any]) -> nn.Module:
        pretrained = kwargs.pop("pretrained", False)
        if pretrained:
            overlay = kwargs.get("pretrained_cfg_overlay")
            source = resolve_pretrained_cfg(entry.name, kwargs.get("pretrained_cfg"), overlay)
            check_source(entry.name, source, kwargs.get("cache_dir"))
        with fetching(entry.name) if pretrained else nullcontext():
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


def _from_caller(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments without those that timm took from a config.json of a folder or of the hub."""
    cfg, saved = kwargs.get("pretrained_cfg"), kwargs.get("pretrained_model_args", {})
    if not saved and isinstance(cfg, Mapping) and "source" in cfg:
        # Versions of timm before 1.0.31 do not say which arguments are of the file.
        return {}
    ours = {key: value for key, value in kwargs.items() if key not in saved or value is not saved[key]}
    return {key: value for key, value in ours.items() if not key.startswith("pretrained")}
