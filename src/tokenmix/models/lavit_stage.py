"""One stage of a LaViT: it shrinks the grid, adds positions, and runs vanilla blocks, then less-attention blocks."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.fx
from timm.layers.drop import DropPath
from timm.layers.pos_embed import resample_abs_pos_embed
from timm.layers.weight_init import trunc_normal_
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tokenmix.layers.attention_residual import AttentionResidual
from tokenmix.layers.base import Mixer, replace_parameter
from tokenmix.layers.less_attention import LessAttention
from tokenmix.layers.self_attention import SelfAttention
from tokenmix.models.isotropic import BlockMap, mix
from tokenmix.models.lavit_layout import BlockCost, Grid, Mode, StageSpec, less_macs, shrunk
from tokenmix.models.reduced_attention import ReducedAttention, padded_image
from tokenmix.ops.less import Scores

torch.fx.wrap("mix")
torch.fx.wrap("padded_image")


class LaViTBlock(nn.Module):
    """x + s1 * mixer(norm(x)), then x + s2 * mlp(norm(x)), with LayerScale s1, s2."""

    def __init__(
        self, mixer: Mixer, *, mlp_ratio: float, layer_scale: float, drop: float, drop_path: float, **factory: Any
    ) -> None:
        super().__init__()
        dim = mixer.dim
        self.hidden = int(dim * mlp_ratio)
        self.norm1, self.norm2 = nn.LayerNorm(dim, **factory), nn.LayerNorm(dim, **factory)
        self.mixer = mixer
        self.mlp = nn.Sequential(
            nn.Linear(dim, self.hidden, **factory), nn.GELU(), nn.Linear(self.hidden, dim, **factory), nn.Dropout(drop)
        )
        self.scale1 = nn.Parameter(torch.full((dim,), layer_scale, **factory))
        self.scale2 = nn.Parameter(torch.full((dim,), layer_scale, **factory))
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor, carry: Scores | None, residual: Tensor | None) -> tuple[Tensor, Scores]:
        """Tokens and the scores of the block before, to the same for the block after; the residual joins the scores."""
        out, scores = mix(self.mixer, self.norm1(x), carry, **_given(residual))
        assert scores is not None
        x = x + self.drop_path(self.scale1 * out)
        return x + self.drop_path(self.scale2 * self.mlp(self.norm2(x))), scores

    def map(self, x: Tensor, carry: Scores | None, residual: Tensor | None) -> Tensor:
        """The map that `forward` used on the same arguments."""
        return self.mixer.mix_map(self.norm1(x), carry, **_given(residual))


def _given(residual: Tensor | None) -> dict[str, Any]:
    """Only vanilla attention, the first of a stage, has an argument for it."""
    return {} if residual is None else {"residual": residual}


@torch.fx.wrap
def _residual(layer: AttentionResidual, scores: Scores, height: int, width: int) -> Tensor:
    return layer(scores, (height, width))


class LaViTStage(nn.Module):
    """A convolution that shrinks the grid, LayerNorm, learned positions, then the blocks.

    Shape:
        maps (B, C, H, W) to (B, D, ceil(H / stride), ceil(W / stride)).
    """

    def __init__(
        self,
        spec: StageSpec,
        before: StageSpec | None,
        in_dim: int,
        grid: Grid,
        *,
        stride: int,
        less_mode: Mode,
        layer_scale: float,
        drop: float,
        drop_path: Sequence[float],
        **factory: Any,
    ) -> None:
        super().__init__()
        self.spec, self.before, self.stride = spec, before, stride
        self.less_mode: Mode = less_mode
        self.grid, self.grad_checkpointing = grid, False
        self.embed = nn.Conv2d(in_dim, spec.dim, stride, stride, **factory)
        self.norm = nn.LayerNorm(spec.dim, **factory)
        self.pos_embed = nn.Parameter(torch.empty(1, grid[0] * grid[1], spec.dim, **factory))
        trunc_normal_(self.pos_embed, std=0.02)
        self.residual = None
        if before is not None and spec.residual != "none":
            self.residual = AttentionResidual(before.num_heads, spec.num_heads, keys=spec.residual, **factory)
        self.blocks = nn.ModuleList(
            LaViTBlock(
                self._mixer(i, **factory), mlp_ratio=spec.mlp_ratio, layer_scale=layer_scale, drop=drop, drop_path=rate,
                **factory,
            )
            for i, rate in enumerate(drop_path)
        )  # fmt: skip

    def _mixer(self, index: int, **factory: Any) -> Mixer:
        spec = self.spec
        heads: dict[str, Any] = {"num_heads": spec.num_heads, **factory}
        if index >= spec.num_vanilla:
            return LessAttention(spec.dim, self.num_tokens, scores_from="previous", mode=self.less_mode, **heads)
        if spec.key_reduction > 1:
            return ReducedAttention(spec.dim, self.grid, reduction=spec.key_reduction, **heads)
        return SelfAttention(spec.dim, **heads)

    @property
    def num_tokens(self) -> int:
        """N, positions of the grid."""
        return self.grid[0] * self.grid[1]

    def _start(self, image: Tensor, carry: Scores | None) -> tuple[Tensor, Tensor | None]:
        """Tokens with positions, and the residual made of the scores of the stage before."""
        x = self.embed(padded_image(image, self.stride)).flatten(2).transpose(1, 2)
        if self.residual is None or carry is None:
            return self.norm(x) + self.pos_embed, None
        return self.norm(x) + self.pos_embed, _residual(self.residual, carry, image.shape[-2], image.shape[-1])

    def forward(self, image: Tensor, carry: Scores | None) -> tuple[Tensor, Scores, list[Scores]]:
        """The stage's map, its last scores, and those that its less-attention layers made."""
        x, residual = self._start(image, carry)
        transformed: list[Scores] = []
        for block in self.blocks:
            if self.grad_checkpointing and torch.is_grad_enabled():
                x, carry = checkpoint(block, x, carry, residual, use_reentrant=False)  # type: ignore[misc]
            else:
                x, carry = block(x, carry, residual)
            assert carry is not None
            if isinstance(block.mixer, LessAttention):
                transformed.append(carry)
            residual = None
        assert carry is not None
        return x.transpose(1, 2).unflatten(2, self.grid), carry, transformed

    def maps(self, image: Tensor, carry: Scores | None, name: str) -> list[BlockMap]:
        """The map of each block on the input that `forward` would get."""
        x, residual = self._start(image, carry)
        maps = []
        for i, block in enumerate(self.blocks):
            mixer: Mixer = block.mixer  # type: ignore[assignment]
            used = block.map(x, carry, residual)  # type: ignore[operator]
            maps.append(BlockMap(f"{name}.blocks.{i}.mixer", mixer.map_kind(), used, self.grid))
            x, carry = block(x, carry, residual)
            residual = None
        return maps

    @torch.no_grad()
    def set_grid(self, grid: Grid) -> None:
        """Set the grid of the maps: positions, Theta and Psi are interpolated."""
        old = self.grid
        if grid == old:
            return
        self.grid = grid
        table = resample_abs_pos_embed(self.pos_embed.detach(), list(grid), list(old), 0)
        replace_parameter(self, "pos_embed", table)
        for block in self.blocks:
            block.mixer.set_grid(old, grid)  # type: ignore[operator, union-attr]

    def costs(self, number: int) -> list[BlockCost]:
        """The attention of each block, in a stage of that number."""
        n, spec = self.num_tokens, self.spec
        vanilla = self.blocks[0].mixer.macs(n)  # type: ignore[operator, union-attr]
        kind: Literal["reduced", "vanilla"] = "reduced" if spec.key_reduction > 1 else "vanilla"
        rows = [BlockCost(number, i + 1, kind, n, vanilla, vanilla) for i in range(spec.num_vanilla)]
        for i in range(spec.depth - spec.num_vanilla):
            macs = less_macs(spec, n, i, self.less_mode)
            rows.append(BlockCost(number, spec.num_vanilla + i + 1, "less", n, macs, vanilla))
        return rows

    def macs(self, grid_before: Grid) -> int:
        """Multiply-adds of the whole stage on one image whose map has that grid."""
        spec, n = self.spec, self.num_tokens
        mlps = spec.depth * 2 * n * spec.dim * self.blocks[0].hidden  # type: ignore[operator]
        embed = n * spec.dim * self.embed.in_channels * self.stride**2
        return int(embed + mlps + sum(row.macs for row in self.costs(0)) + self._residual_macs(grid_before))

    def _residual_macs(self, grid_before: Grid) -> int:
        if self.residual is None or self.before is None:
            return 0
        before, n = self.before, self.num_tokens
        behind = before.depth - before.num_vanilla
        keys = shrunk(self.grid, self.spec.key_reduction)
        num_keys = keys[0] * keys[1]
        only_dense = behind > 0 and self.less_mode == "dense"
        columns = 0 if before.dense else 2 * behind
        width = 0 if only_dense else before.dim // before.num_heads + columns
        macs = self.residual.macs(grid_before, width, num_keys)
        if not only_dense and not before.dense:
            return macs
        rest = 4 * n * before.num_heads
        if self.residual.keys == "kept":
            return macs + rest * num_keys
        return macs + rest * (grid_before[0] * grid_before[1] + n)
