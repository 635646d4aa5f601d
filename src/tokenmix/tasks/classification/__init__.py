"""Image classification."""

from tokenmix.registry import TASKS, TaskEntry

TASKS.register(
    TaskEntry(
        name="image-classification",
        about="one label for each image; accuracy",
        task="tokenmix.tasks.classification.task:ImageClassification",
        options="tokenmix.tasks.classification.options:ClassificationOptions",
    ),
)
