"""Object detection and instance segmentation."""

from tokenmix.lab.registry import TASKS, TaskEntry

TASKS.register(
    TaskEntry(
        name="detection",
        about="boxes with a class; COCO's average precision of boxes",
        task="tokenmix.lab.tasks.detection.task:Detection",
        options="tokenmix.lab.tasks.detection.options:ObjectOptions",
        defaults={"model": "faster_rcnn_nano"},
    ),
    TaskEntry(
        name="instance-segmentation",
        about="a mask for each object; COCO's average precision of masks",
        task="tokenmix.lab.tasks.detection.task:InstanceSegmentation",
        options="tokenmix.lab.tasks.detection.options:ObjectOptions",
        defaults={"model": "mask_rcnn_nano"},
    ),
)
