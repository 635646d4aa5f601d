"""Metrics of point clouds, as sums over clouds or points."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torchmetrics import Metric

from tokenmix.train.metrics import Mean

__all__ = ["BalancedAccuracy", "CategoryIoU", "InstanceIoU", "PartCounts", "PointAccuracy", "PooledIoU", "part_counts"]


class BalancedAccuracy(Metric):
    """The mean over the classes that occur of the share of their clouds that are told rightly."""

    full_state_update = False
    correct: Tensor
    count: Tensor

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        for name in ("correct", "count"):
            self.add_state(name, torch.zeros(num_classes, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch of logits (B, classes) and labels (B,)."""
        size = len(self.count)
        self.correct = self.correct + torch.bincount(target[preds.argmax(-1) == target], minlength=size)
        self.count = self.count + torch.bincount(target, minlength=size)

    def compute(self) -> Tensor:
        """The mean so far."""
        seen = self.count > 0
        return (self.correct[seen] / self.count[seen]).mean()


@dataclass(frozen=True)
class PartCounts:
    """What a batch adds to the metrics of parts.

    Attributes:
        iou: (B,), the mean over the parts of its category of each cloud's intersection over union.
        label: (B,), the categories.
        both: (P,), points of each part that were answered so.
        either: (P,), points that were of each part, or answered so.
        points: how many points were answered.
    """

    iou: Tensor
    label: Tensor
    both: Tensor
    either: Tensor
    points: Tensor


def part_counts(answered: Tensor, part: Tensor, label: Tensor, allowed: Tensor) -> PartCounts:
    """Answers (B, N) against parts (B, N), negative where a row is padded, of clouds of categories (B,).

    Which parts a category has, `allowed` (C, P) says. As ShapeNet-part defines it, a part of its category that a cloud
    neither has nor is given counts as 1.
    """
    size, real = allowed.shape[1], part >= 0
    rows = size * torch.arange(len(part), device=part.device).unsqueeze(1)

    def count(values: Tensor, where: Tensor) -> Tensor:
        return torch.bincount((values + rows)[where], minlength=size * len(part)).view(-1, size)

    both = count(part, real & (answered == part))
    either = count(part, real) + count(answered, real) - both
    each = torch.where(either > 0, both / either.clamp(min=1), 1.0)
    iou = (each * allowed[label]).sum(1) / allowed[label].sum(1)
    return PartCounts(iou, label, both.sum(0), either.sum(0), real.sum())


class InstanceIoU(Mean):
    """The mean over clouds."""

    def update(self, counts: PartCounts) -> None:
        """Add a batch."""
        self.total, self.count = self.total + counts.iou.sum(), self.count + len(counts.iou)


class PointAccuracy(Mean):
    """The share of points that are answered rightly."""

    def update(self, counts: PartCounts) -> None:
        """Add a batch."""
        self.total, self.count = self.total + counts.both.sum(), self.count + counts.points


class CategoryIoU(Metric):
    """The mean over the clouds of each category: their mean over those that occur, or all as a table."""

    full_state_update = False
    total: Tensor
    clouds: Tensor

    def __init__(self, num_categories: int, answer: Literal["mean", "table"]) -> None:
        super().__init__()
        self.answer: Literal["mean", "table"] = answer
        for name in ("total", "clouds"):
            self.add_state(name, torch.zeros(num_categories), dist_reduce_fx="sum")

    def update(self, counts: PartCounts) -> None:
        """Add a batch."""
        self.total = self.total.index_add(0, counts.label, counts.iou.to(self.total))
        self.clouds = self.clouds.index_add(0, counts.label, torch.ones_like(counts.iou).to(self.clouds))

    def compute(self) -> Tensor:
        """What was asked for; in the table -1 stands for a category without clouds."""
        return _answer(self.total, self.clouds, self.answer)


class PooledIoU(Metric):
    """Of each part, points answered so and right over points answered so or right, in all clouds together.

    Another quantity than ShapeNet-part's: their mean over parts that occur, or all as a table.
    """

    full_state_update = False
    both: Tensor
    either: Tensor

    def __init__(self, num_parts: int, answer: Literal["mean", "table"]) -> None:
        super().__init__()
        self.answer: Literal["mean", "table"] = answer
        for name in ("both", "either"):
            self.add_state(name, torch.zeros(num_parts, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, counts: PartCounts) -> None:
        """Add a batch."""
        self.both, self.either = self.both + counts.both, self.either + counts.either

    def compute(self) -> Tensor:
        """What was asked for; in the table -1 stands for a part that is nowhere."""
        return _answer(self.both, self.either, self.answer)


def _answer(over: Tensor, under: Tensor, answer: Literal["mean", "table"]) -> Tensor:
    shares = over / under.clamp(min=1)
    return shares[under > 0].mean() if answer == "mean" else shares.where(under > 0, -1.0)
