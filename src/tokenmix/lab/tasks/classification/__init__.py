"""Image classification."""

from tokenmix.lab.registry import TASKS, TaskEntry

TASKS.register(
    TaskEntry(
        name="image-classification",
        about="one label for each image; accuracy",
        task="tokenmix.lab.tasks.classification.task:ImageClassification",
        options="tokenmix.lab.tasks.classification.options:ClassificationOptions",
        defaults={"model": "vit_nano", "data": "fashion-mnist"},
        skeleton="mixer_nano",
        other_models="tokenmix.registry:may_be_others",
    ),
)
