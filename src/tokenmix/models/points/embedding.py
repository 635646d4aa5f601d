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


class LBRs(nn.ModuleList):
    """`LBR` layers one after the other, of these widths from the input on."""

    def __init__(self, *widths: int, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__(LBR(before, after, device=device, dtype=dtype) for before, after in pairwise(widths))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map the features of x as each `LBR` does."""
        for layer in self:
            x = layer(x, mask)
        return x

    def macs(self, num_tokens: int) -> int:
        """Those of the layers."""
        return sum(layer.macs(num_tokens) for layer in self)  # type: ignore[operator]


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
        self.layers = LBRs(in_chans, dim, dim, device=device, dtype=dtype)

    def forward(self, points: Tensor, mask: Tensor | None = None) -> Embedded:
        """points (B, N, in_chans) to N tokens."""
        tokens = self.layers(zero_masked(points, mask), mask)
        return Embedded(zero_masked(tokens, mask), points[..., :3], mask, None)

    def num_tokens(self, num_points: int) -> int:
        """As many as points."""
        return num_points

    def macs(self, num_points: int) -> int:
        """Multiply-adds of one cloud."""
        return self.layers.macs(num_points)


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
        self.stem = LBRs(in_chans, stem_dim, stem_dim, **place)
        widths = pairwise((stem_dim, *stage_dims))
        self.stages = nn.ModuleList(LBRs(2 * before, after, after, **place) for before, after in widths)
        self.entry = LBRs(self.skip_dim, dim, dim, **place)

    def forward(self, points: Tensor, mask: Tensor | None = None) -> Embedded:
        """points (B, N, in_chans) to the tokens of the last stage's centres, in an order of their own if sampled."""
        # By their own order, so that no choice between equals depends on the place in the array.
        order, given = sort_points(points, mask=mask), mask
        points, mask = gather_points(points, order), None if mask is None else mask.gather(1, order)
        points = zero_masked(points, mask)
        x, places = self.stem(points, mask), points[..., :3]
        if self.centres is None:
            # All points remain: the neighbours are the same in every stage.
            index = torch.arange(points.shape[1], device=x.device).expand(x.shape[0], -1)
            near = nearest_neighbours(places, places, self.num_neighbours, mask=mask)
            for stage in self.stages:
                x = stage(group_points(x, index, near), mask).amax(2)
            back = order.argsort(1)
            x, places, mask = gather_points(x, back), gather_points(places, back), given
        else:
            chosen = farthest_points(points, self.centres[0], mask=mask)
            for i, (stage, count) in enumerate(zip(self.stages, self.centres)):
                index = chosen.places if i == 0 else torch.arange(count, device=x.device).expand(x.shape[0], -1)
                middle, kept = gather_points(places, index), _needed(chosen.mask[:, :count])
                near = nearest_neighbours(middle, places, self.num_neighbours, mask=mask)
                x = stage(group_points(x, index, near), kept).amax(2)
                places, mask = middle, kept
        return Embedded(zero_masked(self.entry(x, mask), mask), places, mask, zero_masked(x, mask))

    def num_tokens(self, num_points: int) -> int:
        """Those of the last stage."""
        return num_points if self.centres is None else self.centres[-1]

    def macs(self, num_points: int) -> int:
        """Multiply-adds of one cloud; distances are not counted."""
        stages: Any = self.stages
        counts = [num_points] * len(stages) if self.centres is None else self.centres
        grouped = sum(stage.macs(count * self.num_neighbours) for stage, count in zip(stages, counts))
        return self.stem.macs(num_points) + grouped + self.entry.macs(self.num_tokens(num_points))


def _needed(mask: Tensor) -> Tensor | None:
    """None for a mask that leaves nothing out, which spares statistics under one; a graph has to be ready for any."""
    return mask if torch.compiler.is_compiling() or mask.is_meta or not mask.all() else None


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
