"""Point clouds: classification and part segmentation."""

from tokenmix.registry import TASKS, TaskEntry
from tokenmix.tasks.points import presets

__all__ = ["presets"]

TASKS.register(
    TaskEntry(
        name="point-classification",
        about="one class for each point cloud; overall and balanced accuracy",
        task="tokenmix.tasks.points.classification:PointClassification",
    ),
    TaskEntry(
        name="point-segmentation",
        about="a part for each point of a cloud; mean intersection over union",
        task="tokenmix.tasks.points.segmentation:PointSegmentation",
    ),
)
