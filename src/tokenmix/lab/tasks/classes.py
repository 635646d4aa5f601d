"""What tasks with one class for each sample share: metrics, weights of the loss, predictions that are kept, answers."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import (
    BinaryAUROC,
    MulticlassAccuracy,
    MulticlassCalibrationError,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
    MulticlassRecall,
)
from torchmetrics.utilities.data import dim_zero_cat

from tokenmix.lab.train.distillation import DistillingTask
from tokenmix.lab.train.metrics import CrossEntropy, F1OfClass
from tokenmix.lab.train.predictions import SampledMetric

# Of more classes nobody reads a table or a matrix, and it would be written with every checkpoint.
CONFUSION_CLASSES = 200
# Up to as many classes the probability of each is kept.
ALL_PROBABILITIES = 16
BINS = 15


class Recall(MulticlassRecall):
    """The recall of each class; nan for one that does not occur."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes, average="none", validate_args=False, zero_division=math.nan)


class BalancedAccuracy(Recall):
    """The mean recall of the classes that occur; torchmetrics' own mean counts those that are only predicted as 0."""

    def compute(self) -> Tensor:
        """The mean so far."""
        return super().compute().nanmean()


class Calibration(MulticlassCalibrationError):
    """Expected calibration error: over 15 bins of confidence, the mean distance of confidence and accuracy."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes, n_bins=BINS, norm="l1", validate_args=False)

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch of logits, which torchmetrics takes for probabilities where all are in [0, 1]."""
        super().update(preds.float().softmax(-1), target)


class RankArea(BinaryAUROC):
    """Area under the ROC curve of two classes, from logits (B, 2); nan where only one class occurs."""

    def __init__(self) -> None:
        super().__init__(validate_args=False)

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch of logits and labels."""
        super().update(preds.float().softmax(-1)[:, 1], target)

    def compute(self) -> Tensor:
        """The area so far."""
        target = dim_zero_cat(self.target)  # type: ignore[arg-type]
        return super().compute() if 0 < target.sum() < len(target) else torch.tensor(math.nan)


class ClassTask(DistillingTask):
    """A task that predicts one of the classes that the data's description names.

    Sizes of the classes are in `data["counts"]["train"]`, by name.
    """

    monitor: str = "accuracy"
    mode: Literal["max", "min"] = "max"
    tables: ClassVar[frozenset[str]] = frozenset({"confusion", "recall"})

    def usual_monitor(self) -> str:
        """Balanced accuracy where one class is more than twice as large as the others are on average."""
        return "balanced_accuracy" if is_unbalanced(class_sizes(self.data)) else "accuracy"

    def class_metrics(self, **more: Metric) -> MetricCollection:
        """Accuracy and balanced accuracy, macro F1, calibration error, loss; recall of each class and confusion matrix
        (true x predicted) of up to 200 classes; of two classes AUC, and F1 of the smaller one; and more.
        """
        classes = len(self.data["classes"])
        chosen: dict[str, Metric] = {
            "accuracy": MulticlassAccuracy(classes, average="micro", validate_args=False),
            "balanced_accuracy": BalancedAccuracy(classes),
            "macro_f1": MulticlassF1Score(classes, average="macro", validate_args=False),
            "ece": Calibration(classes),
            "loss": CrossEntropy(),
        }
        if classes == 2:
            chosen |= {"auc": RankArea(), "f1": F1OfClass(positive_class(self.data))}
        if classes <= CONFUSION_CLASSES:
            chosen |= {"recall": Recall(classes), "confusion": MulticlassConfusionMatrix(classes, validate_args=False)}
        return MetricCollection({**chosen, **more}, compute_groups=False)

    def on_validation_epoch_end(self) -> None:
        """Keep the metrics as plain values, the recall of each class by its name."""
        super().on_validation_epoch_end()
        if "recall" in self.results:
            self.name_classes("recall")

    def class_loss(self, logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
        """Mean cross-entropy with the weights of the classes that `class_weights` gives."""
        if self.options.class_weights == "none":
            return F.cross_entropy(logits, targets, label_smoothing=smoothing)
        weights = balanced_weights(class_sizes(self.data)).to(logits)
        # A mean over samples, not over weights: then it does not matter how a step is split into batches.
        return F.cross_entropy(logits, targets, weight=weights, label_smoothing=smoothing, reduction="none").mean()

    def judge(self, logits: Tensor, labels: Tensor, index: Tensor) -> None:
        """Count a batch of logits (B, classes) in the metrics, and keep what they say."""
        self.metrics.update(logits, labels)
        if self.kept is None:
            return
        probabilities, true = logits.float().softmax(-1), logits.gather(1, labels[:, None])
        confidence, predicted = probabilities.max(-1)
        short = torch.int16 if logits.shape[1] < 1 << 15 else torch.int32
        kept = {
            "index": index,
            "label": labels.to(short),
            "predicted": predicted.to(short),
            "rank": (logits > true).sum(1).to(short),
            "confidence": confidence,
            "loss": F.cross_entropy(logits.float(), labels, reduction="none"),
        }
        if logits.shape[1] <= ALL_PROBABILITIES:
            # Of two classes they are ranked, in which half precision would make ties.
            kept["probabilities"] = probabilities if logits.shape[1] == 2 else probabilities.half()
        self.keep(**kept)

    @classmethod
    def sampled_metric(
        cls, predictions: Mapping[str, Tensor], metric: str, data: Mapping[str, Any]
    ) -> SampledMetric | None:
        """Each number of `class_metrics`, top-5 accuracy and Matthews' correlation."""
        index, label, predicted = predictions["index"], predictions["label"].long(), predictions["predicted"].long()
        means = {
            "accuracy": label == predicted,
            "top5": predictions["rank"] < 5,
            "loss": predictions["loss"],
        }
        if metric in means:
            return SampledMetric.mean(index, means[metric])
        classes = len(data["classes"])

        def per_class(weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            """Weights of the samples of each class that are right, all, and predicted to be of it, (R, classes)."""
            empty = weights.new_zeros(len(weights), classes)
            right = weights * (label == predicted)
            added = ((right, label), (weights, label), (weights, predicted))
            return tuple(empty.index_add(1, place, values) for values, place in added)  # type: ignore[return-value]

        def f1(weights: Tensor) -> Tensor:
            right, there, found = per_class(weights)
            return 2 * right / (there + found)  # nan for a class that neither is there nor is found

        def balanced(weights: Tensor) -> Tensor:
            right, there, _ = per_class(weights)
            return (right / there).nanmean(1)

        def matthews(weights: Tensor) -> Tensor:
            right, there, found = per_class(weights)
            total = weights.sum(1)
            over = right.sum(1) * total - (there * found).sum(1)
            under = (total**2 - (there**2).sum(1)) * (total**2 - (found**2).sum(1))
            return torch.where(under > 0, over / under.sqrt(), 0.0)

        positive = positive_class(data)
        functions: dict[str, Callable[[Tensor], Tensor]] = {
            "balanced_accuracy": balanced,
            "macro_f1": lambda weights: f1(weights).nanmean(1),
            "f1": lambda weights: f1(weights)[:, positive].nan_to_num(0.0),
            "matthews": matthews,
        }
        if metric == "ece":
            edges = torch.linspace(0, 1, BINS + 1)
            place = torch.bucketize(predictions["confidence"], edges, right=True) - 1
            gap = (label == predicted).double() - predictions["confidence"].double()
            values = F.one_hot(place, BINS + 1) * gap[:, None]
            sums = torch.cat([values, torch.ones(len(gap), 1)], 1)
            return SampledMetric.of_sums(index, sums, lambda total: total[:, :-1].abs().sum(1) / total[:, -1])
        if metric == "auc" and "probabilities" in predictions:
            _, place = predictions["probabilities"][:, 1].unique(return_inverse=True)
            return SampledMetric(index, lambda weights: rank_area(weights, label == 1, place))
        return SampledMetric(index, functions[metric]) if metric in functions else None


def rank_area(weights: Tensor, positive: Tensor, place: Tensor) -> Tensor:
    """Probability that a positive sample is placed above a negative one, ties counting half.

    Shape:
        weights (R, n), positive bool (n,), place int64 (n,), the rank of the sample's score; returns (R,).
    """
    empty = weights.new_zeros(len(weights), int(place.max()) + 1)
    above = empty.index_add(1, place, weights * positive)
    below = empty.index_add(1, place, weights * ~positive)
    won = above * (below.cumsum(1) - below / 2)
    return won.sum(1) / (above.sum(1) * below.sum(1))


def class_sizes(data: Mapping[str, Any]) -> list[int]:
    """Training samples of each class, of the run's description of its data; ones where that does not say."""
    sizes = data.get("counts", {}).get("train", {})
    known = set(sizes) == set(data["classes"])
    return [sizes[name] for name in data["classes"]] if known else [1] * len(data["classes"])


def class_counts(classes: Sequence[str], labels: Tensor) -> dict[str, dict[str, int]]:
    """`counts` of a description: the training samples of each class."""
    return {"train": dict(zip(classes, torch.bincount(labels, minlength=len(classes)).tolist()))}


def is_unbalanced(sizes: Sequence[int]) -> bool:
    """Whether the largest class is more than twice as large as the others are on average."""
    return len(sizes) > 1 and max(sizes) * (len(sizes) - 1) > 2 * (sum(sizes) - max(sizes))


def balanced_weights(sizes: Sequence[int]) -> Tensor:
    """N / (C * N_c) of the C classes that occur, 0 of others; their mean over the samples is 1."""
    counts = torch.tensor(sizes, dtype=torch.float64)
    return torch.where(counts > 0, counts.sum() / ((counts > 0).sum() * counts), 0.0)


def positive_class(data: Mapping[str, Any]) -> int:
    """Of two classes that which F1 is of: the smaller one, or the second if they are equal, or in GLUE's metrics."""
    sizes = class_sizes(data)
    return 0 if sizes[0] < sizes[-1] and "f1" not in data.get("metrics", ()) else 1


def likeliest(probabilities: Tensor, classes: Sequence[str], **also: Any) -> dict[str, Any]:
    """The most probable class, its probability and the five most probable ones, from the probability of each (C,)."""
    best, which = probabilities.topk(min(5, len(classes)))
    top = {classes[i]: round(p, 6) for p, i in zip(best.tolist(), which.tolist())}
    label, probability = next(iter(top.items()))
    return {"label": label, "probability": probability, **also, "top": top}


def told(answer: Mapping[str, Any]) -> str:
    """The likeliest class and its probability in words."""
    return f"{answer['label']}, {answer['probability']:.0%}"
