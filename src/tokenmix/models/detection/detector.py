"""A detector of torchvision's with our backbone, under the conventions of this library's models."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tokenmix import checkpoints
from tokenmix.errors import UserError
from tokenmix.layers.base import Device, count_macs, count_parameters, on_meta
from tokenmix.layers.external import Tie
from tokenmix.models.detection.backbones import Backbone, LaViTBackbone, Norm, ResNetBackbone
from tokenmix.models.detection.networks import HeadSizes, Kind, build_network
from tokenmix.models.detection.pictures import place_masks, with_dense_masks
from tokenmix.models.interface import BlockMap, MapInfo, OnMaps, PartCost, Size, pair
from tokenmix.registry import Arguments

Target = Mapping[str, Tensor]
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
# What depends on the number of classes, by the end of its name.
CLASS_LAYERS = ("cls_logits", "cls_score", "bbox_pred", "mask_fcn_logits")


class Detector(OnMaps, nn.Module):
    """RetinaNet, Faster R-CNN or Mask R-CNN: images of any size to boxes.

    Labels count from 0 going in and coming out, in every kind: the background that torchvision's R-CNNs keep at 0 stays
    inside. `forward` gives torchvision's losses in training, else a dict of boxes, scores, labels and, of Mask R-CNN,
    masks (M, H, W) for each image; `find` has `PlacedMasks` in place of these.

    Args:
        kind: which of the three.
        body: the backbone, which gives the maps.
        sizes: of pyramid and heads.
        num_classes: without background.
        score, nms, detections: evaluation gives boxes with a score above `score`, after NMS at `nms`, at most
            `detections` of an image.
        min_size: the shorter side of an image is brought to it, by torchvision's transform; several to draw from in
            training.
        max_size: what the longer side may be at most.
        multiple: of what a batch's sides are multiples, by padding below and to the right.
        fixed_size: the backbone takes only that size, a square.
        mean, std: of the images' channels, in 0..1.
        img_size: size for which `macs` counts.
        device: of the weights.

    Shape:
        a list of float images (3, H, W) in 0..1, outside of training also uint8, and in training a list
        of targets: boxes (M, 4) as left, top, right, bottom, labels (M,), of Mask R-CNN masks (M, H, W).

    Raises:
        UserError: no classes, sizes that no image can have, or images that are not such a list.
    """

    def __init__(
        self,
        kind: Kind,
        body: Backbone,
        sizes: HeadSizes,
        *,
        num_classes: int,
        min_size: int | Sequence[int],
        max_size: int,
        multiple: int,
        fixed_size: bool,
        img_size: tuple[int, int],
        score: float,
        nms: float,
        detections: int,
        mean: Sequence[float],
        std: Sequence[float],
        device: Device = None,
    ) -> None:
        super().__init__()
        if num_classes < 1:
            raise UserError(f"a detector needs at least one class, got num_classes={num_classes}")
        sides = (min_size,) if isinstance(min_size, int) else tuple(min_size)
        if not sides or min(sides) < 1 or max_size < max(sides):
            raise UserError(f"min_size={sides} and max_size={max_size} are not possible; give 1 <= min <= max")
        self.kind: Kind = kind
        self.num_classes, self.img_size, self.sizes = num_classes, img_size, sizes
        self.mean, self.std, self.fixed_size = tuple(mean), tuple(std), fixed_size
        self.background = 0 if kind == "retinanet" else 1
        transform = {"min_size": sides, "max_size": max_size, "size_divisible": multiple}
        transform |= {"image_mean": list(mean), "image_std": list(std)}
        with torch.device(device or torch.get_default_device()):
            self.net: Any = build_network(
                kind,
                body,
                sizes,
                num_classes=num_classes,
                score=score,
                nms=nms,
                detections=detections,
                transform=transform,
            )
        self.mixer_name, self.in_chans = body.mixer_name, 3

    @property
    def body(self) -> Backbone:
        """What gives the maps."""
        return self.net.backbone.body

    def forward(self, images: Sequence[Tensor], targets: Sequence[Target] | None = None) -> Any:
        """Losses by name in training, else detections of each image."""
        found = self._run(images, targets)
        return found if self.training else [with_dense_masks(one) for one in found]

    def find(self, images: Sequence[Any]) -> list[dict[str, Any]]:
        """Detections of each image, with masks as `PlacedMasks`."""
        return self._run(images, None)

    def _run(self, images: Sequence[Any], targets: Sequence[Target] | None) -> Any:
        if isinstance(images, Tensor) or any(len(image.shape) != 3 or image.shape[0] != 3 for image in images):
            raise UserError("a detector takes a list of images (3, height, width)")
        if self.training and targets is None:
            raise UserError("a detector in training needs targets; call eval() for detections")
        transform = self.net.transform
        device = transform.device = next(self.parameters()).device
        kind = device.type
        self.net.backbone.half_type = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        with torch.autocast(kind, enabled=False):
            if self.training:
                assert targets is not None
                kept = ("boxes", "labels", "masks") if self.kind == "mask-rcnn" else ("boxes", "labels")
                inside = [{name: target[name] for name in kept} for target in targets]
                for target in inside:
                    target["labels"] = target["labels"] + self.background
                    if "masks" in target:
                        target["masks"] = target["masks"].to(torch.uint8)
                return self.net(list(images), inside)
            transform.paste = False
            try:
                detections = self.net(list(images))
            finally:
                transform.paste = True
        for found, image in zip(detections, images, strict=True):
            found["labels"] = found["labels"] - self.background
            if "masks" in found:
                found["masks"] = place_masks(found["masks"], found["boxes"], (image.shape[1], image.shape[2]))
        return detections

    @property
    def feature_info(self) -> list[MapInfo]:  # pyrefly: ignore[bad-override]
        """Channels and stride of the backbone's maps."""
        maps = zip(self.body.widths, self.body.reductions, strict=True)
        return [{"module": f"body.{i}", "num_chs": w, "reduction": r} for i, (w, r) in enumerate(maps)]

    @torch.no_grad()
    def attention_maps(self, images: Tensor) -> list[BlockMap]:
        """Attention maps of the backbone's blocks, of images (B, 3, H, W) that are normalised already."""
        return self.body.attention_maps(images)

    def macs(self) -> int:
        """Multiply-adds of one image of `img_size`; see `cost_table`."""
        return sum(row.macs for row in self.cost_table())

    def cost_table(self) -> list[PartCost]:
        """Parameters and multiply-adds of backbone, pyramid and heads; the R-CNNs' of as many boxes as they look at."""
        twin = on_meta(self.net)
        levels, pyramid = count_macs(twin.backbone.neck, self.meta_maps())
        _, heads = count_macs(self._run_heads, twin, list(levels.values()))
        counts = [count_parameters(self.body), count_parameters(self.net.backbone.fpn)]
        return [
            PartCost("backbone", counts[0], self.body.macs(self.img_size)),
            PartCost("pyramid", counts[1], pyramid),
            PartCost("heads", count_parameters(self) - sum(counts), heads),
        ]

    def warnings(self) -> list[str]:
        """What `tokenmix info` warns of."""
        return self.body.warnings()

    def _run_heads(self, twin: Any, levels: list[Tensor]) -> None:
        if self.kind == "retinanet":
            twin.head(levels)
            return
        twin.rpn.head(levels)
        width, roi = self.sizes.width, twin.roi_heads
        roi.box_predictor(roi.box_head(torch.empty(self.sizes.proposals[1], width, 7, 7, device="meta")))
        if self.kind == "mask-rcnn":
            boxes = torch.empty(roi.detections_per_img, width, 14, 14, device="meta")
            roi.mask_predictor(roi.mask_head(boxes))

    def set_input_size(self, img_size: Size) -> None:
        """Set the image size for which costs are counted; a backbone that takes only one size, a square, takes this
        one.

        Raises:
            UserError: no square, where it must be one.
        """
        size = pair(img_size)
        if self.fixed_size:
            if size[0] != size[1]:
                raise UserError(f"this detector takes square images, not {size[0]} x {size[1]}; give one side")
            self.body.set_input_size(size)
            transform = self.net.transform
            transform.min_size, transform.max_size, transform.size_divisible = (size[0],), size[0], size[0]
        self.img_size = size

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the backbone's stages or blocks in the backward pass."""
        self.body.set_grad_checkpointing(enable)

    def no_weight_decay(self) -> set[str]:
        """Parameters without weight decay, next to those of one axis."""
        return {f"net.backbone.body.{name}" for name in self.body.no_weight_decay()}

    def starting_weights(
        self, weights: Mapping[str, Tensor], img_size: tuple[int, int] | None = None
    ) -> tuple[dict[str, Tensor], str | None]:
        """A whole state dict from weights of another detector, or of a classifier whose backbone this is.

        What is learned over positions is interpolated; layers for another number of classes, and what a classifier
        lacks, start fresh, which the second value says in a line.
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
    """The keys of a LaViT, an EANet or a ResNet of timm's as those of a backbone."""
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
    """A detector over `ResNetBackbone`: images of any size, the shorter side brought to `min_size`.

    `norm="frozen"` with `pretrained_backbone=True` and `frozen_stages=2` is what the published 1x schedules do.

    Args:
        kind: which of torchvision's detectors.
        heads: fields of `HeadSizes`.
        backbone, backbone_kwargs, levels, mixer, num_slots, tie, norm, pretrained_backbone, frozen_stages: of
            `ResNetBackbone`.
        image_mean, image_std: of the images' channels, in 0..1.
        others: of `Detector`.
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
        min_size=min_size,
        max_size=max_size,
        multiple=multiple,
        fixed_size=False,
        img_size=pair(img_size),
        score=score,
        nms=nms,
        detections=detections,
        mean=image_mean,
        std=image_std,
        device=device,
    )


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
        min_size=size[0],
        max_size=size[0],
        multiple=size[0],
        fixed_size=True,
        img_size=size,
        score=score,
        nms=nms,
        detections=detections,
        mean=image_mean,
        std=image_std,
        device=device,
    )
