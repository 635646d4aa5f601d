"""Detectors by name: the numbers of each in one literal table."""

import fnmatch
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tokenmix.errors import UserError, unknown_name
from tokenmix.layers.memory import Tie
from tokenmix.models.arguments import preset_arguments
from tokenmix.models.stems import pair
from tokenmix.tasks.detection.models.bodies import LaViTBody, Norm, ResNetBody
from tokenmix.tasks.detection.models.detector import IMAGENET, Detector, Resize
from tokenmix.tasks.detection.models.networks import Answers, HeadSizes, Kind
from tokenmix.tasks.segmentation.models.blocks import ContextName

__all__ = ["PRESETS", "create_detector", "lavit_detector", "list_detectors", "preset_of", "resnet_detector"]


def resnet_detector(
    kind: Kind,
    sizes: HeadSizes,
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
    """A detector over `ResNetBody`: images of any size, the shorter side brought to `min_size`.

    `norm="frozen"` with `pretrained_backbone=True` and `frozen_stages=2` is what the published 1x schedules do.
    """
    body = ResNetBody(
        backbone=backbone, backbone_kwargs=backbone_kwargs, pretrained_backbone=pretrained_backbone, levels=levels,
        mixer=mixer, num_slots=num_slots, tie=tie, norm=norm, frozen_stages=frozen_stages, device=device,
    )  # fmt: skip
    sides = (min_size,) if isinstance(min_size, int) else tuple(min_size)
    return Detector(
        kind, body, sizes, num_classes=num_classes, resize=Resize(sides, max_size, multiple), fixed_size=False,
        img_size=pair(img_size), answers=Answers(score, nms, detections), mean=image_mean, std=image_std, device=device,
    )  # fmt: skip


def lavit_detector(
    kind: Kind,
    sizes: HeadSizes,
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
    """A detector over `LaViTBody`: images are brought into a square of `img_size`, see `Resize.square`."""
    size = pair(img_size)
    if size[0] != size[1]:
        raise UserError(f"a detector over LaViT looks at squares, not at {size[0]} x {size[1]}; give one side")
    body = LaViTBody(backbone=backbone, backbone_kwargs=backbone_kwargs, img_size=size, levels=levels, device=device)
    return Detector(
        kind, body, sizes, num_classes=num_classes, resize=Resize.square(size[0]), fixed_size=True, img_size=size,
        answers=Answers(score, nms, detections), mean=image_mean, std=image_std, device=device,
    )  # fmt: skip


@dataclass(frozen=True)
class Preset:
    """A builder and what it is given."""

    build: Callable[..., Detector]
    kind: Kind
    sizes: HeadSizes = field(default_factory=HeadSizes)
    numbers: Mapping[str, Any] = field(default_factory=dict)

    @property
    def fixed_size(self) -> bool:
        """Whether it looks at squares of one size alone."""
        return self.build is lavit_detector

    def argument(self, name: str) -> Any:
        """What it gives its builder, or the builder's own value."""
        return self.numbers.get(name, inspect.signature(self.build).parameters[name].default)


RETINA = HeadSizes(octaves=3, extra="p6p7")
THIN: dict[str, Any] = {"layers": (1, 1, 1, 1), "channels": (32, 48, 64, 96), "output_stride": 16}
# For objects of 8 to 64 px: maps of stride 4, 8 and 16, and nothing coarser.
NANO: dict[str, Any] = {
    "backbone": "resnet18", "backbone_kwargs": THIN, "norm": "group", "levels": (1, 2, 4), "min_size": 128,
    "max_size": 256, "multiple": 16, "img_size": 128, "image_mean": (0.5, 0.5, 0.5), "image_std": (0.25, 0.25, 0.25),
}  # fmt: skip
SMALL = HeadSizes(
    width=48, anchors=(12, 24, 48), extra="none", hidden=128, mask=(48, 48), proposals=(300, 200), anchors_learnt=128,
    boxes_learnt=64,
)  # fmt: skip
PRESETS: dict[str, Preset] = {
    "retinanet_resnet50": Preset(resnet_detector, "retinanet", RETINA, {"levels": (2, 3, 4)}),
    "faster_rcnn_resnet50": Preset(resnet_detector, "faster-rcnn"),
    "mask_rcnn_resnet50": Preset(resnet_detector, "mask-rcnn"),
    "retinanet_lavit_tiny": Preset(lavit_detector, "retinanet", RETINA, {"levels": (1, 2, 3)}),
    "retinanet_lavit_small": Preset(
        lavit_detector, "retinanet", RETINA, {"levels": (1, 2, 3), "backbone": "lavit_small"}
    ),
    "mask_rcnn_lavit_tiny": Preset(lavit_detector, "mask-rcnn"),
    "mask_rcnn_lavit_small": Preset(lavit_detector, "mask-rcnn", numbers={"backbone": "lavit_small"}),
    "retinanet_nano": Preset(
        resnet_detector, "retinanet", replace(SMALL, anchors=(12, 32), octaves=3), {**NANO, "levels": (2, 4)}
    ),
    "faster_rcnn_nano": Preset(resnet_detector, "faster-rcnn", SMALL, NANO),
    "mask_rcnn_nano": Preset(resnet_detector, "mask-rcnn", SMALL, NANO),
}


def list_detectors(pattern: str = "*") -> list[str]:
    """The names of detectors that match a glob."""
    return [name for name in PRESETS if fnmatch.fnmatch(name, pattern)]


def create_detector(name: str, **kwargs: Any) -> Detector:
    """Build a detector by name.

    Args:
        name: one of `list_detectors()`.
        **kwargs: arguments of its builder: `num_classes`, `mixer`, `norm`, `min_size`, `img_size`, `score`, ...

    Raises:
        UserError: no such name or argument, or arguments that do not fit each other.
    """
    preset = preset_of(name)
    arguments = preset_arguments(name, preset.build, preset.numbers, kwargs, own=("kind", "sizes"))
    return preset.build(preset.kind, preset.sizes, **arguments)


def preset_of(name: str) -> Preset:
    """The numbers of a detector; `UserError` with the nearest names if there is none."""
    if name not in PRESETS:
        raise unknown_name("detector", name, PRESETS)
    return PRESETS[name]
