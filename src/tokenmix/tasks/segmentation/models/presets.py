"""Segmenters by name: the numbers of each in one literal table."""

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenmix.errors import unknown_name
from tokenmix.models.arguments import preset_arguments
from tokenmix.tasks.segmentation.models.base import Segmenter
from tokenmix.tasks.segmentation.models.eanet import EANetSegmenter
from tokenmix.tasks.segmentation.models.fpn import FPNSegmenter

__all__ = ["create_segmenter", "list_segmenters"]


@dataclass(frozen=True)
class Preset:
    """A class and what it is built with."""

    kind: type[Segmenter]
    numbers: Mapping[str, Any] = field(default_factory=dict)


NANO: dict[str, Any] = {"img_size": 64, "upsampling": "pixels"}
THIN: dict[str, Any] = {"layers": (1, 1, 1, 1), "channels": (32, 32, 64, 128)}
PRESETS: dict[str, Preset] = {
    "eanet_seg_resnet50": Preset(EANetSegmenter, {"backbone": "resnet50s"}),
    "eanet_seg_resnet101": Preset(EANetSegmenter, {"backbone": "resnet101s"}),
    "eanet_seg_nano": Preset(
        EANetSegmenter,
        {
            **NANO, "backbone": "resnet18", "backbone_kwargs": THIN, "stem": "small", "output_stride": 4, "width": 64,
            "head_width": 64,
        },
    ),
    "fpn_seg_resnet50": Preset(FPNSegmenter, {"backbone": "resnet50"}),
    "fpn_seg_lavit_tiny": Preset(FPNSegmenter, {"backbone": "lavit_tiny", "img_size": 224}),
    "fpn_seg_lavit_small": Preset(FPNSegmenter, {"backbone": "lavit_small", "img_size": 224}),
    "fpn_seg_lavit_base": Preset(FPNSegmenter, {"backbone": "lavit_base", "img_size": 224}),
    "fpn_seg_nano": Preset(
        FPNSegmenter,
        {**NANO, "backbone": "resnet18", "backbone_kwargs": THIN, "width": 64, "head_width": 64},
    ),
}  # fmt: skip


def list_segmenters(pattern: str = "*") -> list[str]:
    """The names of segmenters that match a glob."""
    return [name for name in PRESETS if fnmatch.fnmatch(name, pattern)]


def create_segmenter(name: str, **kwargs: Any) -> Segmenter:
    """Build a segmenter by name.

    Args:
        name: one of `list_segmenters()`.
        **kwargs: arguments of its class, `EANetSegmenter` or `FPNSegmenter`: `num_classes`, `mixer`, `num_slots`,
            `backbone`, `output_stride`, ...

    Raises:
        UserError: no such name or argument, or arguments that do not fit each other.
    """
    if name not in PRESETS:
        raise unknown_name("segmenter", name, PRESETS)
    preset = PRESETS[name]
    return preset.kind(**preset_arguments(name, preset.kind, preset.numbers, kwargs))
