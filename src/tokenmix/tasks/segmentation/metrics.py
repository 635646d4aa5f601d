"""Metrics of classes of pixels, from one matrix of counts; pixels of the ignored class are left out."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import Metric

from tokenmix.train.metrics import Mean

__all__ = ["ClassIoU", "MeanIoU", "PixelAccuracy", "PixelEntropy", "ious"]


def ious(counts: Tensor) -> Tensor:
    """Intersection over union of each class from counts (true x predicted); nan of a class that never occurs."""
    both = counts.diagonal().double()
    either = counts.sum(0) + counts.sum(1) - counts.diagonal()
    return both / either.where(either > 0, torch.nan)


class PixelCounts(Metric):
    """How often each class was taken for each, as counts (true x predicted) that add up exactly.

    Args:
        num_classes: classes.
        ignore: label of pixels that do not count.
    """

    full_state_update = False
    counts: Tensor

    def __init__(self, num_classes: int, ignore: int) -> None:
        super().__init__()
        self.num_classes, self.ignore = num_classes, ignore
        self.add_state("counts", torch.zeros(num_classes, num_classes, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch of logits (B, classes, H, W) and classes (B, H, W)."""
        kept = target != self.ignore
        pairs = target[kept] * self.num_classes + preds.argmax(1)[kept]
        self.counts = self.counts + torch.bincount(pairs, minlength=self.num_classes**2).view_as(self.counts)

    def compute(self) -> Tensor:
        """The counts so far."""
        return self.counts


class MeanIoU(PixelCounts):
    """Mean over the classes that occur, in truth or answer, of intersection over union."""

    def compute(self) -> Tensor:
        """The mean so far."""
        return ious(self.counts).nanmean().float()


class PixelAccuracy(PixelCounts):
    """Share of pixels that are right."""

    def compute(self) -> Tensor:
        """The share so far."""
        return self.counts.diagonal().sum() / self.counts.sum()


class ClassIoU(PixelCounts):
    """Intersection over union of each class; -1 of a class that never occurs, since JSON has no nan."""

    def compute(self) -> Tensor:
        """One number for each class."""
        return ious(self.counts).nan_to_num(-1.0).float()


class PixelEntropy(Mean):
    """Mean cross-entropy over the pixels that count."""

    def __init__(self, ignore: int) -> None:
        super().__init__()
        self.ignore = ignore

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch of logits (B, classes, H, W) and classes (B, H, W)."""
        self.total = self.total + F.cross_entropy(preds.float(), target, ignore_index=self.ignore, reduction="sum")
        self.count = self.count + (target != self.ignore).sum()
