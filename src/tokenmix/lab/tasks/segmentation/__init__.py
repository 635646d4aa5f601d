"""Semantic segmentation."""

from tokenmix.lab.registry import TASKS, TaskEntry

TASKS.register(
    TaskEntry(
        name="semantic-segmentation",
        about="a class for each pixel; mean intersection over union",
        task="tokenmix.lab.tasks.segmentation.task:SemanticSegmentation",
        options="tokenmix.lab.tasks.segmentation.options:SegmentationOptions",
        defaults={"model": "eanet_seg_nano"},
        other_models="tokenmix.registry:is_foreign",
    ),
)
