"""The layout of a LaViT: its numbers, what each stage is made of, and what each of its layers costs.

None was published; this one is ours. docs/models/lavit.md gives the reasons.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from tokenmix.errors import UserError
from tokenmix.models.architecture import Architecture

Grid = tuple[int, int]
Mode = Literal["factored", "dense"]


@dataclass(frozen=True, kw_only=True)
class StageSpec:
    """One stage.

    Attributes:
        dim: width D.
        depth: number of blocks.
        num_vanilla: blocks at the front with vanilla attention; the others have less-attention.
        num_heads: heads H.
        mlp_ratio: hidden width of the MLP over D.
        key_reduction: side r of the block of tokens that makes one key and value of vanilla attention.
        residual: whether the stage before passes its scores to the first layer, and what becomes of its keys then.
    """

    dim: int
    depth: int
    num_vanilla: int
    num_heads: int
    mlp_ratio: float
    key_reduction: int
    residual: Literal["none", "pooled", "kept"]

    @property
    def dense(self) -> bool:
        """Whether what less-attention transforms, and the next stage gets, has a part of full rank.

        Only the first layer adds the residual. Each vanilla layer makes scores of its own, so a second one ends it.
        """
        return self.residual != "none" and self.num_vanilla == 1


class BlockCost(NamedTuple):
    """What the attention of one block costs on one image. Stages and blocks count from 1.

    `vanilla` is what a vanilla layer of that stage takes, which a less-attention layer replaces.
    """

    stage: int
    block: int
    kind: Literal["reduced", "vanilla", "less"]
    num_tokens: int
    macs: int
    vanilla: int


def shrunk(grid: Grid, stride: int) -> Grid:
    """The grid after a convolution with kernel and stride `stride`: what is left over is padded with zeros."""
    return -(-grid[0] // stride), -(-grid[1] // stride)


@dataclass(frozen=True, kw_only=True)
class LaViTArchitecture(Architecture):
    """Architecture of a LaViT.

    Attributes:
        patch_size: side of a patch of the first stage.
        embed_dims: width D of each stage.
        depths: blocks of each stage.
        num_vanilla: blocks at the front of each stage that keep vanilla attention.
        num_heads: heads of each stage.
        key_reductions: side r of the block of tokens that makes one key and value, for each stage; less-attention needs
            square scores, so 1 in stages that have it.
        residuals: for each step to a next stage, whether its first block adds the scores of the one before. Both stages
            need keys on one grid (r = 2 s before s), or no reduction.
        mlp_ratio: hidden width of the MLPs over D.
        less_mode: `"factored"`, or `"dense"`, the reference; the same result.
        layer_scale: LayerScale of the branches at the start.
    """

    patch_size: int = 4
    embed_dims: Sequence[int] = (64, 128, 320, 640)
    depths: Sequence[int] = (3, 2, 6, 3)
    num_vanilla: Sequence[int] = (3, 2, 2, 1)
    num_heads: Sequence[int] = (1, 2, 5, 10)
    key_reductions: Sequence[int] = (4, 2, 1, 1)
    residuals: Sequence[bool] = (True, True, True)
    mlp_ratio: float = 4.0
    less_mode: Mode = "factored"
    layer_scale: float = 0.1

    def stages(self) -> list[StageSpec]:
        """One spec for each stage; `UserError` where the numbers do not fit each other."""
        count = len(self.embed_dims)
        for name in ("depths", "num_vanilla", "num_heads", "key_reductions"):
            if len(values := getattr(self, name)) != count:
                raise UserError(f"{name} needs one number for each of the {count} stages of embed_dims, got {values}")
        if len(self.residuals) != count - 1:
            raise UserError(
                f"residuals needs {count - 1} entries, one for each step to a next stage, got {self.residuals}"
            )
        return [self._stage(i) for i in range(count)]

    def _stage(self, index: int) -> StageSpec:
        stage, depth, num_vanilla = f"stage {index + 1}", self.depths[index], self.num_vanilla[index]
        reduction = self.key_reductions[index]
        if not 1 <= num_vanilla <= depth:
            raise UserError(
                f"{stage} has depth {depth} and num_vanilla {num_vanilla}: a stage starts with 1..{depth} vanilla "
                "blocks, whose scores the others transform"
            )
        if reduction < 1:
            raise UserError(f"{stage} has key reduction {reduction}; give 1 for none, or 2, 4, ...")
        if num_vanilla < depth and reduction > 1:
            raise UserError(
                f"{stage} has less-attention and key reduction {reduction}: the scores that it transforms must be "
                f"square; give that stage key_reductions 1, or num_vanilla {depth}"
            )
        carried = index > 0 and self.residuals[index - 1]
        return StageSpec(
            dim=self.embed_dims[index], depth=depth, num_vanilla=num_vanilla, num_heads=self.num_heads[index],
            mlp_ratio=self.mlp_ratio, key_reduction=reduction,
            residual=_residual(index, self.key_reductions[index - 1], reduction) if carried else "none",
        )  # fmt: skip


def _residual(index: int, before: int, reduction: int) -> Literal["pooled", "kept"]:
    """Both stages must see the same keys, or each all of its own tokens."""
    if before == 2 * reduction:
        return "kept"
    if before == reduction == 1:
        return "pooled"
    raise UserError(
        f"no attention residual from stage {index} to {index + 1}: with key reductions {before} and {reduction} "
        f"their keys are on different grids; give {2 * reduction} and {reduction}, or residuals[{index - 1}] = False"
    )


def less_macs(spec: StageSpec, num_tokens: int, index: int, mode: Mode) -> int:
    """Multiply-adds of the less-attention layer with `index` such layers before it in its stage.

    Each adds two columns to the factors, which heads share until attention; a part of full rank takes a dense
    transform, and the biases join that. Without gradients on a CPU the columns may take fewer, as a map.
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


def unpaid(costs: Sequence[BlockCost], stages: Sequence[StageSpec], mode: Mode) -> list[str]:
    """A line for each stage with less-attention layers that take no fewer multiply-adds than vanilla ones would."""
    lines = []
    for number, spec in enumerate(stages, 1):
        rows = [row for row in costs if row.stage == number and row.kind == "less" and row.macs >= row.vanilla]
        if rows:
            lines.append(
                f"stage {number}: {len(rows)} of {spec.depth - spec.num_vanilla} less-attention layers do not pay at "
                f"{rows[0].num_tokens} tokens, {max(row.macs for row in rows) / 1e6:.4g} M multiply-adds against "
                f"{rows[0].vanilla / 1e6:.4g} M of a vanilla layer; {_remedy(spec, rows, mode)}"
            )
    return lines


def _remedy(spec: StageSpec, rows: Sequence[BlockCost], mode: Mode) -> str:
    first = rows[0]
    if mode == "dense" and less_macs(spec, first.num_tokens, 0, "factored") < first.vanilla:
        return "less_mode='factored' gives the same and does"
    second = replace(spec, num_vanilla=2)
    if spec.dense and spec.depth > 2 and less_macs(second, first.num_tokens, 0, "factored") < first.vanilla:
        return "num_vanilla 2 there ends the residual's part of full rank before them"
    paying = first.block - 1 - spec.num_vanilla
    return f"num_vanilla {spec.depth - paying} there keeps them vanilla"
