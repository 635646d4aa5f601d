"""Point cloud transformer with any mixer in its attention layers, for classification and part segmentation.

Reference: Guo et al., PCT: Point Cloud Transformer, arXiv 2012.09688.
"""

import inspect
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple, Unpack, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenmix.errors import UserError
from tokenmix.layers.base import Device, Factory, Mixer, count_parameters, zero_masked
from tokenmix.layers.offset_attention import MaskedBatchNorm, Offset, OffsetAttention, batch_norm
from tokenmix.layers.table import create_mixer, get_spec
from tokenmix.models.interface import PartCost
from tokenmix.ops.checks import check_choice
from tokenmix.ops.points import farthest_points, gather_points, group_points, nearest_neighbours, sort_points
from tokenmix.registry import Arguments

Position = Literal["none", "each-layer"]


class LBR(nn.Module):
    """Linear layer, BatchNorm and ReLU on tokens.

        y = act(BN(X W^T + b))

    `slope` is that of the activation below 0; 0 is ReLU.

    Shape: (B, N, in_dim), mask (B, N) bool, to (B, N, out_dim); groups (B, M, k, in_dim) take the mask (B, M).
    """

    def __init__(
        self, in_dim: int, out_dim: int, *, bias: bool = False, slope: float = 0.0, **factory: Unpack[Factory]
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(in_dim, out_dim, bias=bias, **factory)
        self.norm = MaskedBatchNorm(out_dim, **factory)
        self.slope = slope

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if x.dim() == 4:
            inner = None if mask is None else mask.unsqueeze(2).expand(*mask.shape, x.shape[2]).flatten(1)
            return self(x.flatten(1, 2), inner).unflatten(1, x.shape[1:3])
        return F.leaky_relu(batch_norm(self.norm, self.linear(x), mask), self.slope)

    def macs(self, num_tokens: int) -> int:
        return num_tokens * self.linear.in_features * self.linear.out_features


class LBRs(nn.ModuleList):
    """A sequence of `LBR` layers; `widths` starts with the input width."""

    def __init__(self, *widths: int, **factory: Unpack[Factory]) -> None:
        super().__init__(LBR(before, after, **factory) for before, after in pairwise(widths))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for layer in self:
            x = layer(x, mask)
        return x

    def macs(self, num_tokens: int) -> int:
        return sum(layer.macs(num_tokens) for layer in self)  # type: ignore[operator]


class Embedded(NamedTuple):
    """Tokens (B, M, D) with coordinates (B, M, 3), mask (B, M), and features (B, M, E) to concatenate, or None."""

    tokens: Tensor
    coordinates: Tensor
    mask: Tensor | None
    skip: Tensor | None


class NaiveEmbedding(nn.Module):
    """Embed each point separately with two layers: one token per point (NPCT, section 3.2 of the paper)."""

    skip_dim = 0

    def __init__(self, in_chans: int, dim: int, **factory: Unpack[Factory]) -> None:
        super().__init__()
        self.dim = dim
        self.layers = LBRs(in_chans, dim, dim, **factory)

    def forward(self, points: Tensor, mask: Tensor | None = None) -> Embedded:
        tokens = self.layers(zero_masked(points, mask), mask)
        return Embedded(zero_masked(tokens, mask), points[..., :3], mask, None)

    def num_tokens(self, num_points: int) -> int:
        return num_points

    def macs(self, num_points: int) -> int:
        return self.layers.macs(num_points)


class NeighbourEmbedding(nn.Module):
    """Embed each point with its neighbours, in stages with fewer and fewer points.

        y_i = max_(j near i) local([x_j - x_i, x_i]),   tokens = entry(y)

    Two layers come first. Each stage then samples the farthest points and groups the k nearest neighbours of each. Two
    layers with max pooling process each group. The entry to the attention layers comes last.

    The released code starts sampling at a random point. Here the cloud determines the first point. Later stages use the
    first points of earlier stages, the result of sampling again with the same start. The entry has two layers, because
    only then does the network have the reported 2.88 M parameters; variants with one layer also exist.

    The first three of `in_chans` are coordinates. `centres` are the numbers of points after the stages; `"all"` keeps
    every point, for part segmentation.

    Reference: PCT, section 3.4, and the released code.
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
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__()
        if not isinstance(num_neighbours, int) or num_neighbours < 1:
            raise UserError(f"num_neighbours={num_neighbours!r} must be at least 1; the paper has 32")
        if centres != "all":
            counts = list(centres)
            falling = all(isinstance(c, int) and c >= 1 for c in counts) and counts == sorted(counts, reverse=True)
            if isinstance(centres, str) or len(counts) != len(stage_dims) or not falling:
                raise UserError(
                    f"centres={centres!r} does not fit {len(stage_dims)} stages; give one number for each, decreasing, "
                    "for example 512 and 256, or 'all'"
                )
        self.dim, self.skip_dim, self.num_neighbours = dim, stage_dims[-1], num_neighbours
        self.centres = None if centres == "all" else tuple(centres)
        self.stem = LBRs(in_chans, stem_dim, stem_dim, **factory)
        widths = pairwise((stem_dim, *stage_dims))
        self.stages = nn.ModuleList(LBRs(2 * before, after, after, **factory) for before, after in widths)
        self.entry = LBRs(self.skip_dim, dim, dim, **factory)

    def forward(self, points: Tensor, mask: Tensor | None = None) -> Embedded:
        """Map points (B, N, in_chans) to tokens of the last stage's centres; sampled tokens are in sampling order."""
        # Sorted, so that ties do not depend on array positions.
        order, given = sort_points(points, mask=mask), mask
        points, mask = gather_points(points, order), None if mask is None else mask.gather(1, order)
        points = zero_masked(points, mask)
        x, xyz = self.stem(points, mask), points[..., :3]
        if self.centres is None:
            # All points remain, so the neighbours are the same in every stage.
            index = torch.arange(points.shape[1], device=x.device).expand(x.shape[0], -1)
            near = nearest_neighbours(xyz, xyz, self.num_neighbours, mask=mask)
            for stage in self.stages:
                x = stage(group_points(x, index, near), mask).amax(2)
            back = order.argsort(1)
            x, xyz, mask = gather_points(x, back), gather_points(xyz, back), given
        else:
            chosen = farthest_points(points, self.centres[0], mask=mask)
            for i, (stage, count) in enumerate(zip(self.stages, self.centres)):
                index = chosen.indices if i == 0 else torch.arange(count, device=x.device).expand(x.shape[0], -1)
                middle, kept = gather_points(xyz, index), chosen.mask[:, :count]
                # An all-True mask is dropped to avoid masked statistics; a graph must handle any mask.
                kept = kept if torch.compiler.is_compiling() or kept.is_meta or not kept.all() else None
                near = nearest_neighbours(middle, xyz, self.num_neighbours, mask=mask)
                x = stage(group_points(x, index, near), kept).amax(2)
                xyz, mask = middle, kept
        return Embedded(zero_masked(self.entry(x, mask), mask), xyz, mask, zero_masked(x, mask))

    def num_tokens(self, num_points: int) -> int:
        return num_points if self.centres is None else self.centres[-1]

    def macs(self, num_points: int) -> int:
        """Multiply-adds of one cloud; distances are not counted."""
        stages = cast(list[LBRs], list(self.stages))
        counts = [num_points] * len(stages) if self.centres is None else self.centres
        grouped = sum(stage.macs(count * self.num_neighbours) for stage, count in zip(stages, counts))
        return self.stem.macs(num_points) + grouped + self.entry.macs(self.num_tokens(num_points))


class OffsetBlock(nn.Module):
    """PCT's attention layer with another mixer: out = X + relu(BN((X - mixer(X)) W + b))."""

    def __init__(self, mixer: Mixer, **factory: Unpack[Factory]) -> None:
        super().__init__()
        self.mixer, self.offset = mixer, Offset(mixer.dim, **factory)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.offset(x, self.mixer(x, mask), mask)

    def macs(self, num_tokens: int) -> int:
        return self.mixer.macs(num_tokens) + num_tokens * self.mixer.dim**2


class PCT(nn.Module):
    """Point cloud transformer: clouds to token features.

        x_0 = embedding(P),   x_l = block_l(x_(l-1) [+ P W_p]),   out = LBR([x_1, ..., x_L, skip])

    `position="each-layer"` adds a linear map of the coordinates to the input of each block, as one released variant
    does. The other released variant claims to but does not.

    Shape: points (B, N, 3 or more), mask (B, N) bool, to features (B, M, fuse_dim) and their mask (B, M) or None.

    Reference: PCT, figure 2.
    """

    def __init__(
        self,
        embedding: NaiveEmbedding | NeighbourEmbedding,
        *,
        mixer: str,
        mixer_kwargs: Arguments,
        depth: int,
        fuse_dim: int,
        position: Position,
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__()
        check_choice("position", position, get_args(Position))
        spec = get_spec(mixer)
        if spec.layer.capabilities.layout == "2d":
            raise UserError(f"mixer {mixer!r} takes maps (B, C, H, W), points are tokens; use 'offset' or 'external'")
        if "num_tokens" in inspect.signature(spec.layer).parameters:
            raise UserError(
                f"mixer {mixer!r} learns a matrix over tokens, and points have no order and no fixed number; use "
                "'offset', 'external' or 'self'"
            )
        # Replaces q, k and v only: the block has the following linear layer.
        inside = {"output_projection": False} if mixer == "external" else {}
        blocks: list[nn.Module] = []
        for _ in range(depth):
            inner = create_mixer(mixer, embedding.dim, **{**inside, **mixer_kwargs}, **factory)
            blocks.append(inner if isinstance(inner, OffsetAttention) else OffsetBlock(inner, **factory))
        self.embedding, self.blocks, self.out_dim = embedding, nn.ModuleList(blocks), fuse_dim
        self.mixer_name = mixer
        self.position = nn.Linear(3, embedding.dim, bias=False, **factory) if position == "each-layer" else None
        self.fuse = LBR(len(blocks) * embedding.dim + embedding.skip_dim, fuse_dim, slope=0.2, **factory)

    def forward(self, points: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        if points.dim() != 3 or points.shape[-1] < 3 or not points.is_floating_point():
            raise UserError(
                f"point models take floating points (B, N, 3 or more), coordinates first; got {points.dtype} "
                f"{tuple(points.shape)}"
            )
        x, xyz, mask, skip = self.embedding(points, mask)
        outs = []
        for block in self.blocks:
            x = block(x if self.position is None else x + self.position(xyz), mask)
            outs.append(x)
        return self.fuse(torch.cat([*outs, *([] if skip is None else [skip])], -1), mask), mask

    def cost_table(self, num_points: int) -> list[PartCost]:
        n = self.embedding.num_tokens(num_points)
        blocks = cast(list[OffsetBlock | OffsetAttention], list(self.blocks))
        rows = [
            PartCost("embedding", count_parameters(self.embedding), self.embedding.macs(num_points)),
            PartCost(f"{len(blocks)} attention layers", count_parameters(self.blocks), sum(b.macs(n) for b in blocks)),
            PartCost("fusion", count_parameters(self.fuse), self.fuse.macs(n)),
        ]
        if self.position is not None:
            added = len(blocks) * n * 3 * self.embedding.dim
            rows.insert(1, PartCost("coordinates", count_parameters(self.position), added))
        return rows


class _PointModel(nn.Module):
    trunk: PCT

    @property
    def mixer_name(self) -> str:
        return self.trunk.mixer_name

    def macs(self, num_points: int) -> int:
        return sum(row.macs for row in self.cost_table(num_points))

    def cost_table(self, num_points: int) -> list[PartCost]:
        own = count_parameters(self) - count_parameters(self.trunk)
        return [*self.trunk.cost_table(num_points), PartCost("head", own, self.head_macs(num_points))]

    def head_macs(self, num_points: int) -> int:
        raise NotImplementedError


class PointClassifier(_PointModel):
    """Cloud classifier: max pooling over the points, then three layers.

    Args:
        trunk: the feature extractor.
        num_classes: classes.
        head_dims: widths of the two hidden layers.
        drop_rate: dropout after each of them; published 0.5.

    Shape: points (B, N, C), mask (B, N) bool, to logits (B, num_classes).

    Reference: PCT, section 3.1.
    """

    def __init__(
        self,
        trunk: PCT,
        num_classes: int,
        *,
        head_dims: Sequence[int] = (512, 256),
        drop_rate: float = 0.0,
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__()
        self.trunk, self.num_classes = trunk, num_classes
        first, second = head_dims
        self.layers = nn.Sequential(
            LBR(trunk.out_dim, first, **factory),
            nn.Dropout(drop_rate),
            LBR(first, second, bias=True, **factory),
            nn.Dropout(drop_rate),
            nn.Linear(second, num_classes, **factory),
        )

    def forward(self, points: Tensor, mask: Tensor | None = None) -> Tensor:
        features, mask = self.trunk(points, mask)
        return self.layers(largest(features, mask))

    def head_macs(self, num_points: int) -> int:
        return sum(m.in_features * m.out_features for m in self.layers.modules() if isinstance(m, nn.Linear))


class PointSegmenter(_PointModel):
    """Part segmentation from each point's features, max and mean pooling of the cloud, and its category.

    Args:
        trunk: the feature extractor, with one token per point in the order of the points.
        num_parts: parts of all categories.
        num_categories: categories.
        label_dim: width of a category; published 64.
        head_dims: widths of the two hidden layers.
        drop_rate: dropout after the first of them; published 0.5.

    Shape: points (B, N, C), category (B,) int64, mask (B, N) bool, to logits (B, N, num_parts).

    Raises:
        UserError: the trunk does not keep all points.

    Reference: PCT, section 3.1, and the released code.
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
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__()
        if isinstance(trunk.embedding, NeighbourEmbedding) and trunk.embedding.centres is not None:
            raise UserError("part segmentation needs all points: give centres='all', or the naive embedding")
        self.trunk, self.num_parts, self.num_categories = trunk, num_parts, num_categories
        self.category = nn.Linear(num_categories, label_dim, bias=False, **factory)
        self.category_norm = MaskedBatchNorm(label_dim, **factory)
        first, second = head_dims
        self.first = LBR(3 * trunk.out_dim + label_dim, first, bias=True, **factory)
        self.dropout = nn.Dropout(drop_rate)
        self.second = LBR(first, second, bias=True, **factory)
        self.last = nn.Linear(second, num_parts, **factory)

    def forward(self, points: Tensor, category: Tensor, mask: Tensor | None = None) -> Tensor:
        features, mask = self.trunk(points, mask)
        known = F.one_hot(category, self.num_categories).to(features.dtype)
        known = F.leaky_relu(batch_norm(self.category_norm, self.category(known)), 0.2)
        if mask is None:
            mean = features.mean(1)
        else:
            mean = zero_masked(features, mask).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
        whole = torch.cat([largest(features, mask), mean, known], -1)
        x = torch.cat([features, whole.unsqueeze(1).expand(-1, features.shape[1], -1)], -1)
        return self.last(self.second(self.dropout(self.first(x, mask)), mask))

    def head_macs(self, num_points: int) -> int:
        last = num_points * self.last.in_features * self.last.out_features
        category = self.category.in_features * self.category.out_features
        return category + self.first.macs(num_points) + self.second.macs(num_points) + last


def largest(features: Tensor, mask: Tensor | None) -> Tensor:
    """Max pooling (B, N, C) to (B, C) over unmasked tokens; 0 if all are masked."""
    if mask is None:
        return features.amax(1)
    found = features.masked_fill(~mask.unsqueeze(-1), -torch.inf).amax(1)
    return found.masked_fill(torch.isneginf(found), 0.0)


def create_point_model(
    *,
    parts: bool = False,
    num_classes: int | None = None,
    num_parts: int | None = None,
    num_categories: int | None = None,
    in_chans: int = 3,
    embedding: Literal["neighbour", "naive"] = "neighbour",
    stem_dim: int | None = None,
    stage_dims: Sequence[int] | None = None,
    centres: Sequence[int] | Literal["all"] | None = None,
    num_neighbours: int | None = None,
    mixer: str = "offset",
    mixer_kwargs: Arguments | None = None,
    dim: int = 256,
    depth: int = 4,
    position: Position = "none",
    fuse_dim: int = 1024,
    head_dims: Sequence[int] = (512, 256),
    drop_rate: float = 0.5,
    device: Device = None,
    dtype: torch.dtype | None = None,
) -> PointClassifier | PointSegmenter:
    """Build a point cloud transformer; `tokenmix.create_model` builds the published models by name.

    Args:
        parts: predict the part of each point instead of the class of a cloud.
        num_classes: classes of a cloud (default 40, as in ModelNet40).
        num_parts, num_categories: parts and categories (default 50 and 16, as in ShapeNet-part).
        in_chans: channels of a point; 3, or 6 with normals.
        embedding: each point with its `"neighbour"`s, or separately, `"naive"`.
        stem_dim, stage_dims, centres, num_neighbours: of `NeighbourEmbedding`; None for its defaults.
        mixer, mixer_kwargs: name in the table and arguments of the attention layers' mixer.
        dim, depth: width and number of the attention layers.
        position: `"each-layer"` adds the coordinates to the input of each layer.
        fuse_dim: width after the attention layers.
        head_dims: widths of the head.
        drop_rate: dropout of the head.
    """
    if in_chans < 3:
        raise UserError(f"a point has 3 coordinates at least, got in_chans={in_chans}; give 3, or 6 with normals")
    if depth < 1:
        raise UserError(f"depth={depth} must be at least 1; the paper has 4")
    factory: Factory = {"device": device, "dtype": dtype}
    near = {"stem_dim": stem_dim, "stage_dims": stage_dims, "centres": centres, "num_neighbours": num_neighbours}
    given: Arguments = {name: value for name, value in near.items() if value is not None}
    check_choice("embedding", embedding, ("neighbour", "naive"))
    if embedding == "naive" and given:
        raise UserError(f"embedding='naive' takes each point by itself and has no {next(iter(given))}; leave it out")
    trunk = PCT(
        NaiveEmbedding(in_chans, dim, **factory)
        if embedding == "naive"
        else NeighbourEmbedding(in_chans, dim, **given, **factory),
        mixer=mixer,
        mixer_kwargs=mixer_kwargs or {},
        depth=depth,
        fuse_dim=fuse_dim,
        position=position,
        **factory,
    )
    if not parts:
        if num_parts is not None or num_categories is not None:
            raise UserError("the model classifies clouds; omit num_parts and num_categories, or take a *_part model")
        classes = 40 if num_classes is None else num_classes
        return PointClassifier(trunk, classes, head_dims=head_dims, drop_rate=drop_rate, **factory)
    if num_classes is not None:
        raise UserError("the model segments parts; give num_parts and num_categories instead of num_classes")
    labels = 50 if num_parts is None else num_parts, 16 if num_categories is None else num_categories
    return PointSegmenter(trunk, *labels, head_dims=head_dims, drop_rate=drop_rate, **factory)
