"""The builders of detectors, over a ResNet or over LaViT."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenmix.errors import UserError
from tokenmix.layers.memory import Tie
from tokenmix.models.architecture import Architecture
from tokenmix.models.context import ContextName
from tokenmix.models.stems import pair
from tokenmix.tasks.detection.models.backbones import LaViTBackbone, Norm, ResNetBackbone
from tokenmix.tasks.detection.models.detector import IMAGENET, Detector
from tokenmix.tasks.detection.models.networks import Answers, HeadSizes, ImageScale, Kind


@dataclass(frozen=True, kw_only=True)
class DetectorArchitecture(Architecture):
    """Architecture of a detector, over either backbone.

    Attributes:
        kind: which of torchvision's detectors.
        heads: fields of `HeadSizes`.
        backbone: name of the network under the pyramid.
        backbone_kwargs: arguments of its constructor.
        levels: which of its maps are returned.
    """

    kind: Kind
    heads: Mapping[str, Any] | None = None
    backbone: str
    backbone_kwargs: Mapping[str, Any] | None = None
    levels: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class ResNetDetectorArchitecture(DetectorArchitecture):
    """Architecture of a detector over a ResNet; the attributes are arguments of `ResNetBackbone`."""

    backbone: str = "resnet50"
    levels: Sequence[int] = (1, 2, 3, 4)
    mixer: ContextName = "external"
    num_slots: int | None = None
    tie: Tie | None = None
    norm: Norm = "batch"


@dataclass(frozen=True, kw_only=True)
class LaViTDetectorArchitecture(DetectorArchitecture):
    """Architecture of a detector over LaViT; the attributes are arguments of `LaViTBackbone`."""

    backbone: str = "lavit_tiny"
    levels: Sequence[int] = (0, 1, 2, 3)


def resnet_detector(
    architecture: ResNetDetectorArchitecture,
    scale: ImageScale,
    answers: Answers,
    *,
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
    """
    a = architecture
    body = ResNetBackbone(
        backbone=a.backbone, backbone_kwargs=a.backbone_kwargs, pretrained_backbone=pretrained_backbone,
        levels=a.levels, mixer=a.mixer, num_slots=a.num_slots, tie=a.tie, norm=a.norm, frozen_stages=frozen_stages,
        device=device,
    )  # fmt: skip
    return Detector(
        a.kind, body, HeadSizes(**a.heads or {}), num_classes=num_classes, resize=scale, fixed_size=False,
        img_size=pair(img_size), answers=answers, mean=image_mean, std=image_std, device=device,
    )  # fmt: skip


def lavit_detector(
    architecture: LaViTDetectorArchitecture,
    answers: Answers,
    *,
    num_classes: int = 80,
    img_size: int | tuple[int, int] = 512,
    image_mean: Sequence[float] = IMAGENET[0],
    image_std: Sequence[float] = IMAGENET[1],
    device: Any = None,
) -> Detector:
    """A detector over `LaViTBackbone`, which takes only one size.

    The longer side of an image becomes that of the square, and the rest is padded, so that nothing is stretched.
    """
    a, size = architecture, pair(img_size)
    if size[0] != size[1]:
        raise UserError(
            f"a detector with a LaViT backbone takes square images, not {size[0]} x {size[1]}; give one side"
        )
    body = LaViTBackbone(
        backbone=a.backbone, backbone_kwargs=a.backbone_kwargs, img_size=size, levels=a.levels, device=device
    )
    square = ImageScale(min_size=size[0], max_size=size[0], multiple=size[0])
    return Detector(
        a.kind, body, HeadSizes(**a.heads or {}), num_classes=num_classes, resize=square, fixed_size=True,
        img_size=size, answers=answers, mean=image_mean, std=image_std, device=device,
    )  # fmt: skip
