"""Metrics of point clouds that torchmetrics does not have with these definitions."""

from typing import Literal

import torch
from torch import Tensor
from torchmetrics import Metric


def cloud_iou(answered: Tensor, part: Tensor, label: Tensor, allowed: Tensor) -> Tensor:
    """The intersection over union of each cloud (B,), a mean over the parts of its category.

    As ShapeNet-part defines it, a part of its category that a cloud neither has nor is given counts as 1.

    Args:
        answered: (B, N), predicted parts.
        part: (B, N), true parts, negative where a row is padded.
        label: (B,), categories.
        allowed: (C, P) bool, which parts a category has.
    """
    both, there, found = part_counts(answered, part, allowed.shape[1]).unbind(1)
    either = there + found - both
    each = torch.where(either > 0, both / either.clamp(min=1), 1.0)
    return (each * allowed[label]).sum(1) / allowed[label].sum(1)


def part_counts(answered: Tensor, part: Tensor, size: int) -> Tensor:
    """Points of each of `size` parts that are right, true and predicted, int64 (B, 3, size); as of `cloud_iou`."""
    real = part >= 0
    rows = size * torch.arange(len(part), device=part.device).unsqueeze(1)

    def count(values: Tensor, where: Tensor) -> Tensor:
        return torch.bincount((values + rows)[where], minlength=size * len(part)).view(-1, size)

    return torch.stack([count(part, real & (answered == part)), count(part, real), count(answered, real)], 1)


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

    def update(self, iou: Tensor, label: Tensor) -> None:
        """Add clouds: what `cloud_iou` gives, and their categories."""
        self.total = self.total.index_add(0, label, iou.to(self.total))
        self.clouds = self.clouds.index_add(0, label, torch.ones_like(self.total[label]))

    def compute(self) -> Tensor:
        """The mean, or the table, in which -1 is a category without clouds."""
        shares = self.total / self.clouds.clamp(min=1)
        return shares[self.clouds > 0].mean() if self.answer == "mean" else shares.where(self.clouds > 0, -1.0)
