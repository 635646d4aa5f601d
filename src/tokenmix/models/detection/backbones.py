"""Backbones of a detector's pyramid: a ResNet with an attention block after its last stage, or a LaViT."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, get_args

import torch
from timm.layers import GroupNorm
from timm.layers.norm import LayerNorm2d
from timm.layers.norm_act import freeze_batch_norm_2d
from torch import Tensor, nn

from tokenmix.errors import UserError
from tokenmix.layers.base import Device, Mixer, count_macs, on_meta
from tokenmix.layers.external import Tie
from tokenmix.models.eanet import make_context
from tokenmix.models.interface import BlockMap
from tokenmix.models.lavit import LaViT
from tokenmix.models.registry import create_model, timm_resnet
from tokenmix.ops.checks import check_choice
from tokenmix.registry import Arguments, list_models

Norm = Literal["batch", "frozen", "group"]
Size = tuple[int, int]


class ResNetBackbone(nn.Module):
    """A timm ResNet with the EANet block, or its self-attention variant, on its last map.

        maps = resnet(images),   last = relu(last + Norm(conv2(A V)))

    The paper adds the block after the last stage of a ResNet-50 for COCO and does not describe its initialisation. Here
    the scale of the norm starts at 0, so the block starts as the identity.

    Args:
        backbone: name of a timm ResNet.
        backbone_kwargs: arguments of its constructor.
        pretrained_backbone: load timm's weights.
        levels: which of the five maps to return: 0 the stem, 1 to 4 the stages; must include the last stage.
        mixer: `"external"`, `"self"`, `"none"`, or another of the table.
        num_slots, tie: as in `ExternalAttention2d`; None for its defaults.
        norm: `"batch"`; `"frozen"`, for the backbone only, after loading its weights; or `"group"`, also in the block,
            for training from scratch with small batches.
        frozen_stages: number of frozen parts: 1 the stem, 2 also the first stage, ...

    Raises:
        UserError: the backbone is not a timm ResNet, an option is unknown, or the weights cannot be loaded.

    Reference: Guo et al., arXiv 2105.02358.
    """

    def __init__(
        self,
        *,
        backbone: str = "resnet50",
        backbone_kwargs: Arguments | None = None,
        pretrained_backbone: bool = False,
        levels: Sequence[int] = (1, 2, 3, 4),
        mixer: str = "external",
        num_slots: int | None = None,
        tie: Tie | None = None,
        norm: Norm = "batch",
        frozen_stages: int = 0,
        device: Device = None,
    ) -> None:
        super().__init__()
        check_choice("norm", norm, get_args(Norm))
        if not 0 <= frozen_stages <= 5:
            raise UserError(f"frozen_stages must be 0 to 5, got {frozen_stages}")
        group = partial(GroupNorm, num_groups=8)
        given = {**(backbone_kwargs or {}), **({"norm_layer": group} if norm == "group" else {})}
        given |= {"features_only": True, "out_indices": tuple(levels), "device": device}
        net = timm_resnet(backbone, {**given, "pretrained": pretrained_backbone})
        if norm == "frozen":
            with torch.device(device or torch.get_default_device()):
                net = freeze_batch_norm_2d(net)
        self.net: Any = net
        for name, parameter in self.net.named_parameters():
            stage = int(name[5]) if name.startswith("layer") else 0
            parameter.requires_grad_(stage >= frozen_stages)
        self.widths, self.reductions = self.net.feature_info.channels(), self.net.feature_info.reduction()
        self.mixer_name = {"external": "external-2d", "self": "self-2d"}.get(mixer, mixer)
        self.block = make_context(mixer, self.widths[-1], {"num_slots": num_slots, "tie": tie}, {"device": device})
        if isinstance(self.block, Mixer):
            if norm == "group":
                self.block.norm = group(self.widths[-1]).to(device)
            nn.init.zeros_(self.block.norm.weight)  # type: ignore[union-attr, arg-type]

    def forward(self, images: Tensor) -> list[Tensor]:
        *maps, last = self.net(images)
        return [*maps, self.block(last)]

    @torch.no_grad()
    def attention_maps(self, images: Tensor) -> list[BlockMap]:
        """The map of the block: (B, 1, N, S) or (B, 1, N, N)."""
        if not isinstance(self.block, Mixer):
            return []
        last = self.net(images)[-1]
        return [BlockMap("block", self.block.map_kind(), self.block.attention_map(last), tuple(last.shape[2:]))]

    def macs(self, size: Size) -> int:
        (*_, last), counted = count_macs(on_meta(self.net), torch.empty(1, 3, *size, device="meta"))
        block = self.block.macs(last.shape[2] * last.shape[3]) if isinstance(self.block, Mixer) else 0
        return counted + block

    def warnings(self) -> list[str]:
        return []

    def no_weight_decay(self) -> set[str]:
        return set()


class LaViTBackbone(nn.Module):
    """A LaViT without its head, with a norm after each returned stage.

    Images must have the size `img_size`, because Theta and Psi are matrices over grid positions. `set_input_size`
    interpolates both over the query and key grids, scaled by the ratio of tokens. `levels` are the stages to return.
    """

    def __init__(
        self,
        *,
        backbone: str = "lavit_tiny",
        backbone_kwargs: Arguments | None = None,
        img_size: Size = (512, 512),
        levels: Sequence[int] = (0, 1, 2, 3),
        device: Device = None,
    ) -> None:
        super().__init__()
        if backbone not in list_models("lavit*"):
            raise UserError(f"backbone {backbone!r} is not a LaViT; give one of {', '.join(list_models('lavit*'))}")
        net = create_model(backbone, num_classes=0, img_size=img_size, **(backbone_kwargs or {}), device=device)
        assert isinstance(net, LaViT)
        # Non-negative indices, because pruning changes the meaning of -1.
        self.net, self.levels = net, net.prune_intermediate_layers(list(levels), prune_norm=True)
        self.widths = [net.feature_info[i]["num_chs"] for i in self.levels]
        self.reductions = [net.feature_info[i]["reduction"] for i in self.levels]
        self.norms = nn.ModuleList(LayerNorm2d(width, device=device) for width in self.widths)
        self.mixer_name = net.mixer_name

    def forward(self, images: Tensor) -> list[Tensor]:
        maps = self.net.forward_intermediates(images, indices=self.levels, intermediates_only=True)
        return [norm(x) for norm, x in zip(self.norms, maps, strict=True)]

    def attention_maps(self, images: Tensor) -> list[BlockMap]:
        return self.net.attention_maps(images)

    def macs(self, size: Size) -> int:
        return self.net.macs()

    def set_input_size(self, size: Size) -> None:
        self.net.set_input_size(size)

    def warnings(self) -> list[str]:
        return self.net.warnings()

    def no_weight_decay(self) -> set[str]:
        return {f"net.{name}" for name in self.net.no_weight_decay()}
