"""EANet for classification: a ResNet with the external-attention block after its last stage.

Paper: Guo, Liu, Mu, Hu, "Beyond Self-attention: External Attention using Two Linear Layers for Visual Tasks", 2021,
arXiv:2105.02358.
"""

from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.fx
from torch import Tensor, nn

from tokenmix.errors import UserError, unknown_name
from tokenmix.layers.counting import count_macs, on_meta
from tokenmix.layers.external import ExternalAttention2d
from tokenmix.layers.memory import Tie
from tokenmix.models.isotropic import BlockMap, mix
from tokenmix.models.maps import OnMaps
from tokenmix.models.pretrained import timm_resnet
from tokenmix.models.stems import pair
from tokenmix.models.timm_interface import Classifier, record_input_size, take_indices

torch.fx.wrap("mix")


class EABlock(nn.Module):
    """The EANet block after the last stage: maps (B, C, H, W) to maps, its residual inside."""

    def __init__(self, mixer: ExternalAttention2d) -> None:
        super().__init__()
        self.mixer = mixer

    def forward(self, x: Tensor) -> Tensor:
        """Mix a map (B, C, H, W)."""
        return mix(self.mixer, x)[0]


class EANet(OnMaps, Classifier):
    """A ResNet of timm's, the EANet block on its last map, mean over the map, a linear head.

        x = resnet(images),   y = relu(x + BN(conv2(Norm(F M_k^T) M_v))),   F = conv1(x),   logits = head(mean(y))

    The paper adds the block after the last stage of a ResNet for detection, and after a 3 x 3 convolution to 512
    channels for segmentation; it prints no ResNet for classification. Here it is applied to the last stage itself: at
    2048 channels it has 8.7 M weights, where that convolution and a narrow block would have 10.0 M, and the width of
    the features and the head stay a ResNet's. The BatchNorm scale of the block starts at 0, so it starts as the
    identity, and weights of a plain ResNet keep their outputs.

    Args:
        backbone: name of a ResNet of timm's.
        backbone_kwargs: arguments of its constructor.
        stem: `"large"`, that of the ResNet, which quarters the sides at once; `"small"`, one 3 x 3 convolution that
            keeps them, for images of 28 to 64 px.
        num_slots: memory slots.
        tie: how the two memories are tied, see `ExternalAttention2d`.
        pretrained_backbone: start from timm's weights of the backbone.
        img_size: side of the images, or (height, width), for which `macs` counts; any size runs.
        in_chans: channels of the image.
        num_classes: width of the head; 0 for none.
        global_pool: `"avg"`, or `""` for the map itself.
        drop_rate: dropout before the head.
        drop_path_rate: stochastic depth of the backbone's last block.

    Shape:
        images (B, in_chans, H, W) to logits (B, num_classes).

    Raises:
        UserError: a backbone that is not a timm ResNet, or backbone weights that cannot be fetched.
    """

    def __init__(
        self,
        *,
        backbone: str = "resnet50",
        backbone_kwargs: Mapping[str, Any] | None = None,
        stem: Literal["large", "small"] = "large",
        num_slots: int = 64,
        tie: Tie = "none",
        pretrained_backbone: bool = False,
        img_size: int | tuple[int, int] = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: Literal["avg", ""] = "avg",
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if stem not in ("large", "small"):
            raise unknown_name("stem", stem, ("large", "small"))
        _check_unpooled(global_pool, num_classes)
        factory = {"device": device, "dtype": dtype}
        given = {
            "in_chans": in_chans,
            "num_classes": num_classes,
            "global_pool": self.checked_pool(global_pool),
            "drop_rate": drop_rate,
            "drop_path_rate": drop_path_rate,
            **(backbone_kwargs or {}),
            **factory,
        }
        self.backbone = timm_resnet(backbone, pretrained=pretrained_backbone, **given)
        if stem == "small":
            _shrink_stem(self.backbone, in_chans, factory)
        self.in_chans, self.num_classes, self.global_pool = in_chans, num_classes, global_pool
        self.num_features = self.head_hidden_size = self.embed_dim = self.backbone.num_features
        self.feature_info = [{**entry, "module": f"backbone.{entry['module']}"} for entry in self.backbone.feature_info]
        self.feature_info[-1]["module"] = "blocks.0"
        mixer = ExternalAttention2d(self.num_features, num_slots=num_slots, tie=tie, **factory)
        nn.init.zeros_(mixer.norm.weight)
        self.blocks = nn.ModuleList([EABlock(mixer)])
        self.mixer_name = "external-2d"
        self.img_size = pair(img_size)

    def forward_features(self, images: Tensor) -> Tensor:
        """Images to the map after the block (B, D, h, w)."""
        x = self.backbone.forward_features(images)
        for block in self.blocks:
            x = block(x)
        return x

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """A map (B, D, h, w) to pooled features, and unless `pre_logits` to logits."""
        return self.backbone.forward_head(x, pre_logits=pre_logits)

    def forward_intermediates(
        self,
        images: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: Literal["NCHW", "NLC"] = "NCHW",
        intermediates_only: bool = False,
    ) -> Any:
        """The maps after the stem and the stages, the last one after the block; arguments as in `IsotropicNet`."""
        if norm:
            raise UserError("EANet has no final norm; call with norm=False")
        if output_fmt not in ("NCHW", "NLC"):
            raise UserError(f"output_fmt must be NCHW or NLC, got {output_fmt!r}")
        take, last = take_indices(len(self.feature_info), indices)
        x, maps = self.backbone.forward_intermediates(images, indices=take, stop_early=stop_early)
        if last == len(self.feature_info) - 1 or not stop_early:
            for block in self.blocks:
                x = block(x)
        if last == len(self.feature_info) - 1:
            maps[-1] = x
        if output_fmt == "NLC":
            maps = [y.flatten(2).transpose(1, 2) for y in maps]
        return maps if intermediates_only else (x, maps)

    def prune_intermediate_layers(
        self, indices: int | list[int] | None = None, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop the stages after the last one chosen, and the head if asked; the indices, none negative."""
        take, last = take_indices(len(self.feature_info), indices)
        self.backbone.prune_intermediate_layers(take, prune_norm=prune_norm, prune_head=False)
        if last < len(self.feature_info) - 1:
            self.blocks = nn.ModuleList()
        if prune_head:
            self.reset_classifier(0, "")
        return take

    @torch.no_grad()
    def attention_maps(self, images: Tensor) -> list[BlockMap]:
        """The map (B, 1, N, S) that the block used on these images."""
        x, maps = self.backbone.forward_features(images), []
        for i, block in enumerate(self.blocks):
            mixer: ExternalAttention2d = block.mixer  # type: ignore[assignment]
            grid = (x.shape[2], x.shape[3])
            maps.append(BlockMap(f"blocks.{i}.mixer", mixer.map_kind(), mixer.attention_map(x), grid))
            x = block(x)
        return maps

    def macs(self) -> int:
        """Multiply-adds of one image: the ResNet's counted on the meta device, the block's from its equation."""
        _, backbone = count_macs(on_meta(self.backbone), torch.empty(1, self.in_chans, *self.img_size, device="meta"))
        blocks = sum(block.mixer.macs(self.num_tokens) for block in self.blocks)  # type: ignore[operator, union-attr]
        return backbone + blocks

    def set_input_size(self, img_size: int | tuple[int, int]) -> None:
        """Set the image size for which costs are counted; nothing is learned over the positions of a map."""
        self.img_size = pair(img_size)
        record_input_size(self, self.img_size)

    def get_classifier(self) -> nn.Module:
        """The head."""
        return self.backbone.fc

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A new head, 0 classes for none; and if given, another pooling."""
        pool = self.global_pool if global_pool is None else self.checked_pool(global_pool)
        _check_unpooled(pool, num_classes)
        self.global_pool = pool
        like = next(self.parameters())
        self.backbone.reset_classifier(num_classes, self.global_pool)
        self.backbone.fc.to(like)
        self.num_classes = num_classes

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the backbone's stages in the backward pass instead of keeping what they made."""
        self.backbone.set_grad_checkpointing(enable)

    def no_weight_decay(self) -> set[str]:
        """Parameters without weight decay, next to those of one axis."""
        return set()

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Groups of parameters by depth: stem, the backbone's blocks (its stages if `coarse`), the EANet block."""
        stages = r"^backbone\.layer(\d+)" if coarse else r"^backbone\.layer(\d+)\.(\d+)"
        return {"stem": r"^backbone\.(?:conv1|bn1)", "stages": stages, "blocks": r"^blocks\.(\d+)"}


def _check_unpooled(pool: str, num_classes: int) -> None:
    if not pool and num_classes:
        raise UserError(
            f"global_pool='' leaves a map, which the linear head of {num_classes} classes cannot take; "
            "give num_classes=0 as well, or global_pool='avg'"
        )


def _shrink_stem(backbone: Any, in_chans: int, factory: Mapping[str, Any]) -> None:
    """Keep the sides in the stem, and say so in `feature_info`."""
    width = backbone.bn1.num_features
    backbone.conv1 = nn.Conv2d(in_chans, width, 3, padding=1, bias=False, **factory)
    nn.init.kaiming_normal_(backbone.conv1.weight, mode="fan_out", nonlinearity="relu")
    backbone.maxpool = nn.Identity()
    for i, entry in enumerate(backbone.feature_info):
        entry["reduction"] //= 2 if i == 0 else 4
