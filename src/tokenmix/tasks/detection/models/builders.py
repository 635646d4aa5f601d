"""The builders of detectors, over a ResNet or over LaViT."""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenmix.errors import UserError
from tokenmix.layers.memory import Tie
from tokenmix.models.stems import pair
from tokenmix.tasks.detection.models.backbones import LaViTBackbone, Norm, ResNetBackbone
from tokenmix.tasks.detection.models.detector import IMAGENET, Detector, Resize
from tokenmix.tasks.detection.models.networks import Answers, HeadSizes, Kind
from tokenmix.tasks.segmentation.models.blocks import ContextName

__all__ = ["lavit_detector", "resnet_detector"]


def resnet_detector(
    kind: Kind,
    heads: Mapping[str, Any] | None = None,
    *,
    num_classes: int = 80,
    mixer: ContextName = "external",
    num_slots: int | None = None,
    tie: Tie | None = None,
    backbone: str = "resnet50",
    backbone_kwargs: Mapping[str, Any] | None = None,
    pretrained_backbone: bool = False,
    norm: Norm = "batch",
    frozen_stages: int = 0,
    levels: Sequence[int] = (1, 2, 3, 4),
    min_size: int | Sequence[int] = 800,
    max_size: int = 1333,
    multiple: int = 32,
    img_size: int | tuple[int, int] = 800,
    score: float = 0.05,
    nms: float = 0.5,
    detections: int = 100,
    image_mean: Sequence[float] = IMAGENET[0],
    image_std: Sequence[float] = IMAGENET[1],
    device: Any = None,
) -> Detector:
    """A detector over `ResNetBackbone`: images of any size, the shorter side brought to `min_size`.

    `heads` are fields of `HeadSizes`.
    `norm="frozen"` with `pretrained_backbone=True` and `frozen_stages=2` is what the published 1x schedules do.
    """
    body = ResNetBackbone(
        backbone=backbone, backbone_kwargs=backbone_kwargs, pretrained_backbone=pretrained_backbone, levels=levels,
        mixer=mixer, num_slots=num_slots, tie=tie, norm=norm, frozen_stages=frozen_stages, device=device,
    )  # fmt: skip
    sides = (min_size,) if isinstance(min_size, int) else tuple(min_size)
    return Detector(
        kind, body, HeadSizes(**heads or {}), num_classes=num_classes, resize=Resize(sides, max_size, multiple),
        fixed_size=False, img_size=pair(img_size), answers=Answers(score, nms, detections), mean=image_mean,
        std=image_std, device=device,
    )  # fmt: skip


def lavit_detector(
    kind: Kind,
    heads: Mapping[str, Any] | None = None,
    *,
    num_classes: int = 80,
    backbone: str = "lavit_tiny",
    backbone_kwargs: Mapping[str, Any] | None = None,
    levels: Sequence[int] = (0, 1, 2, 3),
    img_size: int | tuple[int, int] = 512,
    score: float = 0.05,
    nms: float = 0.5,
    detections: int = 100,
    image_mean: Sequence[float] = IMAGENET[0],
    image_std: Sequence[float] = IMAGENET[1],
    device: Any = None,
) -> Detector:
    """A detector over `LaViTBackbone`: images are brought into a square of `img_size`, see `Resize.square`."""
    size = pair(img_size)
    if size[0] != size[1]:
        raise UserError(f"a detector over LaViT looks at squares, not at {size[0]} x {size[1]}; give one side")
    body = LaViTBackbone(
        backbone=backbone, backbone_kwargs=backbone_kwargs, img_size=size, levels=levels, device=device
    )
    return Detector(
        kind, body, HeadSizes(**heads or {}), num_classes=num_classes, resize=Resize.square(size[0]),
        fixed_size=True, img_size=size, answers=Answers(score, nms, detections), mean=image_mean, std=image_std,
        device=device,
    )  # fmt: skip
