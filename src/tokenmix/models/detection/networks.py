"""torchvision's detectors over a pyramid of ours, with true boxes matched to anchors and proposals in blocks.

So memory does not grow with the product of boxes and anchors.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torchvision.models.detection import FasterRCNN, MaskRCNN, RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.retinanet import det_utils
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.models.detection.rpn import RPNHead
from torchvision.ops import FeaturePyramidNetwork, MultiScaleRoIAlign, box_iou
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool, LastLevelP6P7

from tokenmix.models.detection.backbones import Backbone
from tokenmix.models.detection.pictures import PictureTransform
from tokenmix.registry import Arguments

Kind = Literal["retinanet", "faster-rcnn", "mask-rcnn"]
RATIOS = (0.5, 1.0, 2.0)
# Pairs of boxes that are compared at a time.
BLOCK_PAIRS = 1 << 22


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


class BlockMatcher(det_utils.Matcher):
    """torchvision's matching of anchors to true boxes, some anchors at a time.

    The table of 20,000 boxes and 40,000 anchors alone would fill 3 GB, and its making several times that. Takes a
    `Pairs` in place of the table; what comes out is the same.
    """

    def __call__(self, pairs: "Pairs") -> Tensor:  # type: ignore[override]
        """int64 (N,): the place of each anchor's box, -1 below the thresholds, -2 between them."""
        best, place, highest = [], [], None
        for table in pairs.tables():
            values, indices = table.max(0)
            most = table.amax(1)
            best.append(values)
            place.append(indices)
            highest = most if highest is None else torch.maximum(highest, most)
        values, all_places = torch.cat(best), torch.cat(place)
        places = all_places.where(values >= self.low_threshold, self.BELOW_LOW_THRESHOLD)
        between = (values >= self.low_threshold) & (values < self.high_threshold)
        places = places.masked_fill(between, self.BETWEEN_THRESHOLDS)
        if self.allow_low_quality_matches:
            assert highest is not None
            kept = torch.cat([(table == highest[:, None]).any(0) for table in pairs.tables()])
            places = all_places.where(kept, places)
        return places


@dataclass(frozen=True)
class Pairs:
    """True boxes (M, 4) and anchors (N, 4), whose overlaps are computed when they are needed."""

    boxes: Tensor
    anchors: Tensor

    def tables(self) -> Iterator[Tensor]:
        """The overlaps (M, n), some anchors after the others."""
        for some in self.anchors.split(max(1, BLOCK_PAIRS // max(1, len(self.boxes)))):
            yield box_iou(self.boxes, some)


class BlockRoIHeads(RoIHeads):
    """torchvision's second stage, which matches some proposals at a time, as `BlockMatcher` does anchors."""

    def assign_targets_to_proposals(self, proposals: Any, gt_boxes: Any, gt_labels: Any) -> Any:
        """The true box and the class of each proposal, of each image."""
        matched, labels = [], []
        for some, boxes, classes in zip(proposals, gt_boxes, gt_labels, strict=True):
            parts = some.split(max(1, BLOCK_PAIRS // max(1, len(boxes))))
            found = super().assign_targets_to_proposals(parts, [boxes] * len(parts), [classes] * len(parts))
            matched.append(torch.cat(found[0]))
            labels.append(torch.cat(found[1]))
        return matched, labels


class BlockRetinaNet(RetinaNet):
    """torchvision's RetinaNet, which matches by `BlockMatcher`."""

    proposal_matcher: Any

    def compute_loss(self, targets: Any, head_outputs: Any, anchors: Any) -> dict[str, Tensor]:
        """The losses by name."""
        matches = [
            self.proposal_matcher(Pairs(target["boxes"], own))
            if len(target["boxes"])
            else torch.full((len(own),), det_utils.Matcher.BELOW_LOW_THRESHOLD, device=own.device)
            for target, own in zip(targets, anchors, strict=True)
        ]
        return self.head.compute_loss(targets, head_outputs, anchors, matches)


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
    score: float,
    nms: float,
    detections: int,
    transform: Arguments,
) -> nn.Module:
    """torchvision's class of that kind, with its background class added where it has one; see `Detector`."""
    pyramid, anchors = Pyramid(body, sizes), AnchorGenerator(sizes.sides(), (RATIOS,) * len(sizes.anchors))
    if kind == "retinanet":
        net = BlockRetinaNet(
            pyramid,
            num_classes,
            anchor_generator=anchors,
            proposal_matcher=BlockMatcher(0.5, 0.4, True),
            score_thresh=score,
            nms_thresh=nms,
            detections_per_img=detections,
            **transform,
        )
    else:
        levels, (training, testing) = [str(i) for i in range(len(body.widths))], sizes.proposals
        options = {
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
            "box_score_thresh": score,
            "box_nms_thresh": nms,
            "box_detections_per_img": detections,
            "box_batch_size_per_image": sizes.boxes_learnt,
            **transform,
        }
        if kind == "mask-rcnn":
            options |= {
                "mask_roi_pool": MultiScaleRoIAlign(levels, 14, 2),
                "mask_head": MaskRCNNHeads(sizes.width, list(sizes.mask), 1),
                "mask_predictor": MaskRCNNPredictor(sizes.mask[-1], sizes.mask[-1], num_classes + 1),
            }
        net = cast(Any, (MaskRCNN if kind == "mask-rcnn" else FasterRCNN)(pyramid, **options))
        # torchvision's constructors make these themselves.
        net.roi_heads.__class__, net.rpn.proposal_matcher.__class__ = BlockRoIHeads, BlockMatcher
        net.rpn.box_similarity = Pairs
    net.transform.__class__ = PictureTransform
    return net
