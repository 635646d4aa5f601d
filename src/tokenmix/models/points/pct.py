"""The point cloud transformer: one skeleton, with embedding, mixers and head passed in."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tokenmix.errors import UserError, unknown_name
from tokenmix.layers.base import Mixer, count_parameters
from tokenmix.layers.offset_attention import Offset, OffsetAttention
from tokenmix.layers.table import create_mixer, get_spec
from tokenmix.models.maps import PartCost
from tokenmix.models.points.embedding import LBR, NaiveEmbedding, NeighbourEmbedding
from tokenmix.presets.points import Position

# What stands in place of q, k and v alone: the linear layer after is that of the block.
_INSIDE: dict[str, dict[str, Any]] = {"external": {"output_projection": False}}


class OffsetBlock(nn.Module):
    """PCT's attention layer with another mixer inside: out = X + relu(BN((X - mixer(X)) W + b))."""

    def __init__(self, mixer: Mixer, *, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.mixer, self.offset = mixer, Offset(mixer.dim, device=device, dtype=dtype)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x (B, N, D) to (B, N, D)."""
        return self.offset(x, self.mixer(x, mask), mask)

    def macs(self, num_tokens: int) -> int:
        """The mixer's, and N D^2."""
        return self.mixer.macs(num_tokens) + num_tokens * self.mixer.dim**2


def make_block(
    mixer: str,
    dim: int,
    kwargs: Mapping[str, Any] | None = None,
    *,
    device: Any = None,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """An attention layer of PCT with a mixer of the table: `offset` is one already, others are wrapped in
    `OffsetBlock`.

    Raises:
        UserError: a mixer on maps, or one that learns a matrix over tokens, which points have no order for.
    """
    spec = get_spec(mixer)
    if spec.layer.capabilities.layout == "2d":
        raise UserError(f"mixer {mixer!r} takes maps (B, C, H, W), points are tokens; use 'offset' or 'external'")
    if "num_tokens" in inspect.signature(spec.layer).parameters:
        raise UserError(
            f"mixer {mixer!r} learns a matrix over tokens, and points have no order and no fixed number; use 'offset', "
            "'external' or 'self'"
        )
    inner = create_mixer(mixer, dim, **{**_INSIDE.get(mixer, {}), **(kwargs or {})}, device=device, dtype=dtype)
    return inner if isinstance(inner, OffsetAttention) else OffsetBlock(inner, device=device, dtype=dtype)


class PCT(nn.Module):
    """Point cloud transformer: clouds to features of their tokens.

        x_0 = embedding(P),   x_l = block_l(x_(l-1) [+ P W_p]),   out = LBR([x_1, ..., x_L, skip])

    Paper: Guo et al., PCT: Point Cloud Transformer, arXiv 2012.09688, figure 2.

    Args:
        embedding: `NaiveEmbedding` or `NeighbourEmbedding`.
        blocks: attention layers, see `make_block`.
        fuse_dim: width of the output.
        position: `"each-layer"` adds a linear map of the coordinates to what enters each block, as one of the released
            forms does; their other form says so and does not.
        name: what `mixer_name` says of the blocks.

    Shape:
        points (B, N, 3 or more), mask (B, N) bool, to features (B, M, fuse_dim) and their mask (B, M) or None.
    """

    def __init__(
        self,
        embedding: NaiveEmbedding | NeighbourEmbedding,
        blocks: Sequence[nn.Module],
        *,
        fuse_dim: int = 1024,
        position: Position = "none",
        name: str = "",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if position not in ("none", "each-layer"):
            raise unknown_name("position", position, ("none", "each-layer"))
        place = {"device": device, "dtype": dtype}
        self.embedding, self.blocks, self.out_dim = embedding, nn.ModuleList(blocks), fuse_dim
        self.mixer_name = name
        self.position = nn.Linear(3, embedding.dim, bias=False, **place) if position == "each-layer" else None
        self.fuse = LBR(len(blocks) * embedding.dim + embedding.skip_dim, fuse_dim, slope=0.2, **place)

    def forward(self, points: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Features of the tokens, and which of them take part."""
        x, places, mask, skip = self.embedding(points, mask)
        outs = []
        for block in self.blocks:
            x = block(x if self.position is None else x + self.position(places), mask)
            outs.append(x)
        return self.fuse(torch.cat([*outs, *([] if skip is None else [skip])], -1), mask), mask

    def cost_table(self, num_points: int) -> list[PartCost]:
        """Parameters and multiply-adds of the parts for a cloud of that many points."""
        n = self.embedding.num_tokens(num_points)
        blocks: Any = self.blocks
        rows = [
            PartCost("embedding", count_parameters(self.embedding), self.embedding.macs(num_points)),
            PartCost(f"{len(blocks)} attention layers", count_parameters(blocks), sum(b.macs(n) for b in blocks)),
            PartCost("fusion", count_parameters(self.fuse), self.fuse.macs(n)),
        ]
        if self.position is not None:
            added = len(blocks) * n * 3 * self.embedding.dim
            rows.insert(1, PartCost("coordinates", count_parameters(self.position), added))
        return rows
