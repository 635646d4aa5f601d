"""Small detectors as a user builds them from torchvision's parts; `num_classes` is with the background."""

from collections import OrderedDict
from typing import Any

from torch import Tensor, nn
from torchvision.models.detection import FCOS, FasterRCNN, MaskRCNN, RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator, DefaultBoxGenerator
from torchvision.models.detection.ssd import SSD
from torchvision.ops import MultiScaleRoIAlign


class Backbone(nn.Module):
    """One map of stride 8."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.out_channels: Any = width
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 4, 1), nn.ReLU())
        self.deep = nn.Sequential(nn.Conv2d(width, width, 3, 2, 1), nn.ReLU())

    def forward(self, x: Tensor) -> OrderedDict[str, Tensor]:
        return OrderedDict([("0", self.deep(self.stem(x)))])


SIDES = {"min_size": 64, "max_size": 64}
STAGES: dict[str, Any] = {
    "rpn_anchor_generator": AnchorGenerator(((16, 24),), ((0.5, 1.0, 2.0),)),
    "box_roi_pool": MultiScaleRoIAlign(["0"], 3, 2),
    **SIDES,
}


def faster(num_classes: int) -> nn.Module:
    return FasterRCNN(Backbone(16), num_classes, **STAGES)


def masks(num_classes: int) -> nn.Module:
    return MaskRCNN(Backbone(16), num_classes, mask_roi_pool=MultiScaleRoIAlign(["0"], 14, 2), **STAGES)


def retina(num_classes: int) -> nn.Module:
    anchors = AnchorGenerator(((16, 24),), ((0.5, 1.0, 2.0),))
    return RetinaNet(Backbone(16), num_classes, anchor_generator=anchors, **SIDES)


def fcos(num_classes: int) -> nn.Module:
    return FCOS(Backbone(32), num_classes, anchor_generator=AnchorGenerator(((16,),), ((1.0,),)), **SIDES)


def ssd(num_classes: int) -> nn.Module:
    backbone = Backbone(16)
    backbone.out_channels = [16]
    return SSD(backbone, DefaultBoxGenerator([[2]], scales=[0.2, 0.4]), (64, 64), num_classes)


def fewer(num_classes: int) -> nn.Module:
    return faster(num_classes - 1)


def blocks(num_classes: int) -> nn.Module:
    return nn.Linear(3, num_classes)
