"""LaViT: a pyramid of four stages; later blocks of a stage transform the scores of earlier blocks.

There is no published code or layout. This layout is our own; docs/models/index.md gives the reasons.

Reference: Zhang, Liu, Lin, He, "You Only Need Less Attention at Each Stage in Vision Transformers", CVPR 2024,
arXiv:2406.00427.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import ClassVar, Literal, NamedTuple, Unpack, cast

import torch
import torch.fx
import torch.nn.functional as F
from timm.layers.drop import calculate_drop_path_rates
from timm.layers.pos_embed import resample_abs_pos_embed
from timm.layers.weight_init import trunc_normal_
from timm.models._input import update_model_input_size
from torch import Tensor, nn

from tokenmix.errors import UserError
from tokenmix.layers.base import Capabilities, Device, Factory, Mixer, check_input, masked_output, replace_parameter
from tokenmix.layers.less_attention import AttentionResidual, LessAttention
from tokenmix.layers.self_attention import SelfAttention
from tokenmix.models.interface import (
    BlockMap,
    Classifier,
    FeatureMaps,
    Intermediates,
    Size,
    check_images,
    checkpointed,
    init_linear,
    make_head,
    pair,
    take_indices,
)
from tokenmix.models.isotropic import MixerBlock, block_maps
from tokenmix.ops.attention import attention, attention_probabilities
from tokenmix.ops.checks import check_heads
from tokenmix.ops.less import Scores

torch.fx.wrap("check_images")
torch.fx.wrap("padded_image")


Grid = tuple[int, int]
Mode = Literal["factored", "dense"]
Residual = Literal["none", "pooled", "kept"]


@dataclass(frozen=True)
class StageSpec:
    """One stage, see `LaViT`."""

    dim: int
    depth: int
    num_vanilla: int
    num_heads: int
    mlp_ratio: float
    key_reduction: int  # side r of the block of tokens per key and value of vanilla attention
    residual: Residual  # whether the first layer adds the previous stage's scores, and how their keys are reduced

    @property
    def dense(self) -> bool:
        """Whether the scores have a full-rank part: a second vanilla layer discards the first layer's residual."""
        return self.residual != "none" and self.num_vanilla == 1


class BlockCost(NamedTuple):
    """Attention cost of one block, and of a vanilla layer in its place; stages and blocks count from 0."""

    stage: int
    block: int
    kind: Literal["reduced", "vanilla", "less"]
    num_tokens: int
    macs: int
    vanilla: int


def shrunk(grid: Grid, stride: int) -> Grid:
    """The grid after a convolution with kernel and stride `stride` and zero padding."""
    return -(-grid[0] // stride), -(-grid[1] // stride)


def stage_specs(
    embed_dims: Sequence[int],
    depths: Sequence[int],
    num_vanilla: Sequence[int],
    num_heads: Sequence[int],
    key_reductions: Sequence[int],
    residuals: Sequence[bool],
    mlp_ratio: float,
) -> list[StageSpec]:
    """One spec per stage; `UserError` if the arguments of `LaViT` do not fit each other."""
    count, given = len(embed_dims), {"depths": depths, "num_vanilla": num_vanilla, "num_heads": num_heads}
    for name, values in {**given, "key_reductions": key_reductions}.items():
        if len(values) != count:
            raise UserError(f"{name} needs one number for each of the {count} stages of embed_dims, got {values}")
    if len(residuals) != count - 1:
        raise UserError(f"residuals needs {count - 1} entries, one for each step to a next stage, got {residuals}")
    specs = []
    for i, (dim, depth, vanilla, heads, reduction) in enumerate(
        zip(embed_dims, depths, num_vanilla, num_heads, key_reductions, strict=True)
    ):
        stage = f"stage {i}"
        if not 1 <= vanilla <= depth:
            raise UserError(
                f"{stage} has depth {depth} and num_vanilla {vanilla}: a stage starts with 1..{depth} vanilla "
                "blocks, whose scores the others transform"
            )
        if reduction < 1:
            raise UserError(f"{stage} has key reduction {reduction}; give 1 for none, or 2, 4, ...")
        if vanilla < depth and reduction > 1:
            raise UserError(
                f"{stage} has less-attention and key reduction {reduction}: the scores that it transforms must be "
                f"square; give that stage key_reductions 1, or num_vanilla {depth}"
            )
        residual: Residual = "none"
        if i and residuals[i - 1]:
            # Both stages must use the same grid of keys, or both use all of their tokens.
            before = key_reductions[i - 1]
            if before == 2 * reduction:
                residual = "kept"
            elif before == reduction == 1:
                residual = "pooled"
            else:
                raise UserError(
                    f"no attention residual from stage {i - 1} to {i}: with key reductions {before} and {reduction} "
                    f"their keys are on different grids; give {2 * reduction} and {reduction}, or residuals[{i - 1}] = "
                    "False"
                )
        specs.append(StageSpec(dim, depth, vanilla, heads, mlp_ratio, reduction, residual))
    return specs


def less_macs(spec: StageSpec, num_tokens: int, index: int, mode: Mode) -> int:
    """Multiply-adds of the less-attention layer after `index` such layers in its stage.

    Each layer adds two columns to the factors, which heads share until attention. A full-rank part needs a dense
    transform, which includes the biases. Without gradients on a CPU, a map may need fewer multiply-adds than the
    columns.
    """
    n, heads = num_tokens, spec.num_heads
    width = spec.dim // heads
    values = 2 * n * spec.dim**2 + n**2 * spec.dim
    if mode == "dense":
        product = n**2 * heads * width if index == 0 else 0
        return values + product + 2 * heads * n**3
    mixing = 2 * n**2 * heads * width
    if spec.dense:
        return values + mixing + 2 * heads * n**3 + n**2 * heads * width
    columns = 2 * index
    return values + mixing + 2 * n**2 * columns + n**2 * heads * (width + columns + 2)


def padded_image(image: Tensor, stride: int) -> Tensor:
    """Zero-pad maps (B, C, H, W) below and to the right, to multiples of the stride."""
    bottom, right = -image.shape[-2] % stride, -image.shape[-1] % stride
    return F.pad(image, (0, right, 0, bottom)) if bottom or right else image


class ReducedAttention(Mixer):
    """Attention with one key and one value per r x r block of the grid.

        K, V = LN(DWConv_r(X)) W_kv,   out = concat_h [ softmax(Q_h K_h^T / sqrt(d) + R) V_h ] W_o

    PVT uses a full convolution. This convolution is depthwise, starts as the mean and costs next to nothing.

    Shape: x (B, N, D) to (B, N, D), tokens row by row on `grid`; map (B, H, N, S) with S blocks.

    Reference: PVT, Wang et al., arXiv 2102.12122.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(map="slots", mask=False, length="fixed", equivariant=False)

    def __init__(self, dim: int, grid: Grid, *, num_heads: int, reduction: int, **factory: Unpack[Factory]) -> None:
        super().__init__()
        self.dim, self.grid, self.num_heads, self.reduction = dim, grid, num_heads, reduction
        self.head_dim = check_heads(dim, num_heads)
        self.q = nn.Linear(dim, dim, **factory)
        self.reduce = nn.Conv2d(dim, dim, reduction, reduction, groups=dim, **factory)
        self.norm = nn.LayerNorm(dim, **factory)
        self.kv = nn.Linear(dim, 2 * dim, **factory)
        self.proj = nn.Linear(dim, dim, **factory)
        nn.init.constant_(self.reduce.weight, reduction**-2)
        nn.init.zeros_(self.reduce.bias)  # type: ignore[arg-type]

    @property
    def num_keys(self) -> int:
        """S, blocks of the grid."""
        return prod(shrunk(self.grid, self.reduction))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.mix(x, None, mask)[0]

    def mix(
        self, x: Tensor, carry: Scores | None = None, mask: Tensor | None = None, *, residual: Tensor | None = None
    ) -> tuple[Tensor, Scores | None]:
        """`forward`, and the pre-softmax scores in factors; `residual` (B, H, N, S) is added to the scores."""
        query, key, value = self._heads(x, mask)
        out = attention(query, key, value, bias=residual, scale=1.0)
        return masked_output(self.proj(out.transpose(1, 2).flatten(2)), None), Scores(query, key, residual)

    def attention_map(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.mix_map(x, None, mask)

    def mix_map(
        self, x: Tensor, carry: Scores | None = None, mask: Tensor | None = None, *, residual: Tensor | None = None
    ) -> Tensor:
        query, key, _ = self._heads(x, mask)
        return attention_probabilities(query, key, bias=residual, scale=1.0)

    def set_grid(self, old: Sequence[int], new: Sequence[int]) -> None:
        self.grid = (new[0], new[1])

    def macs(self, num_tokens: int) -> int:
        keys, area = self.num_keys, self.reduction**2
        return 2 * (num_tokens + keys) * self.dim**2 + (area + 2 * num_tokens) * keys * self.dim

    def _heads(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        check_input(self, x)
        if mask is not None:
            raise UserError("ReducedAttention makes keys of whole blocks of the image and takes no mask; leave it out")
        image = padded_image(x.transpose(1, 2).unflatten(2, self.grid), self.reduction)
        blocks = self.norm(self.reduce(image).flatten(2).transpose(1, 2))
        key, value = self.kv(blocks).unflatten(2, (2, self.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4).unbind(0)
        query = self.q(x).unflatten(2, (self.num_heads, self.head_dim)).transpose(1, 2)
        return query * self.head_dim**-0.5, key, value


@torch.fx.wrap
def _residual(layer: AttentionResidual, scores: Scores, height: int, width: int) -> Tensor:
    return layer(scores, (height, width))


class LaViTStage(nn.Module):
    """A strided convolution, LayerNorm, learned positions, then the blocks.

    Shape: maps (B, C, H, W) to (B, D, ceil(H / stride), ceil(W / stride)).
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
        **factory: Unpack[Factory],
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

        def mixer(index: int) -> Mixer:
            dim, heads = spec.dim, spec.num_heads
            if index >= spec.num_vanilla:
                n = self.num_tokens
                return LessAttention(dim, n, num_heads=heads, scores_from="previous", mode=less_mode, **factory)
            if spec.key_reduction > 1:
                return ReducedAttention(dim, grid, num_heads=heads, reduction=spec.key_reduction, **factory)
            return SelfAttention(dim, num_heads=heads, **factory)

        self.blocks = nn.ModuleList(
            MixerBlock(
                mixer(i),
                mlp_ratio=spec.mlp_ratio,
                layer_scale=layer_scale,
                drop=drop,
                drop_path=rate,
                **factory,
            )
            for i, rate in enumerate(drop_path)
        )

    @property
    def num_tokens(self) -> int:
        return self.grid[0] * self.grid[1]

    def forward(self, image: Tensor, carry: Scores | None) -> tuple[Tensor, Scores]:
        """The stage's map, and its last scores."""
        x, residual = self.embed(padded_image(image, self.stride)).flatten(2).transpose(1, 2), None
        x = self.norm(x) + self.pos_embed
        if self.residual is not None and carry is not None:
            residual = _residual(self.residual, carry, image.shape[-2], image.shape[-1])
        for block in self.blocks:
            if self.grad_checkpointing and torch.is_grad_enabled():
                x, carry = checkpointed(block, x, carry, None, residual)
            else:
                x, carry = block(x, carry, None, residual)
            assert carry is not None
            residual = None
        assert carry is not None
        return x.transpose(1, 2).unflatten(2, self.grid), carry

    @torch.no_grad()
    def set_grid(self, grid: Grid) -> None:
        """Set the grid of the maps; positions, Theta and Psi are interpolated."""
        old = self.grid
        if grid == old:
            return
        self.grid = grid
        table = resample_abs_pos_embed(self.pos_embed.detach(), list(grid), list(old), 0)
        replace_parameter(self, "pos_embed", table)
        for block in self.blocks:
            block.mixer.set_grid(old, grid)  # type: ignore[operator, union-attr]

    def costs(self, number: int) -> list[BlockCost]:
        n, spec = self.num_tokens, self.spec
        vanilla = self.blocks[0].mixer.macs(n)  # type: ignore[operator, union-attr]
        kind: Literal["reduced", "vanilla"] = "reduced" if spec.key_reduction > 1 else "vanilla"
        rows = [BlockCost(number, i, kind, n, vanilla, vanilla) for i in range(spec.num_vanilla)]
        for i in range(spec.depth - spec.num_vanilla):
            macs = less_macs(spec, n, i, self.less_mode)
            rows.append(BlockCost(number, spec.num_vanilla + i, "less", n, macs, vanilla))
        return rows

    def macs(self, grid_before: Grid) -> int:
        """Multiply-adds of the stage for one image, from a map with grid `grid_before`."""
        spec, before, n = self.spec, self.before, self.num_tokens
        mlps = spec.depth * 2 * n * spec.dim * self.blocks[0].hidden  # type: ignore[operator]
        embed = n * spec.dim * self.embed.in_channels * self.stride**2
        total = int(embed + mlps + sum(row.macs for row in self.costs(0)))
        if self.residual is None or before is None:
            return total
        behind = before.depth - before.num_vanilla
        only_dense = behind > 0 and self.less_mode == "dense"
        num_keys = prod(shrunk(self.grid, spec.key_reduction))
        columns = 0 if before.dense else 2 * behind
        width = 0 if only_dense else before.dim // before.num_heads + columns
        total += self.residual.macs(grid_before, width, num_keys)
        if only_dense or before.dense:
            total += 4 * n * before.num_heads * (num_keys if self.residual.keys == "kept" else prod(grid_before) + n)
        return total


class LaViT(FeatureMaps, Classifier):
    """Stages of vanilla attention, then less-attention, with attention residuals between stages.

        A_1 = Q K^T / sqrt(d) + R(A of the stage before),   A_l = Psi(Theta(A_(l-1))^T)^T after the vanilla blocks

    Each stage starts with a convolution whose kernel equals its stride: `patch_size` in the first stage, 2 in the
    others. Maps are zero-padded below and to the right, so any image size works and sides round up.

    Args:
        img_size, in_chans, num_classes, drop_rate, drop_path_rate: see `Classifier`.
        patch_size: side of a patch of the first stage.
        global_pool: `"avg"`, or `""` for the tokens themselves.
        embed_dims: width D of each stage.
        depths: blocks of each stage.
        num_vanilla: leading blocks of each stage with vanilla attention.
        num_heads: heads of each stage.
        key_reductions: side r of the block of tokens per key and value, for each stage. Less-attention needs square
            scores, so its stages need r = 1.
        residuals: for each transition, whether the next stage's first block adds the previous stage's scores. Both
            stages need keys on one grid (r = 2 s before s), or no reduction.
        mlp_ratio: hidden width of the MLPs over D.
        less_mode: `"factored"`, or the reference `"dense"`, with the same result.
        layer_scale: initial LayerScale of the branches.
        proj_drop_rate: dropout after the MLPs.

    Shape: images (B, in_chans, H, W) to logits (B, num_classes).
    """

    mixer_name = "less"

    def __init__(
        self,
        *,
        img_size: Size = 224,
        patch_size: int = 4,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: Literal["avg", ""] = "avg",
        embed_dims: Sequence[int] = (64, 128, 320, 640),
        depths: Sequence[int] = (3, 2, 6, 3),
        num_vanilla: Sequence[int] = (3, 2, 2, 1),
        num_heads: Sequence[int] = (1, 2, 5, 10),
        key_reductions: Sequence[int] = (4, 2, 1, 1),
        residuals: Sequence[bool] = (True, True, True),
        mlp_ratio: float = 4.0,
        less_mode: Mode = "factored",
        layer_scale: float = 0.1,
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory: Factory = {"device": device, "dtype": dtype}
        specs = stage_specs(embed_dims, depths, num_vanilla, num_heads, key_reductions, residuals, mlp_ratio)
        width = embed_dims[-1]
        self.img_size, self.in_chans, self.patch_size = pair(img_size), in_chans, patch_size
        self.less_mode = less_mode
        strides = [patch_size] + [2] * (len(specs) - 1)
        rates = cast(list[list[float]], calculate_drop_path_rates(drop_path_rate, list(depths), stagewise=True))
        self.stages = nn.ModuleList(
            LaViTStage(
                spec,
                specs[i - 1] if i else None,
                specs[i - 1].dim if i else in_chans,
                grid,
                stride=strides[i],
                less_mode=less_mode,
                layer_scale=layer_scale,
                drop=proj_drop_rate,
                drop_path=rates[i],
                **factory,
            )
            for i, (spec, grid) in enumerate(zip(specs, _grids(self.img_size, strides), strict=True))
        )
        self.num_classes, self.num_features, self.head_hidden_size = num_classes, width, width
        self.global_pool = self.checked_pool(global_pool)
        self.norm: nn.Module = nn.LayerNorm(width, **factory)
        self.head_drop = nn.Dropout(drop_rate)
        self.head = make_head(width, num_classes, **factory)
        self.feature_info = [
            {"module": f"stages.{i}", "num_chs": spec.dim, "reduction": patch_size * 2**i}
            for i, spec in enumerate(specs)
        ]
        self.apply(init_linear)

    @property
    def grid_sizes(self) -> list[tuple[int, int]]:
        """(height, width) of the token grid of each stage."""
        return [stage.grid for stage in self.stages]  # type: ignore[misc]

    def _maps(self, images: Tensor, count: int | None = None) -> list[Tensor]:
        """The maps of the first stages."""
        check_images(images, self.in_chans, self.img_size)
        x, carry, maps = images, None, []
        for stage in self.stages[:count]:
            x, carry = stage(x, carry)
            maps.append(x)
        return maps

    def forward_features(self, images: Tensor) -> Tensor:
        return self.norm(self._maps(images)[-1].flatten(2).transpose(1, 2))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        x = self.head_drop(x.mean(1) if self.global_pool == "avg" else x)
        return x if pre_logits else self.head(x)

    def forward_intermediates(
        self,
        images: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: Literal["NCHW", "NLC"] = "NCHW",
        intermediates_only: bool = False,
    ) -> Intermediates:
        """The maps of selected stages, as in `IsotropicNet`; the last norm only applies to the last stage's map."""
        total = len(self.stages)
        take, last = take_indices(total, indices, output_fmt)
        maps = self._maps(images, last + 1 if stop_early else None)
        final = maps[-1].flatten(2).transpose(1, 2)
        final = self.norm(final) if len(maps) == total else final
        kept = []
        for i in take:
            y = maps[i].flatten(2).transpose(1, 2)
            y = final if norm and i == total - 1 else y
            kept.append(y.transpose(1, 2).unflatten(2, self.grid_sizes[i]) if output_fmt == "NCHW" else y)
        return kept if intermediates_only else (final, kept)

    def prune_intermediate_layers(
        self, indices: int | list[int] | None = None, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Remove the stages after the last selected one, with their norm and head, for `features_only=True`."""
        take, last = take_indices(len(self.stages), indices)
        cut = last + 1 < len(self.stages)
        self.stages, self.feature_info = self.stages[: last + 1], self.feature_info[: last + 1]
        self.num_features = self.head_hidden_size = self.feature_info[-1]["num_chs"]
        if prune_norm or cut:
            self.norm = nn.Identity()
        if prune_head or cut:
            self.reset_classifier(0, "")
        return take

    def attention_maps(self, images: Tensor) -> list[BlockMap]:
        """The map of each block on its stage's grid; with key reduction, columns are blocks of the grid (`"slots"`)."""
        return block_maps(self, images, lambda name: self.grid_sizes[int(name.split(".")[1])])

    def macs(self) -> int:
        grids = [self.img_size, *self.grid_sizes]
        stages = sum(stage.macs(before) for stage, before in zip(self.stages, grids, strict=False))  # type: ignore[operator]
        return stages + self.num_features * self.num_classes

    def cost_table(self) -> list[BlockCost]:
        """Attention cost of each block for one image, with the cost of a vanilla layer in its place."""
        return [row for i, stage in enumerate(self.stages) for row in stage.costs(i)]  # type: ignore[operator]

    def warnings(self) -> list[str]:
        lines = []
        for number, stage in enumerate(self.stages):
            spec = cast(StageSpec, stage.spec)
            rows = [row for row in stage.costs(number) if row.kind == "less" and row.macs >= row.vanilla]  # type: ignore[operator]
            if not rows:
                continue
            n, vanilla, second = rows[0].num_tokens, rows[0].vanilla, replace(spec, num_vanilla=2)
            if self.less_mode == "dense" and less_macs(spec, n, 0, "factored") < vanilla:
                remedy = "less_mode='factored' gives the same and does"
            elif spec.dense and spec.depth > 2 and less_macs(second, n, 0, "factored") < vanilla:
                remedy = "num_vanilla 2 there ends the residual's part of full rank before them"
            else:
                paying = rows[0].block - spec.num_vanilla
                remedy = f"num_vanilla {spec.depth - paying} there keeps them vanilla"
            lines.append(
                f"stage {number}: {len(rows)} of {spec.depth - spec.num_vanilla} less-attention layers do not pay at "
                f"{n} tokens, {max(row.macs for row in rows) / 1e6:.4g} M multiply-adds against "
                f"{vanilla / 1e6:.4g} M of a vanilla layer; {remedy}"
            )
        return lines

    def set_input_size(self, img_size: Size) -> None:
        """Set the image size. Parameters over positions are replaced, so create the optimiser afterwards."""
        size = pair(img_size)
        grids = _grids(size, [stage.stride for stage in self.stages])  # type: ignore[misc]
        for stage, grid in zip(self.stages, grids, strict=True):
            stage.set_grid(grid)  # type: ignore[operator]
        self.img_size = size
        update_model_input_size(self, size)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        super().reset_classifier(num_classes, global_pool)
        init_linear(self.head)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        for stage in self.stages:
            stage.grad_checkpointing = enable  # type: ignore[assignment]

    def no_weight_decay(self) -> set[str]:
        return {f"stages.{i}.pos_embed" for i in range(len(self.stages))}

    def group_matcher(self, coarse: bool = False) -> dict[str, object]:
        """Groups of parameters by depth, for layer-wise learning rates: patch embedding, blocks or stages, the rest."""
        entry = r"(?:embed|norm|pos_embed|residual)"
        fine = [
            (rf"^stages\.(\d+)\.{entry}", (0,)),
            (r"^stages\.(\d+)\.blocks\.(\d+)", None),
            (r"^norm", (99999,)),
        ]
        return {"stem": rf"^stages\.0\.{entry}", "blocks": r"^stages\.(\d+)" if coarse else fine}


def _grids(size: tuple[int, int], strides: Sequence[int]) -> list[tuple[int, int]]:
    if min(size) < 1:
        raise UserError(f"image size {size[0]} x {size[1]} has no pixels; give a side of 32 or more")
    return list(accumulate(strides, shrunk, initial=size))[1:]
