"""Metrics that are sums over samples, so that they add up over batches and processes."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.classification import MulticlassF1Score


class Mean(Metric):
    """A sum over samples divided by their number; `update` of a subclass defines what is summed."""

    full_state_update = False
    higher_is_better = False
    total: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0, dtype=torch.float32), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0.0, dtype=torch.float32), dist_reduce_fx="sum")

    def compute(self) -> Tensor:
        """The mean so far."""
        return self.total / self.count


class CrossEntropy(Mean):
    """Mean cross-entropy over all samples seen, without label smoothing."""

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch of logits (B, classes) and labels (B,)."""
        self.total = self.total + F.cross_entropy(preds.float(), target, reduction="sum")
        self.count = self.count + target.numel()


class Perplexity(CrossEntropy):
    """exp of the mean cross-entropy."""

    def compute(self) -> Tensor:
        """The perplexity so far."""
        return super().compute().exp()


class F1OfClass(MulticlassF1Score):
    """F1 of one of two classes; GLUE measures MRPC and QQP by that of the second."""

    def __init__(self, positive: int) -> None:
        super().__init__(num_classes=2, average="none", validate_args=False)
        self.positive = positive

    def compute(self) -> Tensor:
        """The F1 so far."""
        return super().compute()[self.positive]
