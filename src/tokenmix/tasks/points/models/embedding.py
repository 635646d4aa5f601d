"""Point embeddings: from a cloud to tokens, point by point or each with its neighbours."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenmix.errors import UserError
from tokenmix.layers.base import zero_masked
from tokenmix.layers.masked_norm import MaskedBatchNorm
from tokenmix.ops.points import farthest_points, gather_points, group_points, nearest_neighbours, sort_points


class LBR(nn.Module):
    """Linear layer, BatchNorm and ReLU on tokens.

        y = act(BN(X W^T + b))

    Args:
        in_dim, out_dim: widths.
        bias: give the linear layer one.
        slope: of the activation below 0; 0 is ReLU.

    Shape:
        (B, N, in_dim), mask (B, N) bool, to (B, N, out_dim); groups (B, M, k, in_dim) take the mask (B, M).
    """

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        *,
        bias: bool = False,
        slope: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(in_dim, out_dim, bias=bias, device=device, dtype=dtype)
        self.norm = MaskedBatchNorm(out_dim, device=device, dtype=dtype)
        self.slope = slope

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map the features of x."""
        if x.dim() == 4:
            inner = None if mask is None else mask.unsqueeze(2).expand(*mask.shape, x.shape[2]).flatten(1)
            return self(x.flatten(1, 2), inner).unflatten(1, x.shape[1:3])
        return F.leaky_relu(self.norm(self.linear(x), mask), self.slope)

    def macs(self, num_tokens: int) -> int:
        """N times both widths."""
        return num_tokens * self.linear.in_features * self.linear.out_features


class Embedded(NamedTuple):
    """Tokens of a cloud.

    Attributes:
        tokens: (B, M, D).
        coordinates: (B, M, 3), where they are.
        mask: (B, M) bool, True = the token takes part.
        skip: (B, M, E), what is put next to the outputs of the blocks, or None.
    """

    tokens: Tensor
    coordinates: Tensor
    mask: Tensor | None
    skip: Tensor | None


class NaiveEmbedding(nn.Module):
    """Each point by itself, through two layers: as many tokens as points.

    Paper: Guo et al., PCT, arXiv 2012.09688, section 3.2 (NPCT).

    Args:
        in_chans: channels of a point; the first three are its coordinates.
        dim: width of the tokens.
    """

    skip_dim = 0

    def __init__(self, in_chans: int, dim: int, *, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.dim = dim
        self.layers = nn.ModuleList(LBR(width, dim, device=device, dtype=dtype) for width in (in_chans, dim))

    def forward(self, points: Tensor, mask: Tensor | None = None) -> Embedded:
        """points (B, N, in_chans) to N tokens."""
        x = zero_masked(points, mask)
        for layer in self.layers:
            x = layer(x, mask)
        return Embedded(zero_masked(x, mask), points[..., :3], mask, None)

    def num_tokens(self, num_points: int) -> int:
        """As many as points."""
        return num_points

    def macs(self, num_points: int) -> int:
        """Multiply-adds of one cloud."""
        return _total(self.layers, num_points)


class NeighbourEmbedding(nn.Module):
    """Each point with its neighbours, twice, of fewer and fewer points.

        y_i = max_(j near i) local([x_j - x_i, x_i]),   tokens = entry(y)

    Two layers, then for each stage farthest-point sampling, the k nearest neighbours of every sampled point and two
    layers over each group with a maximum; then the entry to the attention layers.

    Paper: Guo et al., PCT, arXiv 2012.09688, section 3.4, and the released code, which begins the sampling at a random
    point. Here it begins at one that the cloud decides, and the later stages take the first points of the earlier,
    which is what sampling among them would give from the same start. The entry has two layers, since only so the
    network has the 2.88 M parameters that are reported for it; forms with one layer are in circulation as well.

    Args:
        in_chans: channels of a point; the first three are its coordinates.
        dim: width of the tokens.
        stem_dim: width of the first layers.
        stage_dims: width after each stage.
        centres: points that each stage keeps; `"all"` keeps every point, for labels of single points.
        num_neighbours: k.

    Raises:
        UserError: as many centres as stages are needed, and none may have more than the one before.
    """

    def __init__(
        self,
        in_chans: int,
        dim: int,
        *,
        stem_dim: int = 64,
        stage_dims: Sequence[int] = (128, 256),
        centres: Sequence[int] | Literal["all"] = (512, 256),
        num_neighbours: int = 32,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_stages(stage_dims, centres, num_neighbours)
        place = {"device": device, "dtype": dtype}
        self.dim, self.skip_dim, self.num_neighbours = dim, stage_dims[-1], num_neighbours
        self.centres = None if centres == "all" else tuple(centres)
        self.stem = nn.ModuleList(LBR(width, stem_dim, **place) for width in (in_chans, stem_dim))
        widths = [stem_dim, *stage_dims]
        self.stages = nn.ModuleList(
            nn.ModuleList(LBR(inside, after, **place) for inside in (2 * before, after))
            for before, after in pairwise(widths)
        )
        self.entry = nn.ModuleList(LBR(width, dim, **place) for width in (self.skip_dim, dim))

    def forward(self, points: Tensor, mask: Tensor | None = None) -> Embedded:
        """points (B, N, in_chans) to the tokens of the last stage's centres, in an order of their own if sampled."""
        # By their own order, so that no choice between equals depends on the place in the array.
        order = sort_points(points, mask=mask)
        points, mask = gather_points(points, order), None if mask is None else mask.gather(1, order)
        points = zero_masked(points, mask)
        if self.centres is None:
            return self._finish(*_in_order(order.argsort(1), *self._every(points, mask)))
        chosen = farthest_points(points, self.centres[0], mask=mask)
        x, places, taking = self._stem(points, mask), points[..., :3], mask
        for i, (stage, count) in enumerate(zip(self.stages, self.centres)):
            index = chosen.places if i == 0 else torch.arange(count, device=x.device).expand(x.shape[0], -1)
            kept = _needed(chosen.mask[:, :count])
            x, places = self._stage(stage, x, places, index, taking, kept)
            taking = kept
        return self._finish(x, places, taking)

    def num_tokens(self, num_points: int) -> int:
        """Those of the last stage."""
        return num_points if self.centres is None else self.centres[-1]

    def macs(self, num_points: int) -> int:
        """Multiply-adds of one cloud; distances are not counted."""
        total = _total(self.stem, num_points)
        for i, stage in enumerate(self.stages):
            count = num_points if self.centres is None else self.centres[i]
            total += _total(stage, count * self.num_neighbours)
        return total + _total(self.entry, self.num_tokens(num_points))

    def _stem(self, points: Tensor, mask: Tensor | None) -> Tensor:
        x = points
        for layer in self.stem:
            x = layer(x, mask)
        return x

    def _every(self, points: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """All points remain: the neighbours are the same in every stage."""
        x, places = self._stem(points, mask), points[..., :3]
        index = torch.arange(points.shape[1], device=points.device).expand(points.shape[0], -1)
        near = nearest_neighbours(places, places, self.num_neighbours, mask=mask)
        for stage in self.stages:
            x = _local(stage, group_points(x, index, near), mask)
        return x, places, mask

    def _stage(
        self, stage: Any, x: Tensor, places: Tensor, index: Tensor, mask: Tensor | None, kept: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        middle = gather_points(places, index)
        near = nearest_neighbours(middle, places, self.num_neighbours, mask=mask)
        return _local(stage, group_points(x, index, near), kept), middle

    def _finish(self, x: Tensor, places: Tensor, mask: Tensor | None) -> Embedded:
        tokens = x
        for layer in self.entry:
            tokens = layer(tokens, mask)
        return Embedded(zero_masked(tokens, mask), places, mask, zero_masked(x, mask))


def _in_order(order: Tensor, x: Tensor, places: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    mask = None if mask is None else mask.gather(1, order)
    return gather_points(x, order), gather_points(places, order), mask


def _needed(mask: Tensor) -> Tensor | None:
    """None for a mask that leaves nothing out, which spares statistics under one; a graph has to be ready for any."""
    return mask if torch.compiler.is_compiling() or mask.is_meta or not mask.all() else None


def _local(stage: Any, groups: Tensor, mask: Tensor | None) -> Tensor:
    for layer in stage:
        groups = layer(groups, mask)
    return groups.amax(2)


def _total(layers: Any, rows: int) -> int:
    return sum(layer.macs(rows) for layer in layers)


def _check_stages(stage_dims: Sequence[int], centres: Sequence[int] | str, num_neighbours: int) -> None:
    if not isinstance(num_neighbours, int) or num_neighbours < 1:
        raise UserError(f"num_neighbours={num_neighbours!r} must be at least 1; the paper has 32")
    if centres == "all":
        return
    counts = list(centres)
    falling = all(isinstance(c, int) and c >= 1 for c in counts) and counts == sorted(counts, reverse=True)
    if isinstance(centres, str) or len(counts) != len(stage_dims) or not falling:
        raise UserError(
            f"centres={centres!r} does not fit {len(stage_dims)} stages; give one number for each, decreasing, for "
            "example 512 and 256, or 'all'"
        )
