"""Metrics of an evaluation: sums over samples, or rows that are kept, which add up over batches and processes."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenmix.lab.train.distributed import all_gather, all_reduce_sum


class Metric(ABC):
    """A metric; one of torchmetrics' has the same methods and serves as well.

    Attributes:
        higher_is_better: None where the task says it.
        names: of its numbers, where `compute` returns several by name.
    """

    higher_is_better: bool | None = None
    names: tuple[str, ...] = ()

    @abstractmethod
    def reset(self) -> None:
        """Forget what was counted."""

    @abstractmethod
    def update(self, *args: Any, **kwargs: Any) -> None:
        """Count a batch."""

    @abstractmethod
    def compute(self) -> Any:
        """The value over all batches and processes; all processes must call it."""


class Metrics(dict[str, Any]):
    """The metrics of a task by their names; each is updated with the same arguments."""

    def reset(self, device: torch.device | None = None) -> None:
        """Reset all; those that are modules, as torchmetrics' are, move to the device."""
        for metric in self.values():
            if isinstance(metric, nn.Module) and device is not None:
                metric.to(device)
            metric.reset()

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Count a batch in all."""
        for metric in self.values():
            metric.update(*args, **kwargs)

    def compute(self) -> dict[str, Any]:
        """All numbers by their names."""
        numbers: dict[str, Any] = {}
        for name, metric in self.items():
            value = metric.compute()
            numbers |= value if isinstance(value, Mapping) else {name: value}
        return numbers

    def higher_is_better(self) -> dict[str, bool | None]:
        """Of each number whether more of it is better; None where its metric does not say it."""
        return {
            part: metric.higher_is_better
            for name, metric in self.items()
            for part in getattr(metric, "names", ()) or (name,)
        }


class Sums(Metric):
    """Sums over samples in float64, of any shape."""

    def __init__(self, *shape: int) -> None:
        self.shape = shape
        self.reset()

    def reset(self) -> None:
        self.sums = torch.zeros(self.shape, dtype=torch.float64)

    def add(self, values: Tensor) -> None:
        """Add the sums over a batch."""
        self.sums += values.detach().cpu()

    def total(self) -> Tensor:
        """The sums over all processes."""
        return all_reduce_sum(self.sums)


class Rows(Metric):
    """Columns of rows that are kept, for what no sum tells."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.rows: list[tuple[Tensor, ...]] = []

    def keep(self, *columns: Tensor) -> None:
        """Keep the rows of a batch, in single precision as far as they are in less."""
        self.rows.append(tuple(value.detach().float().cpu() for value in columns))

    def columns(self) -> tuple[Tensor, ...]:
        """The rows of all processes."""
        rows = [row for part in all_gather(self.rows) for row in part]
        return tuple(map(torch.cat, zip(*rows)))


class Mean(Sums):
    """The mean of a value of each sample."""

    def __init__(self) -> None:
        super().__init__(2)

    def add_mean(self, total: Tensor, count: Tensor | int) -> None:
        """Add the sum over a batch, and how many it has."""
        self.add(torch.stack([torch.as_tensor(value).detach().cpu().double() for value in (total, count)]))

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Add a batch of values, a tensor; subclasses take what they make them of."""
        (values,) = args
        self.add_mean(values.detach().cpu().double().sum(), values.numel())

    def compute(self) -> Tensor:
        """The mean so far."""
        total, count = self.total()
        return total / count


class CrossEntropy(Mean):
    """Mean cross-entropy over all samples seen, without label smoothing.

    Args:
        ignore: label that does not count.
    """

    higher_is_better = False

    def __init__(self, ignore: int = -100) -> None:
        super().__init__()
        self.ignore = ignore

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch of logits (B, classes, ...) and labels (B, ...)."""
        total = F.cross_entropy(preds.float(), target, ignore_index=self.ignore, reduction="sum")
        self.add_mean(total, (target != self.ignore).sum())


class Perplexity(CrossEntropy):
    """exp of the mean cross-entropy."""

    def compute(self) -> Tensor:
        """The perplexity so far."""
        return super().compute().exp()


class Accuracy(Mean):
    """Share of the samples whose label is the likeliest class, or among the `top` likeliest ones."""

    higher_is_better = True

    def __init__(self, top: int = 1) -> None:
        super().__init__()
        self.top = top

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch of logits (B, classes) and labels (B,)."""
        found = preds.topk(self.top, dim=1).indices == target[:, None]
        self.add_mean(found.sum(), len(target))


class ClassCounts(Sums):
    """Samples of each class that are right, true and predicted, and what is measured of them.

    Args:
        classes: their number.
        measures: functions of counts (3, classes), by name.
        ignore: label of samples that do not count.
    """

    higher_is_better = True

    def __init__(
        self, classes: int, measures: Mapping[str, Callable[[Tensor], Tensor]], ignore: int | None = None
    ) -> None:
        super().__init__(3, classes)
        self.classes, self.measures, self.ignore = classes, dict(measures), ignore
        self.names = tuple(measures)

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch of logits (B, classes, ...), or of predicted classes (B, ...), and labels (B, ...)."""
        predicted = preds.argmax(1) if preds.dim() > target.dim() else preds
        self.add(class_counts(predicted[None], target[None], self.classes, self.ignore)[0])

    def compute(self) -> dict[str, Tensor]:
        """The measures of the counts so far."""
        counts = self.total()
        return {name: measure(counts) for name, measure in self.measures.items()}


def class_counts(predicted: Tensor, true: Tensor, classes: int, ignore: int | None = None) -> Tensor:
    """Places of each class that are right, true and predicted, int64 (B, 3, classes), for each row of (B, ...)."""
    counted = torch.ones_like(true, dtype=torch.bool) if ignore is None else true != ignore
    rows = torch.arange(len(true), device=true.device).view(-1, *[1] * (true.dim() - 1)) * classes

    def count(labels: Tensor, where: Tensor) -> Tensor:
        return torch.bincount((labels + rows)[where], minlength=classes * len(true)).view(len(true), classes)

    right = counted & (predicted == true)
    return torch.stack([count(true, right), count(true, counted), count(predicted, counted)], 1)


# Of counts (..., 3, classes); nan for a class of which nothing can be said.


def accuracy_of(counts: Tensor) -> Tensor:
    """Share of all samples that are right."""
    right, there, _ = counts.double().sum(-1).unbind(-1)
    return right / there


def recall_of(counts: Tensor) -> Tensor:
    """Share of the samples of each class that are right."""
    right, there, _ = counts.double().unbind(-2)
    return right / there


def f1_of(counts: Tensor) -> Tensor:
    """F1 of each class: 2 right / (true + predicted)."""
    right, there, found = counts.double().unbind(-2)
    return 2 * right / (there + found)


def iou_of(counts: Tensor) -> Tensor:
    """Intersection over union of each class: right / (true + predicted - right)."""
    right, there, found = counts.double().unbind(-2)
    return right / (there + found - right)


def matthews_of(counts: Tensor) -> Tensor:
    """Matthews' correlation of the labels with the predicted classes; 0 where one of them is constant."""
    right, there, found = counts.double().unbind(-2)
    total = there.sum(-1)
    over = right.sum(-1) * total - (there * found).sum(-1)
    under = (total**2 - (there**2).sum(-1)) * (total**2 - (found**2).sum(-1))
    return torch.where(under > 0, over / under.sqrt(), 0.0)


MEASURES: dict[str, Callable[[Tensor], Tensor]] = {
    "accuracy": accuracy_of,
    "balanced_accuracy": lambda counts: recall_of(counts).nanmean(-1),
    "macro_f1": lambda counts: f1_of(counts).nanmean(-1),
    "matthews": matthews_of,
}
"""Numbers of classes, each a function of their counts."""
