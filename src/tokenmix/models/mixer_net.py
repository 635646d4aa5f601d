"""The network of equal-budget comparisons: an isotropic network with any mixer of the table."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Literal

import torch

from tokenmix.errors import UserError
from tokenmix.layers.base import Device, Factory
from tokenmix.layers.table import build_stack, get_spec
from tokenmix.models.interface import Size, pair
from tokenmix.models.isotropic import IsotropicNet
from tokenmix.models.stems import ConvStem, PatchStem
from tokenmix.ops.checks import check_choice
from tokenmix.registry import Arguments


class MixerNet(IsotropicNet):
    """Patch embedding, positions, blocks that differ only in their mixer, average pooling, a linear head.

    Args:
        img_size, in_chans, num_classes, drop_path_rate: see `Classifier`; sides are multiples of the patch size.
        mixer: a name of `tokenmix.list_mixers()`.
        mixer_kwargs: arguments of the mixer's constructor.
        mixers: for hybrids, the mixer of each block by name, in order, instead of `mixer`. `mixer_kwargs` then maps
            mixer names to arguments: `{"external": {"num_slots": 32}}`.
        patch_size: side of a patch (default: `default_patch`).
        stem: `"patch"` for a linear patch embedding, `"conv"` for convolutions down to the grid of patches.
        global_pool: `"avg"`, or `""` for the tokens themselves.
        embed_dim: width D of the tokens.
        depth: number of blocks.
        num_heads: heads of mixers with heads.
        positions: `"learned"`, added to the tokens, or `"none"`.
        num_leading: with less-attention, the leading blocks with vanilla attention.
        mlp_ratio: hidden width of the MLP over D.
        norm: `"layer"`, or `"batch"` for BatchNorm in the blocks.
        drop_rate: dropout before the head and after each MLP.

    Raises:
        UserError: a mixer cannot be built, or `mixers` does not have one entry per block.
    """

    def __init__(
        self,
        *,
        mixer: str = "self",
        mixer_kwargs: Arguments | None = None,
        mixers: Sequence[str] | None = None,
        img_size: Size = 32,
        patch_size: int | None = None,
        stem: Literal["patch", "conv"] = "patch",
        in_chans: int = 3,
        num_classes: int = 10,
        global_pool: Literal["avg", ""] = "avg",
        embed_dim: int = 64,
        depth: int = 4,
        num_heads: int = 4,
        positions: Literal["learned", "none"] = "learned",
        num_leading: int = 1,
        mlp_ratio: float = 2.0,
        norm: Literal["layer", "batch"] = "layer",
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        factory: Factory = {"device": device, "dtype": dtype}
        patch_size = patch_size or self.default_patch(pair(img_size))
        check_choice("stem", stem, ("conv", "patch"))
        check_choice("positions", positions, ("learned", "none"))
        kind = ConvStem if stem == "conv" else PatchStem
        tokens = kind(embed_dim, img_size=img_size, patch_size=patch_size, in_chans=in_chans, **factory)
        runs = [(mixer, depth, mixer_kwargs)] if mixers is None else _runs(mixers, depth, mixer_kwargs or {})
        layers = [
            layer
            for name, length, kwargs in runs
            for layer in build_stack(
                name,
                get_spec(name),
                embed_dim,
                tokens.grid_size,
                length,
                num_leading=num_leading,
                mixer_kwargs=kwargs,
                num_heads=num_heads,
                **factory,
            )
        ]
        super().__init__(
            tokens,
            layers,
            depth,
            num_classes=num_classes,
            mlp_ratio=mlp_ratio,
            norm=norm,
            positions=positions,
            global_pool=global_pool,
            drop_rate=drop_rate,
            proj_drop_rate=drop_rate,
            drop_path_rate=drop_path_rate,
            **factory,
        )
        self.mixer_name = mixer if mixers is None else ", ".join(f"{length} x {name}" for name, length, _ in runs)

    @staticmethod
    def default_patch(img_size: tuple[int, int]) -> int:
        """The smallest patch from 4 px (2 px for images under 24 px) with 16 to 256 whole tokens; else 4 or 2."""
        (height, width), least = img_size, 4 if min(img_size) >= 24 else 2
        whole = (p for p in range(least, min(img_size) + 1) if height % p == 0 == width % p)
        return next((p for p in whole if 16 * p * p <= height * width <= 256 * p * p), least)


def _runs(mixers: Sequence[str], depth: int, mixer_kwargs: Arguments) -> list[tuple[str, int, Arguments]]:
    """Consecutive blocks of a hybrid with the same mixer: name, number of blocks, arguments."""
    if isinstance(mixers, str) or len(mixers) != depth:
        raise UserError(f"mixers has one name for each of the {depth} blocks, got {mixers!r}")
    for name, kwargs in mixer_kwargs.items():
        if name not in mixers or not isinstance(kwargs, Mapping):
            raise UserError(
                f"with mixers, mixer_kwargs has arguments by the name of a mixer, for example "
                f"{{{mixers[0]!r}: {{...}}}}, got {name}={kwargs!r}"
            )
    return [(name, len(list(group)), mixer_kwargs.get(name, {})) for name, group in groupby(mixers)]
