"""Detectors by name: the network, its heads and the other numbers of each."""

from typing import Any

from tokenmix.registry import MODELS, ModelEntry


def _entry(name: str, kind: str, body: str, about: str, heads: dict[str, Any], **arguments: Any) -> ModelEntry:
    return ModelEntry(
        name=name,
        tasks=("instance-segmentation",) if kind == "mask-rcnn" else ("detection",),
        about=about,
        build=f"tokenmix.models.detection.builders:{body}_detector",
        arguments={"kind": kind, "heads": heads, **arguments},
    )


RETINA: dict[str, Any] = {"octaves": 3, "extra": "p6p7"}
# For objects of 8 to 64 px: maps of stride 4, 8 and 16, and nothing coarser.
THIN: dict[str, Any] = {"layers": (1, 1, 1, 1), "channels": (32, 48, 64, 96), "output_stride": 16}
NANO: dict[str, Any] = {
    "backbone": "resnet18",
    "backbone_kwargs": THIN,
    "norm": "group",
    "levels": (1, 2, 4),
    "min_size": 128,
    "max_size": 256,
    "multiple": 16,
    "img_size": 128,
    "image_mean": (0.5, 0.5, 0.5),
    "image_std": (0.25, 0.25, 0.25),
}
SMALL: dict[str, Any] = {
    "width": 48,
    "anchors": (12, 24, 48),
    "extra": "none",
    "hidden": 128,
    "mask": (48, 48),
    "proposals": (300, 200),
    "anchors_learnt": 128,
    "boxes_learnt": 64,
}
RETINA_SMALL = {**SMALL, "anchors": (12, 32), "octaves": 3}
RETINA_NANO = {**NANO, "levels": (2, 4)}

MODELS.register(
    _entry("retinanet_resnet50", "retinanet", "resnet", "RetinaNet over ResNet-50", RETINA, levels=(2, 3, 4)),
    _entry("faster_rcnn_resnet50", "faster-rcnn", "resnet", "Faster R-CNN over ResNet-50", {}),
    _entry("mask_rcnn_resnet50", "mask-rcnn", "resnet", "Mask R-CNN over ResNet-50", {}),
    _entry("retinanet_lavit_tiny", "retinanet", "lavit", "RetinaNet over LaViT-T", RETINA, levels=(1, 2, 3)),
    _entry(
        "retinanet_lavit_small",
        "retinanet",
        "lavit",
        "RetinaNet over LaViT-S",
        RETINA,
        levels=(1, 2, 3),
        backbone="lavit_small",
    ),
    _entry("mask_rcnn_lavit_tiny", "mask-rcnn", "lavit", "Mask R-CNN over LaViT-T", {}),
    _entry("mask_rcnn_lavit_small", "mask-rcnn", "lavit", "Mask R-CNN over LaViT-S", {}, backbone="lavit_small"),
    _entry("retinanet_nano", "retinanet", "resnet", "RetinaNet at nano size", RETINA_SMALL, **RETINA_NANO),
    _entry("faster_rcnn_nano", "faster-rcnn", "resnet", "Faster R-CNN at nano size", SMALL, **NANO),
    _entry("mask_rcnn_nano", "mask-rcnn", "resnet", "Mask R-CNN at nano size", SMALL, **NANO),
)
