"""LaViT: a pyramid of four stages in which the later blocks of a stage transform the scores of the earlier ones.

Paper: Zhang, Liu, Lin, He, "You Only Need Less Attention at Each Stage in Vision Transformers", CVPR 2024,
arXiv:2406.00427. Neither code nor a layout was published: docs/models/lavit.md says what is whose.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Literal

import torch
import torch.fx
from timm.layers.drop import calculate_drop_path_rates
from timm.layers.weight_init import trunc_normal_
from torch import Tensor, nn

from tokenmix.errors import UserError
from tokenmix.models.architecture import OnMaps
from tokenmix.models.isotropic import BlockMap
from tokenmix.models.lavit_layout import BlockCost, LaViTArchitecture, shrunk, unpaid
from tokenmix.models.lavit_stage import LaViTStage
from tokenmix.models.stems import pair
from tokenmix.models.timm_interface import Classifier, check_images, make_head, record_input_size, take_indices
from tokenmix.ops.less import Scores

torch.fx.wrap("check_images")


class LaViT(OnMaps, Classifier):
    """Stages of vanilla attention, then less-attention, with an attention residual from stage to stage.

        A_1 = Q K^T / sqrt(d) + R(A of the stage before),   A_l = Psi(Theta(A_(l-1))^T)^T after the vanilla blocks

    Each stage shrinks the grid by a convolution whose kernel is its stride, `patch_size` in the first, 2 in the others.
    What does not divide is padded with zeros below and to the right: any image size works, and sides round up.

    Args:
        architecture: the numbers of this one.
        img_size: side of the image, or (height, width).
        in_chans: channels of the image.
        num_classes: width of the head; 0 for none.
        global_pool: `"avg"`, or `""` for the tokens themselves.
        drop_rate: dropout before the head.
        proj_drop_rate: dropout after the MLPs.
        drop_path_rate: stochastic depth of the last block, linear in depth.

    Shape:
        images (B, in_chans, H, W) to logits (B, num_classes).

    Raises:
        UserError: numbers of the stages that do not fit each other, images of another size, an unknown option.
    """

    mixer_name = "less"

    def __init__(
        self,
        architecture: LaViTArchitecture,
        *,
        img_size: int | tuple[int, int] = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: Literal["avg", ""] = "avg",
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        specs, patch_size, width = architecture.stages(), architecture.patch_size, architecture.embed_dims[-1]
        self.img_size, self.in_chans, self.patch_size = pair(img_size), in_chans, patch_size
        self.less_mode = architecture.less_mode
        strides = [patch_size] + [2] * (len(specs) - 1)
        rates: Any = calculate_drop_path_rates(drop_path_rate, list(architecture.depths), stagewise=True)
        self.stages = nn.ModuleList(
            LaViTStage(
                spec, specs[i - 1] if i else None, specs[i - 1].dim if i else in_chans, grid, stride=strides[i],
                less_mode=self.less_mode, layer_scale=architecture.layer_scale, drop=proj_drop_rate,
                drop_path=rates[i], **factory,
            )
            for i, (spec, grid) in enumerate(zip(specs, _grids(self.img_size, strides), strict=True))
        )  # fmt: skip
        self.num_classes, self.num_features, self.head_hidden_size = num_classes, width, width
        self.global_pool = self.checked_pool(global_pool)
        self.norm: nn.Module = nn.LayerNorm(width, **factory)
        self.head_drop = nn.Dropout(drop_rate)
        self.head = make_head(width, num_classes, **factory)
        self.feature_info = [
            {"module": f"stages.{i}", "num_chs": spec.dim, "reduction": patch_size * 2**i}
            for i, spec in enumerate(specs)
        ]
        self.apply(_init_linear)

    @property
    def grid_sizes(self) -> list[tuple[int, int]]:
        """(height, width) of the tokens' grid in each stage."""
        return [stage.grid for stage in self.stages]  # type: ignore[misc]

    def _run(self, images: Tensor, count: int | None = None) -> tuple[list[Tensor], list[Scores]]:
        """The maps of the first stages, and the scores that less-attention made in them."""
        check_images(images, self.in_chans, self.img_size)
        x, carry, maps, transformed = images, None, [], []
        for stage in self.stages[:count]:
            x, carry, scores = stage(x, carry)
            maps.append(x)
            transformed += scores
        return maps, transformed

    def _normed(self, last: Tensor) -> Tensor:
        return self.norm(last.flatten(2).transpose(1, 2))

    def forward_features(self, images: Tensor) -> Tensor:
        """Images to the normalised tokens (B, N, D) of the last stage."""
        return self._normed(self._run(images)[0][-1])

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Tokens (B, N, D) to pooled features, and unless `pre_logits` to logits."""
        x = self.head_drop(x.mean(1) if self.global_pool == "avg" else x)
        return x if pre_logits else self.head(x)

    def forward_with_scores(self, images: Tensor) -> tuple[Tensor, list[Scores]]:
        """Logits, and the scores that each less-attention layer made, for a loss such as `losses.diagonality_loss`."""
        maps, transformed = self._run(images)
        return self.forward_head(self._normed(maps[-1])), transformed

    def forward_intermediates(
        self,
        images: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: Literal["NCHW", "NLC"] = "NCHW",
        intermediates_only: bool = False,
    ) -> Any:
        """The maps of chosen stages, and the final features unless `intermediates_only`.

        Args:
            images: (B, C, H, W).
            indices: stages by number, the last n if one number, all if none.
            norm: put the last stage's map through the last norm; the others have another width.
            stop_early: leave out the stages after the last one chosen; the final features are then its map's tokens.
            output_fmt: maps (B, D, h, w), or sequences (B, h * w, D).
            intermediates_only: return only the list.
        """
        if output_fmt not in ("NCHW", "NLC"):
            raise UserError(f"output_fmt must be NCHW or NLC, got {output_fmt!r}")
        total = len(self.stages)
        take, last = take_indices(total, indices)
        maps, _ = self._run(images, last + 1 if stop_early else None)
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
        """Drop the stages after the last one chosen, with the norm and head after them.

        What is left serves `forward_intermediates`; `features_only=True` calls this.
        """
        take, last = take_indices(len(self.stages), indices)
        cut = last + 1 < len(self.stages)
        self.stages, self.feature_info = self.stages[: last + 1], self.feature_info[: last + 1]
        self.num_features = self.head_hidden_size = self.feature_info[-1]["num_chs"]
        if prune_norm or cut:
            self.norm = nn.Identity()
        if prune_head or cut:
            self.reset_classifier(0, "")
        return take

    @torch.no_grad()
    def attention_maps(self, images: Tensor) -> list[BlockMap]:
        """The map that each block used on these images, on its stage's grid, from the first block to the last.

        Kind `"slots"`: in a stage with key reduction the columns are blocks of the grid.
        """
        x, carry, maps = images, None, []
        for i, stage in enumerate(self.stages):
            maps += stage.maps(x, carry, f"stages.{i}")  # type: ignore[operator]
            x, carry, _ = stage(x, carry)
        return maps

    def macs(self) -> int:
        """Multiply-adds of one image, from the equations."""
        grids = [self.img_size, *self.grid_sizes]
        stages = sum(stage.macs(before) for stage, before in zip(self.stages, grids, strict=False))  # type: ignore[operator]
        return stages + self.num_features * self.num_classes

    def cost_table(self) -> list[BlockCost]:
        """What the attention of each block costs on one image, next to a vanilla layer in its place."""
        return [row for i, stage in enumerate(self.stages, 1) for row in stage.costs(i)]  # type: ignore[operator]

    def warnings(self) -> list[str]:
        """A line for each stage with less-attention that does not pay at this image size; empty if there is none."""
        return unpaid(self.cost_table(), [stage.spec for stage in self.stages], self.less_mode)  # type: ignore[misc]

    def set_input_size(self, img_size: int | tuple[int, int]) -> None:
        """Set the image size: positions, Theta and Psi are interpolated over each stage's grid.

        Parameters are replaced, so build the optimiser afterwards. A size that is not a multiple of the reductions
        gives grids that round up.

        Raises:
            UserError: a side under 1.
        """
        size = pair(img_size)
        grids = _grids(size, [stage.stride for stage in self.stages])  # type: ignore[misc]
        for stage, grid in zip(self.stages, grids, strict=True):
            stage.set_grid(grid)  # type: ignore[operator]
        self.img_size = size
        record_input_size(self, size)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A new head, 0 classes for none; and if given, another pooling."""
        super().reset_classifier(num_classes, global_pool)
        _init_linear(self.head)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the blocks in the backward pass instead of keeping what they made."""
        for stage in self.stages:
            stage.grad_checkpointing = enable  # type: ignore[assignment]

    def no_weight_decay(self) -> set[str]:
        """Parameters without weight decay."""
        return {f"stages.{i}.pos_embed" for i in range(len(self.stages))}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Groups of parameters by depth, for layer-wise learning rates: patches, each block or stage, the rest."""
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


def _init_linear(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
