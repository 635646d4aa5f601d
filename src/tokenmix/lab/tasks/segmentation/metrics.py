"""Metrics of classes of pixels; pixels of the ignored class are left out."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics.classification import MulticlassConfusionMatrix

from tokenmix.lab.train.metrics import Mean

NUMBERS = ("accuracy", "loss", "miou")
"""What is logged; next to it `class_iou`, one number for each class."""


class PixelScores(MulticlassConfusionMatrix):
    """Pixel accuracy and intersection over union, from torchmetrics' confusion matrix (true x predicted).

    `miou` is the mean over the classes that occur, in truth or prediction; `class_iou` has -1 for a class that never
    occurs, since JSON has no nan.

    Args:
        num_classes: classes.
        ignore: label of pixels that do not count.
    """

    def __init__(self, num_classes: int, ignore: int) -> None:
        super().__init__(num_classes, ignore_index=ignore, validate_args=False)

    def compute(self) -> dict[str, Tensor]:  # type: ignore[override]
        """The numbers so far, of a matrix that adds up exactly; nan if no pixel counted."""
        counts, right = self.confmat, self.confmat.diagonal()
        iou = iou_of(torch.stack([right, counts.sum(1), counts.sum(0)]))
        return {
            "miou": iou.nanmean().float(),
            "accuracy": right.sum() / counts.sum(),
            "class_iou": iou.nan_to_num(-1.0).float(),
        }


def iou_of(counts: Tensor) -> Tensor:
    """Intersection over union of each class, nan for one that never occurs.

    Shape:
        (..., 3, C), pixels that are right, true and predicted; returns float64 (..., C).
    """
    right, there, found = counts.unbind(-2)
    either = there + found - right
    return right.double() / either.where(either > 0, torch.nan)


def pixel_counts(predicted: Tensor, classes: Tensor, number: int, ignore: int) -> Tensor:
    """What `iou_of` takes, int64 (B, 3, C), for each image of classes int64 (B, H, W), without the ignored pixels."""
    counted = classes != ignore
    rows = torch.arange(len(classes), device=classes.device)[:, None, None] * number

    def count(labels: Tensor, where: Tensor) -> Tensor:
        return torch.bincount((labels + rows)[where], minlength=number * len(classes)).view(len(classes), number)

    right = counted & (predicted == classes)
    return torch.stack([count(classes, right), count(classes, counted), count(predicted, counted)], 1)


class PixelEntropy(Mean):
    """Mean cross-entropy over the pixels that count."""

    def __init__(self, ignore: int) -> None:
        super().__init__()
        self.ignore = ignore

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch of logits (B, classes, H, W) and classes (B, H, W)."""
        self.total = self.total + F.cross_entropy(preds.float(), target, ignore_index=self.ignore, reduction="sum")
        self.count = self.count + (target != self.ignore).sum()
