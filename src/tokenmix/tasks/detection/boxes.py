"""Detection: boxes with a class, average precision of boxes."""

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torchmetrics import MetricCollection

from tokenmix.errors import UserError
from tokenmix.tasks.detection.metrics import NUMBERS, AveragePrecision
from tokenmix.tasks.detection.task import ObjectTask

__all__ = ["Detection"]


class Detection(ObjectTask):
    """Boxes by RetinaNet or Faster R-CNN; COCO's average precision of boxes."""

    tables: ClassVar[frozenset[str]] = frozenset({"per_class"})
    comparison: ClassVar[str | None] = "--model retinanet_nano --model-kwargs mixer=none, then self, then external"
    want: ClassVar[Literal["boxes", "masks"]] = "boxes"

    def metrics(self) -> MetricCollection:
        """The numbers of `AveragePrecision`."""
        boxes = AveragePrecision("bbox", num_classes=len(self.data["classes"]), count=self.options.detections)
        return MetricCollection({"map": boxes}, compute_groups=False)

    def numbers(self) -> list[str]:
        """Those that are logged."""
        return list(NUMBERS)

    def example(self) -> dict[str, Tensor]:
        """Two images of noise, of the size at which RetinaNet looks."""
        if self.model.kind != "retinanet":
            raise UserError(
                f"{self.config.model.model} cannot be exported: how many boxes its second stage looks at depends on "
                "the image; train a retinanet_* model, whose boxes and scores are exported before NMS"
            )
        return {"images": torch.rand(2, 3, *self.data["img_size"])}

    def answering(self) -> nn.Module:
        """Images (B, 3, H, W) of one size to (B, A, 4 + classes): boxes and scores of every anchor, before NMS."""
        return AllAnchors(self.model)


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
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (detector.mean, detector.std))
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, 3, H, W) to (B, A, 4 + classes)."""
        maps = list(self.net.backbone((images - self.mean) / self.std).values())
        found = self.net.head(maps)
        anchors = self._anchors(maps, (images.shape[2], images.shape[3])).to(images)
        centres = (anchors[:, :2] + anchors[:, 2:]) / 2
        sides = anchors[:, 2:] - anchors[:, :2]
        shift, growth = found["bbox_regression"].split(2, dim=2)
        middle = shift * sides + centres
        half = growth.clamp(max=self.net.box_coder.bbox_xform_clip).exp() * sides / 2
        return torch.cat([middle - half, middle + half, found["cls_logits"].sigmoid()], dim=2)

    def _anchors(self, maps: list[Tensor], size: tuple[int, int]) -> Tensor:
        generator = self.net.anchor_generator
        grids = [x.shape[2:] for x in maps]
        strides = [[size[0] // grid[0], size[1] // grid[1]] for grid in grids]
        places = []
        for cell, grid, stride in zip(generator.cell_anchors, grids, strides, strict=True):
            rows, columns = (torch.arange(n) * s for n, s in zip(grid, stride))
            y, x = torch.meshgrid(rows, columns, indexing="ij")
            corner = torch.stack([x, y, x, y], dim=2).reshape(-1, 1, 4)
            places.append((corner + cell[None]).reshape(-1, 4))
        return torch.cat(places).float()
