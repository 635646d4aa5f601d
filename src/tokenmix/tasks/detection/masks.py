"""Instance segmentation: a mask for each object, average precision of masks."""

from typing import Any, ClassVar, Literal

from torchmetrics import MetricCollection

from tokenmix.errors import UserError
from tokenmix.tasks.detection.metrics import NUMBERS, AveragePrecision
from tokenmix.tasks.detection.task import ObjectTask

__all__ = ["InstanceSegmentation"]


class InstanceSegmentation(ObjectTask):
    """Masks by Mask R-CNN; COCO's average precision of masks, and under `box_*` that of its boxes."""

    tables: ClassVar[frozenset[str]] = frozenset({"per_class", "box_per_class"})
    comparison: ClassVar[str | None] = "--model mask_rcnn_nano --model-kwargs mixer=none, then self, then external"
    want: ClassVar[Literal["boxes", "masks"]] = "masks"

    def metrics(self) -> MetricCollection:
        """The numbers of `AveragePrecision`, of masks and of boxes."""
        masks = AveragePrecision("segm", num_classes=len(self.data["classes"]), count=self.options.detections)
        return MetricCollection({"map": masks}, compute_groups=False)

    def numbers(self) -> list[str]:
        """Those that are logged."""
        return [*NUMBERS, *(f"box_{name}" for name in NUMBERS)]

    def example(self) -> dict[str, Any]:
        """Not to be had."""
        raise UserError(
            f"{self.config.model.model} cannot be exported: how many masks it draws depends on the image; train a "
            "retinanet_* model for detection, whose boxes and scores are exported before NMS"
        )
