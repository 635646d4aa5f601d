"""Detection, boxes with a class, and instance segmentation, a mask for each object; average precision of either."""

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from tokenmix.errors import UserError
from tokenmix.lab.tasks.detection.task import ObjectTask
from tokenmix.lab.tasks.images import channel_columns


class Detection(ObjectTask):
    """Boxes by RetinaNet or Faster R-CNN; COCO's average precision of boxes."""

    tables: ClassVar[frozenset[str]] = frozenset({"per_class"})
    comparison: ClassVar[str | None] = "--model retinanet_nano --model-kwargs mixer=none, then self, then external"
    want: ClassVar[Literal["boxes", "masks"]] = "boxes"

    def example(self) -> dict[str, Tensor]:
        """Two images of noise, of the size at which RetinaNet looks."""
        if self.model.kind != "retinanet":
            raise UserError(
                f"{self.config.model.model} cannot be exported: the number of boxes in its second stage depends on "
                "the image; train a retinanet_* model, whose boxes and scores are exported before NMS"
            )
        return {"images": torch.rand(2, 3, *self.data["img_size"])}

    def answering(self) -> nn.Module:
        """Images (B, 3, H, W) of one size to (B, A, 4 + classes): boxes and scores of every anchor, before NMS."""
        return AllAnchors(self.model)


class InstanceSegmentation(ObjectTask):
    """Masks by Mask R-CNN; COCO's average precision of masks, and under `box_*` that of its boxes."""

    tables: ClassVar[frozenset[str]] = frozenset({"per_class", "box_per_class"})
    comparison: ClassVar[str | None] = "--model mask_rcnn_nano --model-kwargs mixer=none, then self, then external"
    want: ClassVar[Literal["boxes", "masks"]] = "masks"

    def example(self) -> dict[str, Any]:
        """Not to be had."""
        raise UserError(
            f"{self.config.model.model} cannot be exported: the number of masks depends on the image; train a "
            "retinanet_* model for detection, whose boxes and scores are exported before NMS"
        )


class AllAnchors(nn.Module):
    """A RetinaNet without what depends on the image: boxes (left, top, right, bottom) and scores of all anchors.

        out = [decode(regression, anchors), sigmoid(logits)]

    Images are of one size and in 0..1; they are not resized, only normalised.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, detector: Any) -> None:
        super().__init__()
        self.net: Any = detector.net
        self.register_buffer("mean", channel_columns(detector.mean))
        self.register_buffer("std", channel_columns(detector.std))

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, 3, H, W) to (B, A, 4 + classes)."""
        maps = list(self.net.backbone((images - self.mean) / self.std).values())
        found = self.net.head(maps)
        grids = [list(x.shape[2:]) for x in maps]
        strides = [[images.shape[2] // grid[0], images.shape[3] // grid[1]] for grid in grids]
        anchors = torch.cat(self.net.anchor_generator.grid_anchors(grids, strides)).to(images)
        shifts = found["bbox_regression"]
        # Not len(shifts), which export would make a constant.
        boxes = self.net.box_coder.decode_single(shifts.flatten(0, 1), anchors.repeat(shifts.shape[0], 1))
        return torch.cat([boxes.view_as(shifts), found["cls_logits"].sigmoid()], dim=2)
