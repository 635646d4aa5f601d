"""What tasks with one class for each sample share: its metrics, and the answer to a sample."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

from tokenmix.lab.train.metrics import CrossEntropy

CONFUSION_CLASSES = 200


def class_metrics(classes: int, **more: Metric) -> MetricCollection:
    """Accuracy, loss, of up to 200 classes the confusion matrix (true x predicted), and more."""
    more |= {"accuracy": MulticlassAccuracy(classes, average="micro", validate_args=False), "loss": CrossEntropy()}
    # Nobody reads a matrix of a million numbers, and it would be written with every checkpoint.
    if classes <= CONFUSION_CLASSES:
        more["confusion"] = MulticlassConfusionMatrix(classes, validate_args=False)
    return MetricCollection({**more}, compute_groups=False)


def likeliest(probabilities: Tensor, classes: Sequence[str], **also: Any) -> dict[str, Any]:
    """The most probable class, its probability and the five most probable ones, from the probability of each (C,)."""
    best, which = probabilities.topk(min(5, len(classes)))
    top = {classes[i]: round(p, 6) for p, i in zip(best.tolist(), which.tolist())}
    label, probability = next(iter(top.items()))
    return {"label": label, "probability": probability, **also, "top": top}
