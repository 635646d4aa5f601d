"""Object detection and instance segmentation."""

from tokenmix.registry import TASKS, TaskEntry
from tokenmix.tasks.detection import presets

__all__ = ["presets"]

TASKS.register(
    TaskEntry(
        name="detection",
        about="boxes with a class; COCO's average precision of boxes",
        task="tokenmix.tasks.detection.boxes_and_masks:Detection",
        options="tokenmix.tasks.detection.options:ObjectOptions",
        defaults={"model": "faster_rcnn_nano"},
    ),
    TaskEntry(
        name="instance-segmentation",
        about="a mask for each object; COCO's average precision of masks",
        task="tokenmix.tasks.detection.boxes_and_masks:InstanceSegmentation",
        options="tokenmix.tasks.detection.options:ObjectOptions",
        defaults={"model": "mask_rcnn_nano"},
    ),
)
