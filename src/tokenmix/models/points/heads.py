"""Heads on a cloud's features: its class, or the part of each point."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenmix.errors import UserError
from tokenmix.layers.base import count_parameters
from tokenmix.layers.masked_norm import MaskedBatchNorm
from tokenmix.models.maps import PartCost
from tokenmix.models.points.embedding import LBR
from tokenmix.models.points.pct import PCT


class _PointModel(nn.Module):
    """A trunk and a head."""

    trunk: PCT

    @property
    def mixer_name(self) -> str:
        """What mixes the tokens, by its name in the table of mixers."""
        return self.trunk.mixer_name

    def macs(self, num_points: int) -> int:
        """Multiply-adds of one cloud."""
        return sum(row.macs for row in self.cost_table(num_points))

    def cost_table(self, num_points: int) -> list[PartCost]:
        """Parameters and multiply-adds of the trunk's parts and of the head, for a cloud of that many points."""
        own = count_parameters(self) - count_parameters(self.trunk)
        return [*self.trunk.cost_table(num_points), PartCost("head", own, self.head_macs(num_points))]

    def head_macs(self, num_points: int) -> int:
        """Multiply-adds of the head."""
        raise NotImplementedError


class PointClassifier(_PointModel):
    """Cloud classifier: max pooling over the points, then three layers.

    Paper: Guo et al., PCT, arXiv 2012.09688, section 3.1.

    Args:
        trunk: the features.
        num_classes: classes.
        head_dims: widths of the two layers before the last.
        drop_rate: dropout after each of them; published 0.5.

    Shape:
        points (B, N, C), mask (B, N) bool, to logits (B, num_classes).
    """

    def __init__(
        self,
        trunk: PCT,
        num_classes: int,
        *,
        head_dims: Sequence[int] = (512, 256),
        drop_rate: float = 0.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        place = {"device": device, "dtype": dtype}
        self.trunk, self.num_classes = trunk, num_classes
        first, second = head_dims
        self.layers = nn.Sequential(
            LBR(trunk.out_dim, first, **place),
            nn.Dropout(drop_rate),
            LBR(first, second, bias=True, **place),
            nn.Dropout(drop_rate),
            nn.Linear(second, num_classes, **place),
        )

    def forward(self, points: Tensor, mask: Tensor | None = None) -> Tensor:
        """Logits (B, num_classes)."""
        check_points(points)
        features, mask = self.trunk(points, mask)
        return self.layers(largest(features, mask))

    def head_macs(self, num_points: int) -> int:
        """Multiply-adds of the head, which sees a cloud as one row."""
        return sum(m.in_features * m.out_features for m in self.layers.modules() if isinstance(m, nn.Linear))


class PointSegmenter(_PointModel):
    """Part segmentation: each point's features, max and mean pooling of the cloud, and its category.

    Paper: Guo et al., PCT, arXiv 2012.09688, section 3.1 and the released code.

    Args:
        trunk: the features, one token for each point in their order.
        num_parts: parts, of all categories together.
        num_categories: categories.
        label_dim: width of a category; published 64.
        head_dims: widths of the two layers before the last.
        drop_rate: dropout after the first of them; published 0.5.

    Shape:
        points (B, N, C), category (B,) int64, mask (B, N) bool, to logits (B, N, num_parts).

    Raises:
        UserError: a trunk that keeps only some of the points.
    """

    def __init__(
        self,
        trunk: PCT,
        num_parts: int,
        num_categories: int,
        *,
        label_dim: int = 64,
        head_dims: Sequence[int] = (512, 256),
        drop_rate: float = 0.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if getattr(trunk.embedding, "centres", None) is not None:
            raise UserError("part segmentation needs all points: give centres='all', or the naive embedding")
        place = {"device": device, "dtype": dtype}
        self.trunk, self.num_parts, self.num_categories = trunk, num_parts, num_categories
        self.category = nn.Linear(num_categories, label_dim, bias=False, **place)
        self.category_norm = MaskedBatchNorm(label_dim, **place)
        first, second = head_dims
        self.first = LBR(3 * trunk.out_dim + label_dim, first, bias=True, **place)
        self.drop = nn.Dropout(drop_rate)
        self.second = LBR(first, second, bias=True, **place)
        self.last = nn.Linear(second, num_parts, **place)

    def forward(self, points: Tensor, category: Tensor, mask: Tensor | None = None) -> Tensor:
        """Logits (B, N, num_parts)."""
        check_points(points)
        features, mask = self.trunk(points, mask)
        known = F.one_hot(category, self.num_categories).to(features.dtype)
        known = F.leaky_relu(self.category_norm(self.category(known)), 0.2)
        whole = torch.cat([largest(features, mask), masked_mean(features, mask), known], -1)
        x = torch.cat([features, whole.unsqueeze(1).expand(-1, features.shape[1], -1)], -1)
        return self.last(self.second(self.drop(self.first(x, mask)), mask))

    def head_macs(self, num_points: int) -> int:
        """Multiply-adds of the head: a row for each point, and the category."""
        last = num_points * self.last.in_features * self.last.out_features
        category = self.category.in_features * self.category.out_features
        return category + self.first.macs(num_points) + self.second.macs(num_points) + last


def largest(features: Tensor, mask: Tensor | None) -> Tensor:
    """Of (B, N, C) the largest value of each feature (B, C) among the tokens that take part; 0 if none does."""
    if mask is None:
        return features.amax(1)
    found = features.masked_fill(~mask.unsqueeze(-1), -torch.inf).amax(1)
    return found.masked_fill(torch.isneginf(found), 0.0)


def masked_mean(features: Tensor, mask: Tensor | None) -> Tensor:
    """Of (B, N, C) the mean of each feature (B, C) over the tokens that take part; 0 if none does."""
    if mask is None:
        return features.mean(1)
    kept = features.masked_fill(~mask.unsqueeze(-1), 0.0)
    return kept.sum(1) / mask.sum(1, keepdim=True).clamp(min=1)


def check_points(points: Tensor) -> None:
    """Raise `UserError` unless points is a floating (B, N, 3 or more)."""
    if points.dim() != 3 or points.shape[-1] < 3 or not points.is_floating_point():
        raise UserError(
            f"point models take floating points (B, N, 3 or more), coordinates first; got {points.dtype} "
            f"{tuple(points.shape)}"
        )
