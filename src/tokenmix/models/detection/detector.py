"""torchvision's detectors over a pyramid of our backbones, with the interface of this library's models.

Ground-truth boxes are matched to anchors and proposals in blocks, so memory does not grow with their product.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
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

from tokenmix import checkpoints
from tokenmix.errors import UserError
from tokenmix.layers.base import Device, count_macs, count_parameters, on_meta
from tokenmix.layers.external import Tie
from tokenmix.models.detection.backbones import LaViTBackbone, Norm, ResNetBackbone
from tokenmix.models.detection.pictures import PictureTransform, place_masks, with_dense_masks
from tokenmix.models.interface import BlockMap, FeatureMaps, MapInfo, PartCost, Size, pair
from tokenmix.registry import Arguments

Kind = Literal["retinanet", "faster-rcnn", "mask-rcnn"]
Body = ResNetBackbone | LaViTBackbone
Target = Mapping[str, Tensor]
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
# Pairs of boxes compared at a time.
BLOCK_PAIRS = 1 << 20
# Suffixes of layer names that depend on the number of classes.
CLASS_LAYERS = ("cls_logits", "cls_score", "bbox_pred", "mask_fcn_logits")


@dataclass(frozen=True)
class HeadSizes:
    """Sizes of a detector's neck and heads."""

    width: int = 256  # channels of the pyramid
    anchors: Sequence[float] = (32, 64, 128, 256, 512)  # side of the smallest anchor of each level
    octaves: int = 1  # anchors per ratio and level, with factors of 2^(1/octaves)
    # Levels after the last map: RetinaNet's P6 and P7, the R-CNNs' pooled level, or none.
    extra: Literal["p6p7", "pool", "none"] = "pool"
    hidden: int = 1024  # width of the box head
    mask: Sequence[int] = (256, 256, 256, 256)  # channels of the convolutions of the mask head
    proposals: tuple[int, int] = (2000, 1000)  # proposals per image in training and in evaluation, before and after NMS
    anchors_learnt: int = 256  # samples per image for the losses of proposals
    boxes_learnt: int = 512  # samples per image for the losses of boxes

    def anchor_generator(self) -> AnchorGenerator:
        scales = [2 ** (i / self.octaves) for i in range(self.octaves)]
        sides = tuple(tuple(int(side * scale) for scale in scales) for side in self.anchors)
        return AnchorGenerator(sides, ((0.5, 1.0, 2.0),) * len(sides))


class BlockMatcher(det_utils.Matcher):
    """torchvision's matching of anchors to ground-truth boxes, in blocks of anchors.

    The full table for 20,000 boxes and 40,000 anchors would need 3 GB, and several times more while it is computed. The
    matcher takes `Pairs` in place of the table and gives the same result.
    """

    def __call__(self, pairs: "Pairs") -> Tensor:  # type: ignore[override]
        """int64 (N,): index of each anchor's box, -1 below the thresholds, -2 between them."""
        # Preallocated, because small results between large temporary tensors would fragment memory.
        values, highest = pairs.anchors.new_empty(len(pairs.anchors)), pairs.boxes.new_zeros(len(pairs.boxes))
        all_matches, kept = torch.empty_like(values, dtype=torch.int64), torch.empty_like(values, dtype=torch.bool)
        for part, table in pairs.tables():
            values[part], all_matches[part] = table.max(0)
            torch.maximum(highest, table.amax(1), out=highest)
        matches = all_matches.where(values >= self.low_threshold, self.BELOW_LOW_THRESHOLD)
        between = (values >= self.low_threshold) & (values < self.high_threshold)
        matches = matches.masked_fill(between, self.BETWEEN_THRESHOLDS)
        if self.allow_low_quality_matches:
            for part, table in pairs.tables():
                kept[part] = (table == highest[:, None]).any(0)
            matches = all_matches.where(kept, matches)
        return matches


@dataclass(frozen=True)
class Pairs:
    """Ground-truth boxes (M, 4) and anchors (N, 4), with overlaps computed on demand."""

    boxes: Tensor
    anchors: Tensor

    def tables(self) -> Iterator[tuple[slice, Tensor]]:
        """Places of some anchors, and the overlaps (M, n) of the boxes with them."""
        step = max(1, BLOCK_PAIRS // max(1, len(self.boxes)))
        for start in range(0, len(self.anchors), step):
            part = slice(start, start + step)
            yield part, box_iou(self.boxes, self.anchors[part])


class BlockRoIHeads(RoIHeads):
    """torchvision's second stage with proposals matched in blocks, like `BlockMatcher`.

    The true masks of a `PictureTransform` are resized here, those of sampled boxes only, as torchvision resizes all.
    """

    def forward(
        self,
        features: dict[str, Tensor],
        proposals: list[Tensor],
        image_shapes: list[tuple[int, int]],
        targets: list[dict[str, Tensor]] | None = None,
    ) -> Any:
        if targets is not None and self.has_mask():
            targets = [{**target, "size": torch.tensor(size)} for target, size in zip(targets, image_shapes)]
        return super().forward(features, proposals, image_shapes, targets)

    def select_training_samples(self, proposals: list[Tensor], targets: list[dict[str, Tensor]]) -> Any:
        chosen, matched, labels, wanted = super().select_training_samples(proposals, targets)
        for i, target in enumerate(targets if self.has_mask() else ()):
            used = matched[i][labels[i] > 0].unique()
            masks = F.interpolate(target["masks"][used, None].to(torch.uint8), target["size"].tolist())[:, 0]
            # `forward` reads these targets next, for the loss of the masks.
            targets[i] = {"masks": masks, "labels": target["labels"][used]}
            matched[i] = torch.searchsorted(used, matched[i])
        return chosen, matched, labels, wanted

    def assign_targets_to_proposals(
        self, proposals: Sequence[Tensor], gt_boxes: Sequence[Tensor], gt_labels: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        matched, labels = [], []
        for some, boxes, classes in zip(proposals, gt_boxes, gt_labels, strict=True):
            parts = some.split(max(1, BLOCK_PAIRS // max(1, len(boxes))))
            found = super().assign_targets_to_proposals(parts, [boxes] * len(parts), [classes] * len(parts))
            matched.append(torch.cat(found[0]))
            labels.append(torch.cat(found[1]))
        return matched, labels


class BlockRetinaNet(RetinaNet):
    """torchvision's RetinaNet with `BlockMatcher`."""

    def compute_loss(
        self, targets: list[dict[str, Tensor]], head_outputs: dict[str, Tensor], anchors: list[Tensor]
    ) -> dict[str, Tensor]:
        matcher = self.proposal_matcher
        assert isinstance(matcher, BlockMatcher)
        matches = [
            matcher(Pairs(target["boxes"], own))
            if len(target["boxes"])
            else torch.full((len(own),), det_utils.Matcher.BELOW_LOW_THRESHOLD, device=own.device)
            for target, own in zip(targets, anchors, strict=True)
        ]
        return self.head.compute_loss(targets, head_outputs, anchors, matches)


class Pyramid(nn.Module):
    """A backbone and the feature pyramid over its maps: images to maps of one width, by name.

    Under autocast, backbone and pyramid use half precision, and the maps are float32: boxes of large images need more
    than the 8 bits of bfloat16. `Detector` sets `half_type` for each pass.
    """

    def __init__(self, body: Body, sizes: HeadSizes) -> None:
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
        half = nullcontext() if self.half_type is None else torch.autocast(images.device.type, dtype=self.half_type)
        with half:
            maps = self.neck(self.body(images))
        return {name: x.float() if self.half_type is not None else x for name, x in maps.items()}

    def neck(self, maps: Sequence[Tensor]) -> dict[str, Tensor]:
        return self.fpn({str(i): x for i, x in enumerate(maps)})


@torch.no_grad()
def counted_macs(net: nn.Module, img_size: tuple[int, int]) -> int:
    """Multiply-adds of a torchvision detector on one image, with the maximum number of boxes in the second stage."""
    twin: Any = on_meta(net)

    def run(images: Tensor) -> None:
        found = twin.backbone(images)
        run_heads(twin, [found] if isinstance(found, Tensor) else list(found.values()))

    return count_macs(run, torch.empty(1, 3, *img_size, device="meta"))[1]


def run_heads(net: Any, levels: list[Tensor]) -> None:
    """Run a torchvision detector's heads on maps, without NMS; a second stage gets its maximum number of boxes."""
    if not hasattr(net, "roi_heads"):
        net.head(levels)
        return
    net.rpn.head(levels)
    roi, width = net.roi_heads, levels[0].shape[1]
    boxes = (net.rpn.post_nms_top_n(), width, *roi.box_roi_pool.output_size)
    roi.box_predictor(roi.box_head(levels[0].new_empty(boxes)))
    if roi.has_mask():
        boxes = (roi.detections_per_img, width, *roi.mask_roi_pool.output_size)
        roi.mask_predictor(roi.mask_head(levels[0].new_empty(boxes)))


class ObjectFinder(nn.Module):
    """Calls of a torchvision detector with labels that count from 0, in float32.

    `background` is the number of labels that the detector keeps for the background, below those of the classes.
    """

    background: int
    has_masks: bool

    def forward(self, images: Sequence[Tensor], targets: Sequence[Target] | None = None) -> object:
        """Losses by name in training, otherwise detections per image."""
        found = self.find(images, targets)
        return found if self.training else [with_dense_masks(one) for one in found]

    def find(self, images: Sequence[Tensor], targets: Sequence[Target] | None = None) -> Any:
        """Like `forward`, but with masks as `PlacedMasks`."""
        if not isinstance(images, Sequence) or any(len(image.shape) != 3 or image.shape[0] != 3 for image in images):
            raise UserError("a detector takes a list of images (3, height, width); list(images) makes one of a batch")
        if self.training and targets is None:
            raise UserError("a detector in training needs targets; call eval() for detections")
        with torch.autocast(next(self.parameters()).device.type, enabled=False):
            if self.training:
                names = ("boxes", "labels", "masks") if self.has_masks else ("boxes", "labels")
                inside = [{name: target[name] for name in names} for target in targets or ()]
                for target in inside:
                    target["labels"] = target["labels"] + self.background
                return self.detect(list(images), inside)
            detections = self.detect(list(images), None)
        found = []
        for all_of_it, image in zip(detections, images, strict=True):
            kept = all_of_it["labels"] >= self.background
            one = {name: value[kept] for name, value in all_of_it.items()}
            one["labels"] = one["labels"] - self.background
            if "masks" in one:
                one["masks"] = place_masks(one["masks"], one["boxes"], (image.shape[1], image.shape[2]))
            found.append(one)
        return found

    def detect(self, images: list[Tensor], targets: list[dict[str, Tensor]] | None) -> Any:
        """Call the detector itself."""
        raise NotImplementedError


class Detector(FeatureMaps, ObjectFinder):
    """RetinaNet, Faster R-CNN or Mask R-CNN: images of any size to boxes.

    Input and output labels start at 0 for every kind; the background label 0 of torchvision's R-CNNs stays internal. In
    training, `forward` returns torchvision's losses. Otherwise it returns a dict per image with boxes, scores, labels
    and, for Mask R-CNN, masks (M, H, W). `find` returns masks as `PlacedMasks`.

    Args:
        kind: one of the three.
        body: backbone, images to maps.
        heads: fields of `HeadSizes`, for pyramid and heads.
        num_classes: without background.
        score, nms, detections: evaluation returns boxes with a score above `score`, after NMS at `nms`, at most
            `detections` per image.
        img_size: image size for `macs`; for a LaViT also the size of resized images, a square.
        min_size: shorter side after torchvision's resizing; several values are sampled from in training.
        max_size: largest longer side.
        multiple: a batch's sides are padded below and to the right to multiples of this.
        image_mean, image_std: of the images' channels, in 0..1.
        device: of the weights.

    Shape: a list of float images (3, H, W) in 0..1, in evaluation also uint8. In training also a list of targets: boxes
    (M, 4) as left, top, right, bottom, labels (M,), and for Mask R-CNN masks (M, H, W).

    Raises:
        UserError: there are no classes, a size is invalid, or images are not such a list.
    """

    def __init__(
        self,
        kind: Kind,
        body: Body,
        *,
        heads: Arguments | None = None,
        num_classes: int,
        score: float,
        nms: float,
        detections: int,
        img_size: Size,
        image_mean: Sequence[float],
        image_std: Sequence[float],
        min_size: int | Sequence[int] = 800,
        max_size: int = 1333,
        multiple: int = 32,
        device: Device = None,
    ) -> None:
        super().__init__()
        if num_classes < 1:
            raise UserError(f"a detector needs at least one class, got num_classes={num_classes}")
        self.fixed_size = isinstance(body, LaViTBackbone)
        if self.fixed_size:
            min_size = max_size = multiple = square_side(img_size)
        sides = (min_size,) if isinstance(min_size, int) else tuple(min_size)
        if not sides or min(sides) < 1 or max_size < max(sides):
            raise UserError(f"min_size={sides} and max_size={max_size} are not possible; give 1 <= min <= max")
        self.kind: Kind = kind
        self.num_classes, self.img_size, self.sizes = num_classes, pair(img_size), HeadSizes(**heads or {})
        self.mean, self.std = tuple(image_mean), tuple(image_std)
        self.background, self.has_masks = int(kind != "retinanet"), kind == "mask-rcnn"
        self.mixer_name, self.in_chans = body.mixer_name, 3
        transform = {"min_size": sides, "max_size": max_size, "size_divisible": multiple}
        transform |= {"image_mean": list(image_mean), "image_std": list(image_std)}
        chosen = {"score_thresh": score, "nms_thresh": nms, "detections_per_img": detections}
        with torch.device(device or torch.get_default_device()):
            pyramid = Pyramid(body, self.sizes)
            if kind == "retinanet":
                anchors, matcher = self.sizes.anchor_generator(), BlockMatcher(0.5, 0.4, True)
                given = {"anchor_generator": anchors, "proposal_matcher": matcher, **chosen, **transform}
                net: Any = BlockRetinaNet(pyramid, num_classes, **given)
            else:
                rest = {f"box_{name}": value for name, value in chosen.items()}
                net = _rcnn(kind, pyramid, self.sizes, num_classes, **rest, **transform)
        cast(Any, net).transform.__class__ = PictureTransform
        self.net: Any = net

    @property
    def body(self) -> Body:
        return self.net.backbone.body

    def find(self, images: Sequence[Tensor], targets: Sequence[Target] | None = None) -> Any:
        device = next(self.parameters()).device
        kind, self.net.transform.device = device.type, device
        # Read here, because the detector itself runs without autocast.
        self.net.backbone.half_type = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return super().find(images, targets)

    def detect(self, images: list[Tensor], targets: list[dict[str, Tensor]] | None) -> Any:
        return self.net(images, targets)

    @property
    def feature_info(self) -> list[MapInfo]:  # pyrefly: ignore[bad-override]
        """Channels and stride of the backbone's maps."""
        maps = zip(self.body.widths, self.body.reductions, strict=True)
        return [{"module": f"body.{i}", "num_chs": w, "reduction": r} for i, (w, r) in enumerate(maps)]

    @torch.no_grad()
    def attention_maps(self, images: Tensor) -> list[BlockMap]:
        return self.body.attention_maps(images)

    def macs(self) -> int:
        return sum(row.macs for row in self.cost_table())

    def counted_macs(self) -> int:
        """Multiply-adds counted in a forward pass, which includes inserted blocks."""
        return counted_macs(self.net, self.img_size)

    def cost_table(self) -> list[PartCost]:
        """Parameters and multiply-adds of backbone, pyramid and heads, with the maximum number of boxes for R-CNNs."""
        twin: Any = on_meta(self.net)

        levels, pyramid = count_macs(twin.backbone.neck, self.meta_maps())
        _, heads = count_macs(partial(run_heads, twin), list(levels.values()))
        counts = [count_parameters(self.body), count_parameters(self.net.backbone.fpn)]
        return [
            PartCost("backbone", counts[0], self.body.macs(self.img_size)),
            PartCost("pyramid", counts[1], pyramid),
            PartCost("heads", count_parameters(self) - sum(counts), heads),
        ]

    def warnings(self) -> list[str]:
        return self.body.warnings()

    def set_input_size(self, img_size: Size) -> None:
        """Set the image size for costs, and for a backbone of fixed size, which needs a square (else `UserError`)."""
        if self.fixed_size:
            side, transform, body = square_side(img_size), self.net.transform, cast(LaViTBackbone, self.body)
            body.set_input_size((side, side))
            transform.min_size, transform.max_size, transform.size_divisible = (side,), side, side
        self.img_size = pair(img_size)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.body.net.set_grad_checkpointing(enable)

    def no_weight_decay(self) -> set[str]:
        return {f"net.backbone.body.{name}" for name in self.body.no_weight_decay()}

    def starting_weights(
        self, weights: Mapping[str, Tensor], img_size: tuple[int, int] | None = None
    ) -> tuple[dict[str, Tensor], str | None]:
        """A full state dict from weights of another detector, or of a classifier with this backbone.

        Weights over positions are interpolated. Layers for another number of classes, and layers that a classifier
        lacks, are newly initialised; the second value says so in a line.
        """
        own = self.state_dict()
        classifier = not any(key.startswith("net.") for key in weights)
        named = _of_a_classifier(weights, own) if classifier else dict(weights)
        if self.fixed_size:
            named = checkpoints.resize(named, self, img_size=img_size)
        if classifier:
            return {**own, **named}, "pyramid and heads start fresh: the weights are a classifier's"
        other = {
            key: own[key]
            for key, value in named.items()
            if key in own and value.shape != own[key].shape and key.split(".")[-2] in CLASS_LAYERS
        }
        line = f"the layers of the classes start fresh: theirs are not for {self.num_classes}" if other else None
        return {**named, **other}, line


def _of_a_classifier(weights: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the keys of a LaViT, an EANet or a timm ResNet to those of a backbone."""
    found, body = {}, "net.backbone.body"
    for key, value in weights.items():
        name = key.removeprefix("backbone.")
        for mine in (f"{body}.net.{name}", f"{body}.block.{name.removeprefix('context.mixer.')}"):
            if mine in own:
                found[mine] = value
            elif mine.endswith(".running_mean") and mine.replace("running_mean", "weight") in own:
                raise UserError("the weights have BatchNorm and this detector GroupNorm; give norm='frozen' or 'batch'")
    if not found:
        key = next(iter(weights), "nothing")
        raise UserError(
            f"the weights have {key!r}, which no backbone of this detector has; give those of its own backbone"
        )
    return found


def square_side(img_size: Size) -> int:
    """The side of a square; `UserError` for other sizes, which do not fit a LaViT's learned matrices."""
    height, width = pair(img_size)
    if height != width:
        raise UserError(f"a detector with a LaViT backbone takes square images, not {height} x {width}; give one side")
    return height


def _rcnn(kind: Kind, pyramid: Pyramid, sizes: HeadSizes, num_classes: int, **options: object) -> nn.Module:
    """torchvision's Faster or Mask R-CNN, with a background class added."""
    anchors, levels = sizes.anchor_generator(), [str(i) for i in range(len(pyramid.body.widths))]
    for part, number in zip(("train", "test"), sizes.proposals, strict=True):
        options |= {f"rpn_{when}_nms_top_n_{part}": number for when in ("pre", "post")}
    if kind == "mask-rcnn":
        options |= {
            "mask_roi_pool": MultiScaleRoIAlign(levels, 14, 2),
            "mask_head": MaskRCNNHeads(sizes.width, list(sizes.mask), 1),
            "mask_predictor": MaskRCNNPredictor(sizes.mask[-1], sizes.mask[-1], num_classes + 1),
        }
    net: Any = (MaskRCNN if kind == "mask-rcnn" else FasterRCNN)(
        pyramid,
        rpn_anchor_generator=anchors,
        rpn_head=RPNHead(sizes.width, anchors.num_anchors_per_location()[0]),
        rpn_batch_size_per_image=sizes.anchors_learnt,
        box_roi_pool=MultiScaleRoIAlign(levels, 7, 2),
        box_head=TwoMLPHead(sizes.width * 49, sizes.hidden),
        box_predictor=FastRCNNPredictor(sizes.hidden, num_classes + 1),
        box_batch_size_per_image=sizes.boxes_learnt,
        **options,
    )
    # torchvision's constructors create these objects without a hook for another class.
    net.roi_heads.__class__, net.rpn.proposal_matcher.__class__ = BlockRoIHeads, BlockMatcher
    net.transform.masks_later = True
    net.rpn.box_similarity = Pairs
    return net


def _arguments(of: Callable[..., object], given: Arguments) -> Arguments:
    return {name: given[name] for name in inspect.signature(of).parameters if name in given}


def resnet_detector(
    *,
    kind: Kind,
    heads: Arguments | None = None,
    backbone: str = "resnet50",
    backbone_kwargs: Arguments | None = None,
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
    img_size: Size = 800,
    image_mean: Sequence[float] = IMAGENET[0],
    image_std: Sequence[float] = IMAGENET[1],
    device: Device = None,
) -> Detector:
    """A detector over `ResNetBackbone`: images of any size, with the shorter side resized to `min_size`.

    The published 1x schedules use `norm="frozen"`, `pretrained_backbone=True` and `frozen_stages=2`. Arguments are
    those of `ResNetBackbone` and `Detector`.
    """
    given = locals()
    return Detector(body=ResNetBackbone(**_arguments(ResNetBackbone, given)), **_arguments(Detector, given))


def lavit_detector(
    *,
    kind: Kind,
    heads: Arguments | None = None,
    backbone: str = "lavit_tiny",
    backbone_kwargs: Arguments | None = None,
    levels: Sequence[int] = (0, 1, 2, 3),
    score: float = 0.05,
    nms: float = 0.5,
    detections: int = 100,
    num_classes: int = 80,
    img_size: Size = 512,
    image_mean: Sequence[float] = IMAGENET[0],
    image_std: Sequence[float] = IMAGENET[1],
    device: Device = None,
) -> Detector:
    """A detector over `LaViTBackbone`, for one image size.

    Images are resized to fit the square and padded, without distortion. Arguments are those of `LaViTBackbone` and
    `Detector`.
    """
    given = locals()
    square_side(img_size)
    return Detector(body=LaViTBackbone(**_arguments(LaViTBackbone, given)), **_arguments(Detector, given))
