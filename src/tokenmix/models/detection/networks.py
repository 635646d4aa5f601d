"""torchvision's detectors over a pyramid of ours, in the sizes that a preset names."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torchvision.models.detection import FasterRCNN, MaskRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.rpn import RPNHead
from torchvision.ops import FeaturePyramidNetwork, MultiScaleRoIAlign
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool, LastLevelP6P7

from tokenmix.errors import UserError
from tokenmix.models.detection.backbones import Backbone
from tokenmix.models.detection.matching import BlockMatcher, BlockRetinaNet, BlockRoIHeads, Pairs
from tokenmix.models.detection.pictures import PictureTransform

Kind = Literal["retinanet", "faster-rcnn", "mask-rcnn"]
RATIOS = (0.5, 1.0, 2.0)


@dataclass(frozen=True)
class HeadSizes:
    """Widths and numbers of a detector's neck and heads.

    Attributes:
        width: channels of the pyramid.
        anchors: side of the smallest anchor of each level.
        octaves: anchors of each ratio on a level, by factors of 2^(1/octaves).
        extra: levels after the last map: RetinaNet's P6 and P7, the R-CNNs' pooled one, or none.
        hidden: width of the box head.
        mask: channels of the mask head's four convolutions, or as many as there are numbers.
        proposals: kept of an image in training and in testing, before and after NMS.
        anchors_learnt, boxes_learnt: of an image in a training step, by the proposals' and the boxes' losses.
    """

    width: int = 256
    anchors: Sequence[float] = (32, 64, 128, 256, 512)
    octaves: int = 1
    extra: Literal["p6p7", "pool", "none"] = "pool"
    hidden: int = 1024
    mask: Sequence[int] = (256, 256, 256, 256)
    proposals: tuple[int, int] = (2000, 1000)
    anchors_learnt: int = 256
    boxes_learnt: int = 512

    def sides(self) -> tuple[tuple[int, ...], ...]:
        """The sides of the anchors of each level."""
        return tuple(tuple(int(side * 2 ** (i / self.octaves)) for i in range(self.octaves)) for side in self.anchors)


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Which boxes a detector returns: scores above `score`, after NMS at `nms`, at most `detections` of an image."""

    score: float = 0.05
    nms: float = 0.5
    detections: int = 100


@dataclass(frozen=True, kw_only=True)
class ImageScale:
    """The size that images are resized to, by torchvision's transform.

    Attributes:
        min_size: the shorter side; several to draw from in training.
        max_size: what the longer side may be at most.
        multiple: of what a batch's sides are multiples, by padding below and to the right.
    """

    min_size: int | Sequence[int] = 800
    max_size: int = 1333
    multiple: int = 32

    def arguments(self) -> dict[str, Any]:
        """As torchvision's detectors take them; `UserError` for sizes that no image can have."""
        sides = (self.min_size,) if isinstance(self.min_size, int) else tuple(self.min_size)
        if not sides or min(sides) < 1 or self.max_size < max(sides):
            raise UserError(f"min_size={sides} and max_size={self.max_size} are not possible; give 1 <= min <= max")
        return {"min_size": sides, "max_size": self.max_size, "size_divisible": self.multiple}


class Pyramid(nn.Module):
    """A backbone and the feature pyramid over its maps: images to maps of one width, by name.

    Under autocast backbone and pyramid compute in half precision, and the maps are float32: boxes of large
    images need more than the 8 bits of bfloat16. `Detector` sets `half_type` for each pass.
    """

    def __init__(self, body: Backbone, sizes: HeadSizes) -> None:
        super().__init__()
        self.body, self.out_channels = body, sizes.width
        extra = {
            "p6p7": lambda: LastLevelP6P7(sizes.width, sizes.width),
            "pool": LastLevelMaxPool,
            "none": lambda: None,
        }[sizes.extra]()
        self.fpn = FeaturePyramidNetwork(list(body.widths), sizes.width, extra_blocks=extra)
        self.half_type: torch.dtype | None = None

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Images (B, 3, H, W) to maps (B, width, h, w), finest first."""
        with torch.autocast(images.device.type, dtype=self.half_type, enabled=self.half_type is not None):
            maps = self.neck(self.body(images))
        return {name: x.float() if self.half_type is not None else x for name, x in maps.items()}

    def neck(self, maps: Sequence[Tensor]) -> dict[str, Tensor]:
        """The pyramid of a backbone's maps."""
        return self.fpn({str(i): x for i, x in enumerate(maps)})


def build_network(
    kind: Kind,
    body: Backbone,
    sizes: HeadSizes,
    *,
    num_classes: int,
    answers: Answers,
    resize: dict[str, Any],
    device: Any,
) -> nn.Module:
    """torchvision's class of that kind, with its background class added where it has one.

    Args:
        kind: RetinaNet, Faster R-CNN or Mask R-CNN.
        body: what gives the maps.
        sizes: of pyramid and heads.
        num_classes: without background.
        answers: of evaluation.
        resize: arguments of torchvision's transform: sizes, mean and std.
        device: of the weights.
    """
    with torch.device(device or torch.get_default_device()):
        pyramid, anchors = Pyramid(body, sizes), AnchorGenerator(sizes.sides(), (RATIOS,) * len(sizes.anchors))
        net: Any
        if kind == "retinanet":
            net = BlockRetinaNet(
                pyramid,
                num_classes,
                anchor_generator=anchors,
                proposal_matcher=BlockMatcher(0.5, 0.4, True),
                score_thresh=answers.score,
                nms_thresh=answers.nms,
                detections_per_img=answers.detections,
                **resize,
            )
        else:
            net = _two_stages(kind, pyramid, anchors, sizes, num_classes, answers, resize)
            # torchvision's constructors make these themselves.
            net.roi_heads.__class__, net.rpn.proposal_matcher.__class__ = BlockRoIHeads, BlockMatcher
            net.rpn.box_similarity = Pairs
        net.transform.__class__ = PictureTransform
    return net


def _two_stages(
    kind: Kind,
    pyramid: Pyramid,
    anchors: AnchorGenerator,
    sizes: HeadSizes,
    num_classes: int,
    answers: Answers,
    resize: dict[str, Any],
) -> Any:
    """Faster R-CNN or Mask R-CNN."""
    levels, (training, testing) = [str(i) for i in range(len(pyramid.body.widths))], sizes.proposals
    shared = {
        "rpn_anchor_generator": anchors,
        "rpn_head": RPNHead(sizes.width, anchors.num_anchors_per_location()[0]),
        "rpn_pre_nms_top_n_train": training,
        "rpn_post_nms_top_n_train": training,
        "rpn_pre_nms_top_n_test": testing,
        "rpn_post_nms_top_n_test": testing,
        "rpn_batch_size_per_image": sizes.anchors_learnt,
        "box_roi_pool": MultiScaleRoIAlign(levels, 7, 2),
        "box_head": TwoMLPHead(sizes.width * 49, sizes.hidden),
        "box_predictor": FastRCNNPredictor(sizes.hidden, num_classes + 1),
        "box_score_thresh": answers.score,
        "box_nms_thresh": answers.nms,
        "box_detections_per_img": answers.detections,
        "box_batch_size_per_image": sizes.boxes_learnt,
        **resize,
    }
    if kind == "faster-rcnn":
        return FasterRCNN(pyramid, **shared)
    return MaskRCNN(
        pyramid,
        **shared,
        mask_roi_pool=MultiScaleRoIAlign(levels, 14, 2),
        mask_head=MaskRCNNHeads(sizes.width, list(sizes.mask), 1),
        mask_predictor=MaskRCNNPredictor(sizes.mask[-1], sizes.mask[-1], num_classes + 1),
    )
