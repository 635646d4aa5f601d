"""Shared code of tasks with one class per sample: metrics, class weights, saved predictions, answers."""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenmix.files import Values
from tokenmix.lab.train.config import TrainConfig
from tokenmix.lab.train.distillation import DistillingTask
from tokenmix.lab.train.metrics import Metric, Rows, f1_of, matthews_of, recall_of
from tokenmix.lab.train.programs import Description

# Larger tables and matrices are unreadable, and would be written with every checkpoint.
CONFUSION_CLASSES = 200
# Up to this many classes, each class's probability is kept.
ALL_PROBABILITIES = 16
BINS = 15


class ClassTask(DistillingTask):
    """A task that predicts the classes in the data's description, with sizes in `data["counts"]["train"]`."""

    monitor: str = "accuracy"

    @property
    def classes(self) -> list[str]:
        """Names of the classes; empty for numeric labels."""
        return self.data["classes"]

    def usual_monitor(self) -> str:
        """Balanced accuracy if one class is more than twice as large as the mean of the others, in all parts together.

        Which samples are held out for validation should not change the metric.
        """
        sizes = total_sizes(self.data.get("counts", {}))
        return "balanced_accuracy" if is_unbalanced([*sizes.values()]) else "accuracy"

    @classmethod
    def make_metrics(cls, config: TrainConfig, data: Description) -> dict[str, Metric]:
        """Accuracy, balanced accuracy, macro F1, calibration error, loss; for two classes AUC, and F1 of the smaller.

        Up to 200 classes also have recall per class and the confusion matrix (true x predicted). Matthews correlation
        is added if it is usual for the data.
        """
        classes, sizes = len(data["classes"]), class_sizes(data)
        # F1 is that of the smaller of two classes, of the second if they are equal or F1 is one of GLUE's metrics.
        positive = 0 if sizes[0] < sizes[-1] and "f1" not in data.get("metrics", ()) else 1

        def confusion(rows: Rows, weights: Tensor) -> Tensor:
            place = rows["label"].long() * classes + rows["predicted"].long()
            pairs = weights.new_zeros(len(weights), classes**2).index_add(1, place, weights)
            return pairs.long().unflatten(1, (classes, classes))

        def counts(rows: Rows, weights: Tensor) -> Tensor:
            """Weights (R, 3, classes) of the samples per class that are right, true, and predicted."""
            label, predicted = rows["label"].long(), rows["predicted"].long()
            empty = weights.new_zeros(len(weights), classes)
            added = ((weights * (label == predicted), label), (weights, label), (weights, predicted))
            return torch.stack([empty.index_add(1, place, values) for values, place in added], 1)

        def calibration_error(rows: Rows, weights: Tensor) -> Tensor:
            """Expected calibration error: mean distance of confidence and accuracy over bins of confidence."""
            confidence = rows["confidence"].float()
            gap = (rows["label"] == rows["predicted"]).double() - confidence
            place = torch.bucketize(confidence, torch.linspace(0, 1, BINS + 1), right=True) - 1
            binned = weights.new_zeros(len(weights), BINS + 1).index_add(1, place, weights * gap)
            return binned.abs().sum(1) / weights.sum(1)

        def area(rows: Rows, weights: Tensor) -> Tensor:
            _, place = rows["probabilities"][:, 1].unique(return_inverse=True)
            return rank_area(weights, rows["label"] == 1, place)

        found = {
            "accuracy": Metric.mean(lambda rows: rows["label"] == rows["predicted"]),
            "balanced_accuracy": Metric(lambda rows, weights: recall_of(counts(rows, weights)).nanmean(-1)),
            "macro_f1": Metric(lambda rows, weights: f1_of(counts(rows, weights)).nanmean(-1)),
        }
        if classes == 2:
            # 0 for a class that neither occurs nor is predicted.
            found["f1"] = Metric(lambda rows, weights: f1_of(counts(rows, weights))[:, positive].nan_to_num(0.0))
        if classes <= CONFUSION_CLASSES:
            found["recall"] = Metric(lambda rows, weights: recall_of(counts(rows, weights)), names=data["classes"])
        if "matthews" in data.get("metrics", ()):
            found["matthews"] = Metric(lambda rows, weights: matthews_of(counts(rows, weights)))
        found["ece"] = Metric(calibration_error, higher_is_better=False)
        found["loss"] = Metric.mean(lambda rows: rows["loss"], higher_is_better=False)
        if classes == 2:
            found["auc"] = Metric(area)
        if classes <= CONFUSION_CLASSES:
            found["confusion"] = Metric(confusion, names=())
        return found

    def class_loss(self, logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
        """Mean cross-entropy with the class weights of `class_weights`; 0 if labels are not used."""
        if self.teacher is not None and self.options.distill == 1:
            return logits.new_zeros(())
        if self.options.class_weights == "none":
            return F.cross_entropy(logits, targets, label_smoothing=smoothing)
        weights = balanced_weights(class_sizes(self.data)).to(logits)
        # A mean over samples, not over weights, so that the split of a step into batches does not matter.
        return F.cross_entropy(logits, targets, weight=weights, label_smoothing=smoothing, reduction="none").mean()

    def judged(self, logits: Tensor, targets: Tensor, index: Tensor) -> Rows:
        probabilities, true = logits.float().softmax(-1), logits.gather(1, targets[:, None])
        confidence, predicted = probabilities.max(-1)
        short = torch.int16 if logits.shape[1] < 1 << 15 else torch.int32
        kept = {
            "index": index,
            "label": targets.to(short),
            "predicted": predicted.to(short),
            "rank": (logits > true).sum(1).to(short),
            "confidence": confidence,
            "loss": F.cross_entropy(logits.float(), targets, reduction="none"),
        }
        if logits.shape[1] <= ALL_PROBABILITIES:
            # Two classes are ranked, and half precision would make ties.
            kept["probabilities"] = probabilities if logits.shape[1] == 2 else probabilities.half()
        return kept


def rank_area(weights: Tensor, positive: Tensor, place: Tensor) -> Tensor:
    """Probability that a positive sample ranks above a negative one (AUC); ties count half.

    Shape: weights (R, n), positive bool (n,), place int64 (n,), the rank of the sample's score; returns (R,).
    """
    empty = weights.new_zeros(len(weights), int(place.max()) + 1)
    above = empty.index_add(1, place, weights * positive)
    below = empty.index_add(1, place, weights * ~positive)
    won = above * (below.cumsum(1) - below / 2)
    return won.sum(1) / (above.sum(1) * below.sum(1))


def class_sizes(data: Description) -> list[int]:
    """Training samples of each class, from the description of the data; ones if the sizes are unknown."""
    sizes = data.get("counts", {}).get("train", {})
    known = set(sizes) == set(data["classes"])
    return [sizes[name] for name in data["classes"]] if known else [1] * len(data["classes"])


def total_sizes(counts: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """Samples of each class in all parts, from the `counts` of a description."""
    names = dict.fromkeys(name for sizes in counts.values() for name in sizes)
    return {name: sum(sizes.get(name, 0) for sizes in counts.values()) for name in names}


def train_counts(classes: Sequence[str], labels: Tensor) -> dict[str, dict[str, int]]:
    """`counts` of a description: training samples of each class."""
    return {"train": dict(zip(classes, torch.bincount(labels, minlength=len(classes)).tolist()))}


def is_unbalanced(sizes: Sequence[int]) -> bool:
    """Whether the largest class is more than twice as large as the mean of the others."""
    return len(sizes) > 1 and max(sizes) * (len(sizes) - 1) > 2 * (sum(sizes) - max(sizes))


def balanced_weights(sizes: Sequence[int]) -> Tensor:
    """N / (C * N_c) for the C classes that occur, 0 for others; the mean over samples is 1."""
    counts = torch.tensor(sizes, dtype=torch.float64)
    return torch.where(counts > 0, counts.sum() / ((counts > 0).sum() * counts), 0.0)


def likeliest(probabilities: Tensor, classes: Sequence[str], **also: object) -> Values:
    """The most probable class, its probability and the top five, from class probabilities (C,)."""
    best, which = probabilities.topk(min(5, len(classes)))
    top = {classes[i]: round(p, 6) for p, i in zip(best.tolist(), which.tolist())}
    label, probability = next(iter(top.items()))
    return {"label": label, "probability": probability, **also, "top": top}


def told(answer: Values) -> str:
    """The most probable class and its probability in words."""
    return f"{answer['label']}, {answer['probability']:.0%}"
