"""EANet: a ResNet with the external-attention block, or a block with another mixer, after its last stage.

Reference: Guo, Liu, Mu, Hu, "Beyond Self-attention: External Attention using Two Linear Layers for Visual Tasks", 2021,
arXiv:2105.02358.
"""

import inspect
from dataclasses import replace
from typing import Literal, Unpack

import torch
import torch.fx
import torch.nn.functional as F
from timm.models._input import update_model_input_size
from torch import Tensor, nn

from tokenmix.errors import UserError
from tokenmix.layers.base import (
    Capabilities,
    Device,
    Factory,
    Mixer,
    count_macs,
    count_parameters,
    on_meta,
    zero_masked,
)
from tokenmix.layers.external import ExternalAttention2d, Tie
from tokenmix.layers.self_attention import SelfAttention
from tokenmix.layers.table import build_mixer, get_spec
from tokenmix.models.interface import BlockMap, Classifier, FeatureMaps, Intermediates, Size, pair, take_indices
from tokenmix.models.isotropic import MixerCost, mix
from tokenmix.models.registry import timm_resnet
from tokenmix.ops.checks import check_choice
from tokenmix.registry import Arguments

torch.fx.wrap("mix")


class EABlock(nn.Module):
    """The EANet block after the last stage, maps (B, C, H, W) to maps; a node of torch.fx by its class name."""

    def __init__(self, mixer: ExternalAttention2d) -> None:
        super().__init__()
        self.mixer = mixer

    def forward(self, x: Tensor) -> Tensor:
        return mix(self.mixer, x)[0]


class EANet(FeatureMaps, Classifier):
    """A timm ResNet, the EANet block on its last map, global average pooling and a linear head.

        x = resnet(images),   y = relu(x + BN(conv2(Norm(F M_k^T) M_v))),   F = conv1(x),   logits = head(mean(y))

    For detection, the paper adds the block after the last stage of a ResNet; for segmentation, after a 3 x 3
    convolution to 512 channels. The paper has no ResNet for classification. Here the block follows the last stage
    directly. With 2048 channels it has 8.7 M weights; the convolution and a narrow block would have 10.0 M. The
    features and the head keep the widths of the ResNet.

    The BatchNorm scale of the block starts at 0. The block thus starts as the identity, and weights of a plain ResNet
    keep their outputs.

    Args:
        backbone: name of a timm ResNet.
        backbone_kwargs: arguments of its constructor.
        stem: `"large"`, the ResNet's own stem, which quarters the sides; `"small"`, one 3 x 3 convolution that keeps
            the sides, for images of 28 to 64 px.
        num_slots: memory slots.
        tie: relation of the two memories, see `ExternalAttention2d`.
        pretrained_backbone: load timm's weights of the backbone.
        img_size: side of the images, or (height, width), for `macs`; any size runs.
        in_chans, num_classes, drop_rate, drop_path_rate: see `Classifier`.
        global_pool: `"avg"`, or `""` for the map itself.

    Shape: images (B, in_chans, H, W) to logits (B, num_classes).

    Raises:
        UserError: the backbone is not a timm ResNet, or its weights cannot be loaded.
    """

    def __init__(
        self,
        *,
        backbone: str = "resnet50",
        backbone_kwargs: Arguments | None = None,
        stem: Literal["large", "small"] = "large",
        num_slots: int = 64,
        tie: Tie = "none",
        pretrained_backbone: bool = False,
        img_size: Size = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: Literal["avg", ""] = "avg",
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_choice("stem", stem, ("large", "small"))
        _check_unpooled(global_pool, num_classes)
        factory: Factory = {"device": device, "dtype": dtype}
        given = {
            "pretrained": pretrained_backbone,
            "in_chans": in_chans,
            "num_classes": num_classes,
            "global_pool": self.checked_pool(global_pool),
            "drop_rate": drop_rate,
            "drop_path_rate": drop_path_rate,
            **(backbone_kwargs or {}),
            **factory,
        }
        self.backbone = timm_resnet(backbone, given)
        if stem == "small":
            # One convolution that keeps the sides; `feature_info` is updated.
            conv = nn.Conv2d(in_chans, self.backbone.bn1.num_features, 3, padding=1, bias=False, **factory)
            nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
            self.backbone.conv1, self.backbone.maxpool = conv, nn.Identity()
            for i, entry in enumerate(self.backbone.feature_info):
                entry["reduction"] //= 2 if i == 0 else 4
        self.in_chans, self.num_classes, self.global_pool = in_chans, num_classes, global_pool
        self.num_features = self.head_hidden_size = self.embed_dim = self.backbone.num_features
        self.feature_info = [{**entry, "module": f"backbone.{entry['module']}"} for entry in self.backbone.feature_info]
        self.feature_info[-1]["module"] = "context"
        block = ExternalAttention2d(self.num_features, num_slots=num_slots, tie=tie, **factory)
        nn.init.zeros_(block.norm.weight)
        self.context: nn.Module = EABlock(block)
        self.mixer_name = "external-2d"
        self.img_size = pair(img_size)

    def forward_features(self, images: Tensor) -> Tensor:
        return self.context(self.backbone.forward_features(images))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        return self.backbone.forward_head(x, pre_logits=pre_logits)

    def forward_intermediates(
        self,
        images: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: Literal["NCHW", "NLC"] = "NCHW",
        intermediates_only: bool = False,
    ) -> Intermediates:
        """The maps after the stem and the stages, the last one after the block; arguments as in `IsotropicNet`."""
        if norm:
            raise UserError("EANet has no final norm; call with norm=False")
        take, last = take_indices(len(self.feature_info), indices, output_fmt)
        x, maps = self.backbone.forward_intermediates(images, indices=take, stop_early=stop_early)
        whole = last == len(self.feature_info) - 1
        x = self.context(x) if whole or not stop_early else x
        if whole:
            maps[-1] = x
        if output_fmt == "NLC":
            maps = [y.flatten(2).transpose(1, 2) for y in maps]
        return maps if intermediates_only else (x, maps)

    def prune_intermediate_layers(
        self, indices: int | list[int] | None = None, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        take, last = take_indices(len(self.feature_info), indices)
        self.backbone.prune_intermediate_layers(take, prune_norm=prune_norm, prune_head=False)
        if last < len(self.feature_info) - 1:
            self.context = nn.Identity()
        if prune_head:
            self.reset_classifier(0, "")
        return take

    @torch.no_grad()
    def attention_maps(self, images: Tensor) -> list[BlockMap]:
        if not isinstance(self.context, EABlock):
            return []
        x = self.backbone.forward_features(images)
        return [BlockMap("context.mixer", "slots", self.context.mixer.attention_map(x), (x.shape[2], x.shape[3]))]

    def macs(self) -> int:
        _, backbone = count_macs(on_meta(self.backbone), torch.empty(1, self.in_chans, *self.img_size, device="meta"))
        return backbone + sum(row.mixer_macs for row in self.cost_table())

    def cost_table(self) -> list[MixerCost]:
        if not isinstance(self.context, EABlock):
            return []
        mixer = self.context.mixer
        return [MixerCost(0, type(mixer).__name__, count_parameters(mixer), mixer.macs(self.num_tokens))]

    def set_input_size(self, img_size: Size) -> None:
        """Set the image size for the cost functions; no weights depend on it."""
        self.img_size = pair(img_size)
        update_model_input_size(self, self.img_size)

    def get_classifier(self) -> nn.Module:
        return self.backbone.fc

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        pool = self.global_pool if global_pool is None else self.checked_pool(global_pool)
        _check_unpooled(pool, num_classes)
        self.global_pool = pool
        like = next(self.parameters())
        self.backbone.reset_classifier(num_classes, self.global_pool)
        self.backbone.fc.to(like)
        self.num_classes = num_classes

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.backbone.set_grad_checkpointing(enable)

    def group_matcher(self, coarse: bool = False) -> dict[str, object]:
        """Groups of parameters by depth: stem, the backbone's blocks (its stages if `coarse`), the EANet block."""
        stages = r"^backbone\.layer(\d+)" if coarse else r"^backbone\.layer(\d+)\.(\d+)"
        return {"stem": r"^backbone\.(?:conv1|bn1)", "stages": stages, "blocks": r"^context"}


def _check_unpooled(pool: str, num_classes: int) -> None:
    if not pool and num_classes:
        raise UserError(
            f"global_pool='' leaves a map, which the linear head of {num_classes} classes cannot take; "
            "give num_classes=0 as well, or global_pool='avg'"
        )


class MixerBlock2d(Mixer):
    """The EANet block with any mixer in place of external attention.

        out = relu(X + BN(conv(mixer(X))))   1 x 1, without bias

    The mixer receives the pixels as tokens, row by row, or the map itself if it takes maps. The mixer `identity` gives
    the block without mixing. Residual, norm and ReLU belong to the block, so variants differ only in their mixing.

    A mixer with a learned matrix over tokens does not fit, because map sizes vary. Without the convolution, one-head
    self-attention has four D x D projections, as the "self-attention" row in Guo et al., arXiv 2105.02358.

    Shape: x (B, dim, H, W); mask (B, H * W) bool.
    """

    def __init__(self, mixer: Mixer, *, conv: bool = True, **factory: Unpack[Factory]) -> None:
        super().__init__()
        self.dim, self.mixer = mixer.dim, mixer
        self.conv = nn.Conv2d(self.dim, self.dim, 1, bias=False, **factory) if conv else nn.Identity()
        self.norm = nn.BatchNorm2d(self.dim, **factory)

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        return replace(self.mixer.capabilities, layout="2d", independent=False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x, mask = self.checked(x, mask, weight=self.norm.weight)
        mixed = self.mixer(self._given(x), mask)
        if self.mixer.capabilities.layout != "2d":
            mixed = mixed.transpose(1, 2).unflatten(2, x.shape[2:])
        return zero_masked(F.relu(x + self.norm(self.conv(mixed))), mask)

    def attention_map(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x, mask = self.checked(x, mask, weight=self.norm.weight)
        return self.mixer.attention_map(self._given(x), mask)

    def macs(self, num_tokens: int) -> int:
        conv = num_tokens * self.dim**2 if isinstance(self.conv, nn.Conv2d) else 0
        return self.mixer.macs(num_tokens) + conv

    def _given(self, x: Tensor) -> Tensor:
        return x if self.mixer.capabilities.layout == "2d" else x.flatten(2).transpose(1, 2)


def make_context(
    name: str, dim: int, options: Arguments, factory: Factory, mixer_kwargs: Arguments | None = None
) -> nn.Module:
    """The block of that name: external, self, none, or a mixer of the table; options of None select the defaults."""
    given = {key: value for key, value in options.items() if value is not None}
    if given and name != "external":
        key, value = next(iter(given.items()))
        raise UserError(f"{key}={value!r} only applies to mixer='external', and the mixer is {name!r}; leave it out")
    label, asked = f"mixer {name!r}", mixer_kwargs or {}
    if name == "none":
        if asked:
            raise UserError("mixer_kwargs is for a mixer, and the mixer is 'none'; leave it out")
        return nn.Identity()
    if name == "external":
        return build_mixer(ExternalAttention2d, label, dim, None, {**given, **asked, **factory})
    if name == "self":
        one = build_mixer(SelfAttention, label, dim, None, {"num_heads": 1, **asked, **factory})
        return MixerBlock2d(one, conv=False, **factory)
    spec = get_spec(name)
    taken = inspect.signature(spec.layer).parameters
    if "num_tokens" in taken:
        raise UserError(
            f"mixer {name!r} learns a matrix over tokens, and these images may have any size; give a mixer without one"
        )
    known = {key: value for key, value in factory.items() if key in taken}
    return MixerBlock2d(build_mixer(spec.layer, label, dim, None, {**spec.fixed, **known, **asked}), **factory)
