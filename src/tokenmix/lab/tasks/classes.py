"""What tasks with one class for each sample share: metrics, weights of the loss, predictions that are kept, answers."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenmix.lab.train.distillation import DistillingTask
from tokenmix.lab.train.metrics import (
    MEASURES,
    ClassCounts,
    CrossEntropy,
    Metric,
    Rows,
    Sums,
    f1_of,
    recall_of,
)
from tokenmix.lab.train.predictions import SampledMetric

# Of more classes nobody reads a table or a matrix, and it would be written with every checkpoint.
CONFUSION_CLASSES = 200
# Up to as many classes the probability of each is kept.
ALL_PROBABILITIES = 16
BINS = 15


class Confusion(Sums):
    """Samples by true class (rows) and predicted class (columns)."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes, classes)

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch of logits and labels."""
        classes = preds.shape[1]
        self.add(torch.bincount(target * classes + preds.argmax(1), minlength=classes**2).view(classes, classes))

    def compute(self) -> Tensor:
        """The matrix so far."""
        return self.total().long()


class Calibration(Sums):
    """Expected calibration error: over 15 bins of confidence, the mean distance of confidence and accuracy."""

    higher_is_better = False

    def __init__(self) -> None:
        super().__init__(BINS + 2)

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch of logits and labels."""
        confidence, predicted = preds.float().softmax(-1).max(-1)
        self.add(calibration_gaps(confidence, predicted == target).sum(0))

    def compute(self) -> Tensor:
        """The error so far."""
        return calibration_error(self.total())


def calibration_gaps(confidence: Tensor, right: Tensor) -> Tensor:
    """Of each sample (n,) accuracy minus confidence in the column of its bin, and a last column of ones."""
    place = torch.bucketize(confidence, torch.linspace(0, 1, BINS + 1, device=confidence.device), right=True) - 1
    gap = right.float() - confidence.float()
    return torch.cat([F.one_hot(place, BINS + 1) * gap[:, None], torch.ones_like(gap)[:, None]], 1).cpu().double()


def calibration_error(sums: Tensor) -> Tensor:
    """The error from sums (..., bins + 1) of `calibration_gaps`."""
    return sums[..., :-1].abs().sum(-1) / sums[..., -1]


class RankArea(Rows):
    """Area under the ROC curve of two classes, from logits (B, 2); nan where only one class occurs."""

    higher_is_better = True

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch of logits and labels."""
        self.keep(preds.float().softmax(-1)[:, 1], target)

    def compute(self) -> Tensor:
        """The area so far."""
        score, label = self.columns()
        _, place = score.unique(return_inverse=True)
        return rank_area(torch.ones(1, len(score), dtype=torch.float64), label == 1, place)[0]


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

    def class_metrics(self, **more: Metric) -> dict[str, Metric]:
        """Accuracy and balanced accuracy, macro F1, calibration error, loss; recall of each class and confusion matrix
        (true x predicted) of up to 200 classes; of two classes AUC, and F1 of the smaller one; and more.
        """
        classes = len(self.data["classes"])
        measures = {name: MEASURES[name] for name in ("accuracy", "balanced_accuracy", "macro_f1")}
        if classes == 2:
            measures["f1"] = partial(f1_of_class, positive=positive_class(self.data))
        if classes <= CONFUSION_CLASSES:
            measures["recall"] = recall_of
        if "matthews" in self.data.get("metrics", ()):
            measures["matthews"] = MEASURES["matthews"]
        chosen: dict[str, Metric] = {"ece": Calibration(), "loss": CrossEntropy()}
        if classes == 2:
            chosen["auc"] = RankArea()
        if classes <= CONFUSION_CLASSES:
            chosen["confusion"] = Confusion(classes)
        return {"counts": ClassCounts(classes, measures), **chosen, **more}

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
        right = label == predicted
        means = {"accuracy": right, "top5": predictions["rank"] < 5, "loss": predictions["loss"]}
        if metric in means:
            return SampledMetric.mean(index, means[metric])
        if metric == "ece":
            return SampledMetric.of_sums(index, calibration_gaps(predictions["confidence"], right), calibration_error)
        if metric == "auc" and "probabilities" in predictions:
            _, place = predictions["probabilities"][:, 1].unique(return_inverse=True)
            return SampledMetric(index, lambda weights: rank_area(weights, label == 1, place))
        measures = {**MEASURES, "f1": partial(f1_of_class, positive=positive_class(data))}
        if metric not in measures:
            return None

        def resampled(weights: Tensor) -> Tensor:
            """Of weights of the samples of each class that are right, all, and predicted to be of it."""
            empty = weights.new_zeros(len(weights), len(data["classes"]))
            added = ((weights * right, label), (weights, label), (weights, predicted))
            return measures[metric](torch.stack([empty.index_add(1, place, values) for values, place in added], 1))

        return SampledMetric(index, resampled)


def f1_of_class(counts: Tensor, positive: int) -> Tensor:
    """F1 of one class; 0 where it neither is there nor is predicted."""
    return f1_of(counts)[..., positive].nan_to_num(0.0)


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
