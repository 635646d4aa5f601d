"""What is learnt: one Lightning module with its data reader per task, in one literal table.

The table names modules and does not import them, so that listing tasks needs neither torch nor Lightning.
"""

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenmix.errors import unknown_name

if TYPE_CHECKING:
    from tokenmix.tasks.base import TaskModule

__all__ = ["TASKS", "TEXT_TASKS", "TaskSpec", "get_task", "list_tasks"]


@dataclass(frozen=True)
class TaskSpec:
    """One row of the table: where the task's class is, and one line for `tokenmix list tasks`."""

    module: str
    name: str
    about: str


TASKS: dict[str, TaskSpec] = {
    "image-classification": TaskSpec(
        "tokenmix.tasks.image_classification", "ImageClassification", "one label for each image; accuracy"
    ),
    "semantic-segmentation": TaskSpec(
        "tokenmix.tasks.semantic_segmentation",
        "SemanticSegmentation",
        "a class for each pixel; mean intersection over union",
    ),
    "detection": TaskSpec(
        "tokenmix.tasks.detection", "Detection", "boxes with a class; COCO's average precision of boxes"
    ),
    "instance-segmentation": TaskSpec(
        "tokenmix.tasks.instance_segmentation",
        "InstanceSegmentation",
        "a mask for each object; COCO's average precision of masks",
    ),
    "masked-lm": TaskSpec(
        "tokenmix.tasks.masked_lm", "MaskedLM", "masked words of running text; perplexity at masked places"
    ),
    "text-classification": TaskSpec(
        "tokenmix.tasks.text_classification",
        "TextClassification",
        "one label for each text or pair of texts; accuracy, macro F1",
    ),
    "question-answering": TaskSpec(
        "tokenmix.tasks.question_answering",
        "QuestionAnswering",
        "the answer's span in a context, or none; exact match, F1",
    ),
    "point-classification": TaskSpec(
        "tokenmix.tasks.point_classification",
        "PointClassification",
        "one class for each cloud of points; overall and balanced accuracy",
    ),
    "point-segmentation": TaskSpec(
        "tokenmix.tasks.point_segmentation",
        "PointSegmentation",
        "a part for each point of a cloud; mean intersection over union",
    ),
    "image-generation": TaskSpec(
        "tokenmix.tasks.image_generation", "ImageGeneration", "images of a class from noise, by a GAN; Fréchet distance"
    ),
}
TEXT_TASKS = frozenset({"masked-lm", "text-classification", "question-answering"})
"""Those whose model reads tokens of text."""


def list_tasks() -> list[str]:
    """The names in the table, in its order."""
    return list(TASKS)


def get_task(name: str) -> "type[TaskModule]":
    """The class of a task; `UserError` with the nearest names if there is none."""
    if name not in TASKS:
        raise unknown_name("task", name, TASKS)
    spec = TASKS[name]
    return getattr(importlib.import_module(spec.module), spec.name)
