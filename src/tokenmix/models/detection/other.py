"""Detectors from elsewhere: torchvision's by name, or what a function of the user's returns, trained as ours are."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.models.detection.rpn import RegionProposalNetwork
from torchvision.models.detection.transform import GeneralizedRCNNTransform

from tokenmix.errors import UserError
from tokenmix.models.detection.detector import (
    BlockMatcher,
    BlockRoIHeads,
    Pairs,
    Target,
    check_pictures,
    counted_macs,
)
from tokenmix.models.detection.pictures import PictureTransform, place_masks, with_dense_masks
from tokenmix.models.foreign import load_foreign, with_fresh_head


class OtherDetector(nn.Module):
    """Mixed into the class of a torchvision detector: labels count from 0 outside, and masks are `PlacedMasks`.

    Inside, label 0 is the background, in every kind. The names of modules and weights stay the detector's own. Images
    in 8 bits are divided by 255. Under autocast all is computed in float32, which boxes need.
    """

    transform: Any
    kind = "elsewhere"
    in_chans = 3
    has_masks = False
    num_classes: int
    """Without background."""

    @property
    def net(self) -> nn.Module:
        """The detector itself."""
        return self

    @property
    def watched(self) -> nn.Module:
        """The part that takes a batch of normalised images: the backbone."""
        return cast(nn.Module, self.backbone)

    @property
    def img_size(self) -> tuple[int, int]:
        """What the shorter side of an image is brought to, twice; or the size of all images."""
        side = self.transform.min_size[-1]
        return self.transform.fixed_size or (side, side)

    @property
    def mean(self) -> Sequence[float]:
        """Of the channels, as the detector normalises them."""
        return self.transform.image_mean

    @property
    def std(self) -> Sequence[float]:
        """Of the channels, as the detector normalises them."""
        return self.transform.image_std

    def macs(self) -> int:
        """Multiply-adds of one image of `img_size`, with as many boxes as the second stage looks at at most."""
        return counted_macs(self, self.img_size)

    counted_macs = macs

    def starting_weights(
        self, weights: Mapping[str, Tensor], img_size: tuple[int, int] | None = None
    ) -> tuple[dict[str, Tensor], str | None]:
        """As `Detector.starting_weights`, from weights of the same detector for any number of classes."""
        found, theirs = with_fresh_head(weights, self, self.num_classes + 1, several=True)
        return found, f"the layers of the classes start fresh: theirs are for {theirs - 1}" if theirs else None

    def forward(self, images: Sequence[Tensor], targets: Sequence[Target] | None = None) -> Any:
        """Losses by name in training, else detections of each image."""
        found = self.find(images, targets)
        return found if self.training else [with_dense_masks(one) for one in found]

    def find(self, images: Sequence[Tensor], targets: Sequence[Target] | None = None) -> Any:
        """As `forward`, but detections have masks as `PlacedMasks`."""
        check_pictures(images, targets, training=self.training)
        device = next(self.parameters()).device
        with torch.autocast(device.type, enabled=False):
            takes_bytes = isinstance(self.transform, PictureTransform)
            if takes_bytes:
                self.transform.device = device
                given = list(images)
            else:
                given = [x.to(device) if x.is_floating_point() else x.to(device).float() / 255 for x in images]
            if self.training:
                names = ("boxes", "labels", "masks") if self.has_masks else ("boxes", "labels")
                inside = [{name: target[name] for name in names} for target in targets or ()]
                for target in inside:
                    target["labels"] = target["labels"] + 1
                    if "masks" in target:
                        target["masks"] = target["masks"].to(torch.uint8)
                return super().forward(given, inside)
            detections = super().forward(given)
        found = []
        for one, image in zip(detections, images, strict=True):
            kept = one["labels"] > 0
            one = {name: value[kept] for name, value in one.items()}
            one["labels"] = one["labels"] - 1
            if "masks" in one:
                one["masks"] = place_masks(one["masks"], one["boxes"], (image.shape[1], image.shape[2]))
            found.append(one)
        return found


def other_detector(
    name: str,
    *,
    num_classes: int,
    masks: bool,
    score: float,
    nms: float,
    detections: int,
    min_size: int | Sequence[int] | None = None,
    max_size: int | None = None,
    **kwargs: object,
) -> nn.Module:
    """A detector of torchvision's interface, by `load_foreign`; its function gets `num_classes` with the background.

    Args:
        name: "torchvision:NAME", or "module:factory".
        num_classes: without background.
        masks: whether it has to find masks as well.
        score, nms, detections: as those of `Detector`.
        min_size, max_size: as those of `Detector`; the detector's own if not given.
        **kwargs: further arguments of the detector.

    Raises:
        UserError: as `load_foreign`; no detector of torchvision's interface; or one that lacks the masks, or needs
            masks or keypoints to learn from.
    """
    net: Any = load_foreign(name, {"num_classes": num_classes + 1}, "detector", **kwargs)
    transform = getattr(net, "transform", None)
    if not isinstance(transform, GeneralizedRCNNTransform) or not isinstance(getattr(net, "backbone", None), nn.Module):
        raise UserError(
            f"{name} returned a {type(net).__name__}; return a detector of torchvision's: FasterRCNN, MaskRCNN, "
            "RetinaNet, FCOS or SSD"
        )
    heads = getattr(net, "roi_heads", None)
    has_masks = heads is not None and heads.has_mask()
    if heads is not None and heads.has_keypoint():
        raise UserError(f"{name} needs keypoints to learn from; give a detector of boxes or masks")
    if has_masks != masks:
        task, other = ("instance-segmentation", "no masks") if masks else ("detection", "masks as well")
        remedy = "give a Mask R-CNN" if masks else "train instance-segmentation, or give a detector of boxes"
        raise UserError(f"{name} finds {other}, and {task} learns from {'masks' if masks else 'boxes'}; {remedy}")
    net.__class__ = type(f"Other{type(net).__name__}", (OtherDetector, type(net)), {})
    net.has_masks, net.num_classes = has_masks, num_classes
    chosen = net if heads is None else heads
    chosen.score_thresh, chosen.nms_thresh, chosen.detections_per_img = score, nms, detections
    if transform.fixed_size is None:
        transform.__class__ = PictureTransform
        if min_size is not None:
            net.transform.min_size = (min_size,) if isinstance(min_size, int) else tuple(min_size)
        net.transform.max_size = max_size or transform.max_size
    elif min_size or max_size:
        raise UserError(f"{name} takes images of {transform.fixed_size}; leave the sizes out")
    # Large images have more boxes than a table of all pairs can hold.
    if type(heads) is RoIHeads:
        heads.__class__ = BlockRoIHeads
    if type(getattr(net, "rpn", None)) is RegionProposalNetwork:
        net.rpn.proposal_matcher.__class__, net.rpn.box_similarity = BlockMatcher, Pairs
    return net
