"""The skeleton of equal-budget comparisons: one isotropic network, any mixer of the table."""

import inspect
from collections.abc import Mapping
from typing import Any, Literal

import torch
from timm.layers.drop import calculate_drop_path_rates

from tokenmix.errors import UserError
from tokenmix.layers.base import GridMixer, Mixer
from tokenmix.layers.table import build_mixer, get_spec
from tokenmix.models.isotropic import IsotropicNet, MixerBlock
from tokenmix.models.stems import PatchStem, pair


class MixerNet(IsotropicNet):
    """Patches, positions, blocks that differ only in their mixer, mean over tokens, a linear head.

    Args:
        mixer: a name of `tokenmix.list_mixers()`.
        mixer_kwargs: arguments of the mixer's constructor.
        img_size: side of the image, or (height, width); a multiple of the patch.
        patch_size: side of a patch; 4, or 2 for images under 24 px, if not given.
        in_chans: channels of the image.
        num_classes: width of the head; 0 for none.
        global_pool: `"avg"`, or `""` for the tokens themselves.
        embed_dim: width D of the tokens.
        depth: number of blocks.
        num_heads: heads of the mixers that have heads.
        num_leading: with less-attention, the blocks at the front that keep vanilla attention.
        mlp_ratio: hidden width of the MLP over D.
        norm: `"layer"`, or `"batch"` for BatchNorm in the blocks.
        drop_rate: dropout before the head and after each MLP.
        drop_path_rate: stochastic depth of the last block, linear in depth.
    """

    def __init__(
        self,
        *,
        mixer: str = "self",
        mixer_kwargs: Mapping[str, Any] | None = None,
        img_size: int | tuple[int, int] = 32,
        patch_size: int | None = None,
        in_chans: int = 3,
        num_classes: int = 10,
        global_pool: Literal["avg", ""] = "avg",
        embed_dim: int = 64,
        depth: int = 4,
        num_heads: int = 4,
        num_leading: int = 1,
        mlp_ratio: float = 2.0,
        norm: Literal["layer", "batch"] = "layer",
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        factory = {"device": device, "dtype": dtype}
        patch_size = patch_size or (4 if min(pair(img_size)) >= 24 else 2)
        stem = PatchStem(embed_dim, img_size=img_size, patch_size=patch_size, in_chans=in_chans, **factory)
        spec, grid, asked = get_spec(mixer), stem.grid_size, mixer_kwargs or {}
        offered = {"num_heads": num_heads, **factory}

        # The skeleton's own arguments go to the layers that have them. The user's go to every layer of the mixer's own
        # class, which refuses an unknown one.
        def make(layer: type[Mixer], row: Mapping[str, Any], asked: Mapping[str, Any]) -> Mixer:
            known = inspect.signature(layer).parameters
            args = {k: v for k, v in offered.items() if k in known}
            built = build_mixer(layer, f"mixer {mixer!r}", embed_dim, grid[0] * grid[1], {**args, **row, **asked})
            return GridMixer(built, grid) if built.capabilities.layout == "2d" else built

        leading: list[Mixer] = []
        if spec.leader is not None:
            if not 1 <= num_leading < depth:
                raise UserError(
                    f"num_leading must lie in 1..{depth - 1} for {mixer!r} at depth {depth}, got {num_leading}"
                )
            shared = {k: v for k, v in asked.items() if k in inspect.signature(spec.leader).parameters}
            leading = [make(spec.leader, {}, shared) for _ in range(num_leading)]
        row = spec.fixed if spec.leader is None else {**spec.fixed, **spec.later}
        mixers = leading + [make(spec.layer, row, asked) for _ in range(depth - len(leading))]
        rates: Any = calculate_drop_path_rates(drop_path_rate, depth)
        blocks = [
            MixerBlock(m, mlp_ratio=mlp_ratio, drop=drop_rate, drop_path=rate, norm=norm, **factory)
            for m, rate in zip(mixers, rates, strict=True)
        ]
        super().__init__(stem, blocks, num_classes=num_classes, global_pool=global_pool, drop_rate=drop_rate, **factory)
        self.mixer_name = mixer
