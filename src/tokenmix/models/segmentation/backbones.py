"""Backbones of segmenters: timm's with a dilated end, and ours, as lists of maps."""

from collections.abc import Mapping
from typing import Any, Literal

import timm
from torch import nn

from tokenmix.errors import UserError, unknown_name
from tokenmix.models.pretrained import timm_model
from tokenmix.registry import list_models

MULTI_GRID = (1, 2, 4)
"""Factors on the dilation of the three blocks of the last stage, as in the released network."""


def make_backbone(name: str, *, pretrained: bool, kwargs: Mapping[str, Any], factory: Mapping[str, Any]) -> Any:
    """A model of timm's or ours under `features_only`: images to maps, finest first, with timm's `feature_info`.

    Raises:
        UserError: no such model, one that returns no maps or lacks an argument, or weights that cannot be fetched.
    """
    if name.split(".")[0] not in timm.list_models():
        raise unknown_name("backbone", name, timm.list_models())
    given = {**kwargs, **{key: value for key, value in factory.items() if value is not None}}
    try:
        return timm_model(name, pretrained=pretrained, features_only=True, **given)
    except (TypeError, RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(
            f"backbone {name!r} cannot be used for segmentation ({' '.join(str(error).split())}); give a convolutional "
            "one that timm dilates, such as resnet50s, or a pyramid for an fpn_seg model"
        ) from None


def make_dilated(
    name: str,
    *,
    output_stride: int,
    stem: Literal["large", "small"],
    in_chans: int,
    pretrained: bool,
    kwargs: Mapping[str, Any],
    factory: Mapping[str, Any],
) -> Any:
    """A timm backbone that returns only its last map, reduced by `output_stride`.

    A ResNet of bottlenecks has the multi-grid of the released network: after the first block of the last stage the
    dilations are multiplied by 2, 4. `stem="small"` is one 3 x 3 convolution of stride 2 in place of a ResNet's
    stem with its pooling, for small images.
    """
    strides = (8, 16, 32) if stem == "large" else (4, 8, 16)
    if output_stride not in strides:
        raise UserError(f"output_stride must be one of {strides} with stem={stem!r}, got {output_stride}")
    if name in list_models(task="image-classification"):
        raise UserError(f"{name} has no dilated form; give a timm backbone, or use an fpn_seg model")
    given = {"in_chans": in_chans, "output_stride": output_stride * (1 if stem == "large" else 2), **kwargs}
    backbone = make_backbone(name, pretrained=pretrained, kwargs={**given, "out_indices": (-1,)}, factory=factory)
    if stem == "small":
        _shrink_stem(backbone, name, in_chans, factory)
    last = getattr(backbone, "layer4", None)
    if last is not None and hasattr(last[0], "conv3") and output_stride <= 16:
        for block, grid in list(zip(last, MULTI_GRID, strict=False))[1:]:
            dilation = block.conv2.dilation[0] * grid
            block.conv2.dilation = block.conv2.padding = (dilation, dilation)
    return backbone


def _shrink_stem(backbone: Any, name: str, in_chans: int, factory: Mapping[str, Any]) -> None:
    if not isinstance(getattr(backbone, "conv1", None), nn.Conv2d):
        raise UserError(f"stem='small' is for a ResNet whose stem is one convolution, such as resnet18, not {name!r}")
    backbone.conv1 = nn.Conv2d(in_chans, backbone.bn1.num_features, 3, 2, padding=1, bias=False, **factory)
    nn.init.kaiming_normal_(backbone.conv1.weight, mode="fan_out", nonlinearity="relu")
    backbone.maxpool = nn.Identity()
