"""A detector of torchvision's with our backbone, under the conventions of this library's models."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tokenmix import checkpoints
from tokenmix.errors import UserError
from tokenmix.layers.base import count_parameters
from tokenmix.layers.counting import count_macs, on_meta
from tokenmix.models.detection.backbones import Backbone
from tokenmix.models.detection.networks import Answers, HeadSizes, ImageScale, Kind, build_network
from tokenmix.models.detection.pictures import place_masks, with_dense_masks
from tokenmix.models.isotropic import BlockMap
from tokenmix.models.maps import OnMaps, PartCost
from tokenmix.models.stems import pair

Target = Mapping[str, Tensor]
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
DEFAULT = Answers()
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
        answers: scores, NMS and number of the boxes that evaluation gives.
        resize: how images are resized.
        fixed_size: the backbone takes only one size, that of `resize`.
        mean, std: of the images' channels, in 0..1.
        img_size: size for which `macs` counts.
        device: of the weights.

    Shape:
        a list of float images (3, H, W) in 0..1, outside of training also uint8, and in training a list
        of targets: boxes (M, 4) as left, top, right, bottom, labels (M,), of Mask R-CNN masks (M, H, W).

    Raises:
        UserError: no classes, or images that are not such a list.
    """

    def __init__(
        self,
        kind: Kind,
        body: Backbone,
        sizes: HeadSizes,
        *,
        num_classes: int,
        resize: ImageScale,
        fixed_size: bool,
        img_size: tuple[int, int],
        answers: Answers = DEFAULT,
        mean: Sequence[float] = IMAGENET[0],
        std: Sequence[float] = IMAGENET[1],
        device: Any = None,
    ) -> None:
        super().__init__()
        if num_classes < 1:
            raise UserError(f"a detector needs at least one class, got num_classes={num_classes}")
        self.kind: Kind = kind
        self.num_classes, self.img_size, self.sizes = num_classes, img_size, sizes
        self.mean, self.std, self.fixed_size = tuple(mean), tuple(std), fixed_size
        self.background = 0 if kind == "retinanet" else 1
        self.net: Any = build_network(
            kind,
            body,
            sizes,
            num_classes=num_classes,
            answers=answers,
            device=device,
            resize={**resize.arguments(), "image_mean": list(mean), "image_std": list(std)},
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
                return self.net(list(images), [self._inside(target) for target in targets])
            transform.paste = False
            try:
                detections = self.net(list(images))
            finally:
                transform.paste = True
            return [self._outside(found, image) for found, image in zip(detections, images, strict=True)]

    def _inside(self, target: Target) -> dict[str, Tensor]:
        kept = ("boxes", "labels", "masks") if self.kind == "mask-rcnn" else ("boxes", "labels")
        inside = {name: target[name] for name in kept}
        inside["labels"] = inside["labels"] + self.background
        if "masks" in inside:
            inside["masks"] = inside["masks"].to(torch.uint8)
        return inside

    def _outside(self, found: dict[str, Tensor], image: Any) -> dict[str, Any]:
        found = {**found, "labels": found["labels"] - self.background}
        if "masks" not in found:
            return found
        return {**found, "masks": place_masks(found["masks"], found["boxes"], (image.shape[1], image.shape[2]))}

    @property
    def feature_info(self) -> list[dict[str, Any]]:  # pyrefly: ignore[bad-override]
        """Channels and stride of the backbone's maps."""
        return [{"num_chs": w, "reduction": r} for w, r in zip(self.body.widths, self.body.reductions, strict=True)]

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

    def set_input_size(self, img_size: int | tuple[int, int]) -> None:
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
        names = getattr(self.body.net, "no_weight_decay", set)()  # type: ignore[operator]
        return {f"net.backbone.body.net.{name}" for name in names}

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
        for mine in (f"{body}.net.{name}", f"{body}.block.{name.removeprefix('blocks.0.mixer.')}"):
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
