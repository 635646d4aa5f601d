"""The builders of detectors, over a ResNet or over LaViT."""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenmix.errors import UserError
from tokenmix.layers.memory import Tie
from tokenmix.models.detection.backbones import LaViTBackbone, Norm, ResNetBackbone
from tokenmix.models.detection.detector import IMAGENET, Detector
from tokenmix.models.detection.networks import Answers, HeadSizes, ImageScale, Kind
from tokenmix.models.stems import pair


def resnet_detector(
    *,
    kind: Kind,
    heads: Mapping[str, Any] | None = None,
    backbone: str = "resnet50",
    backbone_kwargs: Mapping[str, Any] | None = None,
    levels: Sequence[int] = (1, 2, 3, 4),
    mixer: str = "external",
    num_slots: int | None = None,
    tie: Tie | None = None,
    norm: Norm = "batch",
    min_size: int | Sequence[int] = 800,
    max_size: int = 1333,
    multiple: int = 32,
    score: float = 0.05,
    nms: float = 0.5,
    detections: int = 100,
    num_classes: int = 80,
    pretrained_backbone: bool = False,
    frozen_stages: int = 0,
    img_size: int | tuple[int, int] = 800,
    image_mean: Sequence[float] = IMAGENET[0],
    image_std: Sequence[float] = IMAGENET[1],
    device: Any = None,
) -> Detector:
    """A detector over `ResNetBackbone`: images of any size, the shorter side brought to `min_size`.

    `norm="frozen"` with `pretrained_backbone=True` and `frozen_stages=2` is what the published 1x schedules do.

    Args:
        kind: which of torchvision's detectors.
        heads: fields of `HeadSizes`.
        backbone, backbone_kwargs, levels, mixer, num_slots, tie, norm, pretrained_backbone, frozen_stages: of
            `ResNetBackbone`.
        min_size, max_size, multiple: of `ImageScale`.
        score, nms, detections: of `Answers`.
        num_classes: without background.
        img_size: size for which `macs` counts.
        image_mean, image_std: of the images' channels, in 0..1.
        device: of the weights.
    """
    body = ResNetBackbone(
        backbone=backbone,
        backbone_kwargs=backbone_kwargs,
        pretrained_backbone=pretrained_backbone,
        levels=levels,
        mixer=mixer,
        num_slots=num_slots,
        tie=tie,
        norm=norm,
        frozen_stages=frozen_stages,
        device=device,
    )
    return Detector(
        kind,
        body,
        HeadSizes(**heads or {}),
        num_classes=num_classes,
        resize=ImageScale(min_size=min_size, max_size=max_size, multiple=multiple),
        fixed_size=False,
        img_size=pair(img_size),
        answers=Answers(score=score, nms=nms, detections=detections),
        mean=image_mean,
        std=image_std,
        device=device,
    )


def lavit_detector(
    *,
    kind: Kind,
    heads: Mapping[str, Any] | None = None,
    backbone: str = "lavit_tiny",
    backbone_kwargs: Mapping[str, Any] | None = None,
    levels: Sequence[int] = (0, 1, 2, 3),
    score: float = 0.05,
    nms: float = 0.5,
    detections: int = 100,
    num_classes: int = 80,
    img_size: int | tuple[int, int] = 512,
    image_mean: Sequence[float] = IMAGENET[0],
    image_std: Sequence[float] = IMAGENET[1],
    device: Any = None,
) -> Detector:
    """A detector over `LaViTBackbone`, which takes only one size.

    The longer side of an image becomes that of the square, and the rest is padded, so that nothing is stretched.
    The arguments are those of `resnet_detector`.
    """
    size = pair(img_size)
    if size[0] != size[1]:
        raise UserError(
            f"a detector with a LaViT backbone takes square images, not {size[0]} x {size[1]}; give one side"
        )
    body = LaViTBackbone(
        backbone=backbone, backbone_kwargs=backbone_kwargs, img_size=size, levels=levels, device=device
    )
    return Detector(
        kind,
        body,
        HeadSizes(**heads or {}),
        num_classes=num_classes,
        resize=ImageScale(min_size=size[0], max_size=size[0], multiple=size[0]),
        fixed_size=True,
        img_size=size,
        answers=Answers(score=score, nms=nms, detections=detections),
        mean=image_mean,
        std=image_std,
        device=device,
    )
