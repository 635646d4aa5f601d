"""Detectors of torchvision, or from a user's function, with the interface of our detectors."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.models.detection.rpn import RegionProposalNetwork
from torchvision.models.detection.transform import GeneralizedRCNNTransform

from tokenmix.errors import UserError
from tokenmix.models.detection.detector import BlockMatcher, BlockRoIHeads, ObjectFinder, Pairs, counted_macs
from tokenmix.models.detection.pictures import PictureTransform
from tokenmix.models.foreign import load_foreign, with_fresh_head


class OtherDetector(ObjectFinder):
    """Mixin for the class of a torchvision detector: outside labels start at 0, and masks are `PlacedMasks`.

    Inside, label 0 is the background. Modules and weights keep their names. uint8 images are divided by 255. Under
    autocast the computation stays in float32, which boxes need.
    """

    transform: Any
    kind = "elsewhere"
    in_chans = 3
    background = 1
    num_classes: int
    """Without background."""

    @property
    def net(self) -> nn.Module:
        return self

    @property
    def watched(self) -> nn.Module:
        """The part that receives a batch of normalised images: the backbone."""
        return cast(nn.Module, self.backbone)

    @property
    def img_size(self) -> tuple[int, int]:
        """The detector's fixed image size, or its shorter side as a square."""
        side = self.transform.min_size[-1]
        return self.transform.fixed_size or (side, side)

    @property
    def mean(self) -> Sequence[float]:
        return self.transform.image_mean

    @property
    def std(self) -> Sequence[float]:
        return self.transform.image_std

    def macs(self) -> int:
        """Multiply-adds of one image of `img_size`, with the maximum number of boxes in the second stage."""
        return counted_macs(self, self.img_size)

    counted_macs = macs

    def starting_weights(
        self, weights: Mapping[str, Tensor], img_size: tuple[int, int] | None = None
    ) -> tuple[dict[str, Tensor], str | None]:
        """Like `Detector.starting_weights`, from weights of the same detector for any number of classes."""
        found, theirs = with_fresh_head(weights, self, self.num_classes + 1, several=True)
        return found, f"the layers of the classes start fresh: theirs are for {theirs - 1}" if theirs else None

    def detect(self, images: list[Tensor], targets: list[dict[str, Tensor]] | None) -> Any:
        device = next(self.parameters()).device
        takes_bytes = isinstance(self.transform, PictureTransform)
        if takes_bytes:
            self.transform.device = device
        else:
            images = [x.to(device) if x.is_floating_point() else x.to(device).float() / 255 for x in images]
        # The detector's own forward, behind that of `ObjectFinder`.
        return super(ObjectFinder, self).forward(images, targets)


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
    """A detector with torchvision's interface, by `load_foreign`; its function gets `num_classes` plus the background.

    Other arguments are those of `Detector`; without `min_size` and `max_size` the detector's own.

    Raises:
        UserError: as in `load_foreign`; the model is not a detector with torchvision's interface; or it lacks masks, or
            needs masks or keypoints for training.
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
    if heads is not None:
        known = getattr(getattr(heads.box_predictor, "cls_score", None), "out_features", None)
    else:
        scores = getattr(net.head, "classification_head", None)
        known = getattr(scores, "num_classes", None) or getattr(scores, "num_columns", None)
    if known is not None and known != num_classes + 1:
        raise UserError(
            f"{name} knows {known} classes; its function gets num_classes={num_classes + 1}, with the background, and "
            "must build as many"
        )
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
    # For large images, the full table of pairs would exceed memory.
    if type(heads) is RoIHeads:
        heads.__class__ = BlockRoIHeads
        net.transform.masks_later = True
    if type(getattr(net, "rpn", None)) is RegionProposalNetwork:
        net.rpn.proposal_matcher.__class__, net.rpn.box_similarity = BlockMatcher, Pairs
    return net
