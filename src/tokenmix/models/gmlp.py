"""gMLP and aMLP for images: blocks with one gated branch, no positional embeddings, no class token.

Reference: Liu, Dai, So, Le, "Pay Attention to MLPs", 2021, arXiv:2105.08050.
"""

from typing import Literal

import torch
from timm.layers.weight_init import lecun_normal_
from torch import nn

from tokenmix.layers.base import Device, Factory
from tokenmix.layers.gating import GatedMLP
from tokenmix.models.interface import Size
from tokenmix.models.isotropic import IsotropicNet
from tokenmix.models.stems import PatchStem
from tokenmix.ops.checks import check_choice


class GMLP(IsotropicNet):
    """gMLP, and with `attention_dim` aMLP.

    Args:
        img_size, in_chans, num_classes, drop_rate, drop_path_rate: see `Classifier`; sides are multiples of patch_size.
        patch_size: side of a patch.
        global_pool: `"avg"`, or `""` for the tokens themselves.
        embed_dim: width D of the tokens.
        depth: number of blocks.
        expansion: d_ffn / D, the width between U and the gate.
        attention_dim: head width of tiny attention; 0 for none.
        gate: `"dense"` as in the paper's vision models, or `"toeplitz"`.
        init: `"timm"`, because the paper does not describe one; `"torch"`, the layers' own, which learns faster at
            first.
        proj_drop_rate: dropout in the branches.
    """

    def __init__(
        self,
        *,
        img_size: Size = 224,
        patch_size: int = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: Literal["avg", ""] = "avg",
        embed_dim: int = 256,
        depth: int = 30,
        expansion: float = 6.0,
        attention_dim: int = 0,
        gate: Literal["dense", "toeplitz"] = "dense",
        init: Literal["timm", "torch"] = "timm",
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_choice("init", init, ("timm", "torch"))
        factory: Factory = {"device": device, "dtype": dtype}
        stem = PatchStem(embed_dim, img_size=img_size, patch_size=patch_size, in_chans=in_chans, **factory)
        branches = (
            GatedMLP(
                embed_dim,
                stem.grid_size[0] * stem.grid_size[1],
                expansion=expansion,
                gate=gate,
                attention_dim=attention_dim,
                dropout=proj_drop_rate,
                **factory,
            )
            for _ in range(depth)
        )
        super().__init__(
            stem,
            branches,
            depth,
            num_classes=num_classes,
            mlp_ratio=0.0,
            positions="none",
            global_pool=global_pool,
            drop_rate=drop_rate,
            drop_path_rate=drop_path_rate,
            norm_eps=1e-6,
            **factory,
        )
        self.mixer_name = "gating-attention" if attention_dim else "gating"
        if init == "timm":
            self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialise as timm: Xavier for branches, LeCun for patches, 0 for the head; gates as in `GatedMLP`."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.normal_(module.bias, std=1e-6)
            elif isinstance(module, nn.Conv2d):
                lecun_normal_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for block in self.blocks:
            block.mixer.reset_gate()  # type: ignore[operator, union-attr]
        if isinstance(self.head, nn.Linear):
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)
