"""How a preset becomes a model, by timm's builder: its numbers, the caller's on top, and the settings of its data."""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, TypeVar

from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, resolve_pretrained_cfg
from torch import nn

from tokenmix.models.pretrained import check_source, checkpoint_filter_fn, fetching

__all__ = ["HALF", "IMAGENET", "SMALL", "create"]

Model = TypeVar("Model", bound=nn.Module)

_SHARED: dict[str, Any] = {"fixed_input_size": True, "classifier": "head", "license": "apache-2.0"}
HALF: dict[str, Any] = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
IMAGENET: dict[str, Any] = {**_SHARED, "mean": IMAGENET_DEFAULT_MEAN, "std": IMAGENET_DEFAULT_STD}
"""What timm is told of a model for 224 px: (3, 224, 224), 1000 classes, bicubic, crop 0.875 unless said otherwise."""
SMALL: dict[str, Any] = {
    **_SHARED, **HALF, "input_size": (3, 32, 32), "num_classes": 10, "crop_pct": 1.0, "interpolation": "bilinear",
}  # fmt: skip
"""The same of a nano model: small images, whole."""


def create(model: type[Model], name: str, numbers: Mapping[str, Any], kwargs: dict[str, Any]) -> Model:
    """Build the preset `name`.

    Args:
        model: the class.
        name: its name, under which the `default_cfgs` of its module has its data settings and the source of weights.
        numbers: what makes the preset; image size and number of classes come from `default_cfgs`.
        kwargs: the caller's arguments, which win, and what timm passes along: `pretrained`, `pretrained_cfg`,
            `pretrained_cfg_overlay`, `cache_dir`, `features_only`, `out_indices`.

    Raises:
        UserError: weights that do not exist or cannot be fetched.
    """
    pretrained = kwargs.pop("pretrained", False)
    if pretrained:
        source = resolve_pretrained_cfg(name, kwargs.get("pretrained_cfg"), kwargs.get("pretrained_cfg_overlay"))
        check_source(name, source, kwargs.get("cache_dir"))
    with fetching(name) if pretrained else nullcontext():
        return build_model_with_cfg(
            model,
            name,
            pretrained,
            pretrained_filter_fn=checkpoint_filter_fn,
            feature_cfg={"out_indices": 3, "feature_cls": "getter"},
            **{**numbers, **kwargs},
        )
