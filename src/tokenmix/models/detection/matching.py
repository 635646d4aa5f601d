"""True boxes matched to anchors and proposals in blocks: memory does not grow with their product."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchvision.models.detection import RetinaNet
from torchvision.models.detection.retinanet import det_utils
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.ops import box_iou

# Pairs of boxes that are compared at a time.
BLOCK_PAIRS = 1 << 22


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
