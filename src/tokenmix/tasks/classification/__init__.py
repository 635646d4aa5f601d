"""Image classification."""

from tokenmix.registry import TASKS, TaskEntry
from tokenmix.tasks.classification import presets

__all__ = ["presets"]

TASKS.register(
    TaskEntry(
        name="image-classification",
        about="one label for each image; accuracy",
        task="tokenmix.tasks.classification.task:ImageClassification",
        options="tokenmix.tasks.classification.options:ClassificationOptions",
        defaults={"model": "vit_nano", "data": "fashion-mnist"},
        other_models="tokenmix.tasks.classification.presets:may_be_timms",
    ),
)
