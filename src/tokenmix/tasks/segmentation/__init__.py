"""Semantic segmentation."""

from tokenmix.registry import TASKS, TaskEntry
from tokenmix.tasks.segmentation import presets

__all__ = ["presets"]

TASKS.register(
    TaskEntry(
        name="semantic-segmentation",
        about="a class for each pixel; mean intersection over union",
        task="tokenmix.tasks.segmentation.task:SemanticSegmentation",
        options="tokenmix.tasks.segmentation.options:SegmentationOptions",
        defaults={"model": "eanet_seg_nano"},
    ),
)
