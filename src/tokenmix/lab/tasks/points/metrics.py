"""Intersection over union of the parts of point clouds."""

import torch
from torch import Tensor

from tokenmix.lab.tasks.points.data import NO_PART
from tokenmix.lab.train.metrics import Sums, class_counts, iou_of


def cloud_iou(answered: Tensor, part: Tensor, label: Tensor, allowed: Tensor) -> Tensor:
    """The intersection over union of each cloud (B,), a mean over the parts of its category.

    As ShapeNet-part defines it, a part of its category that a cloud neither has nor is given counts as 1.

    Args:
        answered: (B, N), predicted parts.
        part: (B, N), true parts, negative where a row is padded.
        label: (B,), categories.
        allowed: (C, P) bool, which parts a category has.
    """
    each = iou_of(class_counts(answered, part, allowed.shape[1], NO_PART)).nan_to_num(1.0)
    return (each * allowed[label]).sum(1) / allowed[label].sum(1)


class CategoryIoU(Sums):
    """The mean IoU over all clouds, over the means of the categories that occur, and that of each category."""

    higher_is_better = True
    names = ("instance_miou", "category_miou", "iou_by_category")

    def __init__(self, num_categories: int) -> None:
        super().__init__(2, num_categories)

    def update(self, iou: Tensor, label: Tensor) -> None:
        """Add clouds: what `cloud_iou` gives, and their categories."""
        empty = iou.new_zeros(self.shape[1])
        self.add(torch.stack([empty.index_add(0, label, values) for values in (iou, torch.ones_like(iou))]))

    def compute(self) -> dict[str, Tensor]:
        """All three; -1 for a category without clouds."""
        total, clouds = self.total()
        means = total / clouds
        values = (total.sum() / clouds.sum(), means.nanmean(), means.nan_to_num(-1.0))
        return dict(zip(self.names, values, strict=True))
