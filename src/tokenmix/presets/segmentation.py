"""Segmenters by name: the class and the numbers of each."""

from typing import Any

from tokenmix.registry import MODELS, ModelEntry, Published


def _entry(name: str, build: str, about: str, published: Published | None = None, **arguments: Any) -> ModelEntry:
    return ModelEntry(
        name=name,
        tasks=("semantic-segmentation",),
        about=about,
        build=f"tokenmix.models.segmentation.{build}",
        arguments=arguments,
        published=published,
    )


EANET, FPN = "eanet:EANetSegmenter", "fpn:FPNSegmenter"
THIN: dict[str, Any] = {"layers": (1, 1, 1, 1), "channels": (32, 32, 64, 128)}
NANO: dict[str, Any] = {
    "img_size": 64,
    "upsampling": "pixels",
    "backbone": "resnet18",
    "backbone_kwargs": THIN,
    "width": 64,
    "head_width": 64,
}

BLOCK = Published(0.55, None, None, "arXiv:2105.02358, from memory, not looked up", part="block")

MODELS.register(
    _entry("eanet_seg_resnet50", EANET, "dilated ResNet-50 and the EANet block", BLOCK, backbone="resnet50s"),
    _entry("eanet_seg_resnet101", EANET, "dilated ResNet-101 and the EANet block", BLOCK, backbone="resnet101s"),
    _entry("eanet_seg_nano", EANET, "the EANet block at nano size", stem="small", output_stride=4, **NANO),
    _entry("fpn_seg_resnet50", FPN, "feature pyramid over ResNet-50", backbone="resnet50"),
    _entry("fpn_seg_lavit_tiny", FPN, "feature pyramid over LaViT-T", backbone="lavit_tiny", img_size=224),
    _entry("fpn_seg_lavit_small", FPN, "feature pyramid over LaViT-S", backbone="lavit_small", img_size=224),
    _entry("fpn_seg_lavit_base", FPN, "feature pyramid over LaViT-B", backbone="lavit_base", img_size=224),
    _entry("fpn_seg_nano", FPN, "feature pyramid at nano size", **NANO),
)
