"""Base of segmenters: backbone, head, and one place for an attention block in between."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tokenmix.errors import UserError, unknown_name
from tokenmix.layers.base import Mixer, count_parameters
from tokenmix.layers.counting import count_macs, on_meta
from tokenmix.models.isotropic import BlockMap
from tokenmix.models.maps import OnMaps, PartCost
from tokenmix.models.stems import pair

Upsampling = Literal["corners", "pixels"]


class Segmenter(OnMaps, nn.Module, ABC):
    """Images (B, C, H, W) to logits (B, classes, H, W).

    A family writes `decode`: maps of the backbone to logits on a coarse grid, through `context` where it has one.

    Args:
        backbone: module of maps, see `make_backbone`.
        context: the attention block, of `make_context`.
        mixer: its name.
        head_width: channels before the classifier.
        num_classes: classes of a pixel.
        drop_rate: dropout of whole channels before the classifier.
        img_size: size for which `macs` counts; that of the backbone if it takes no other.
        in_chans: channels of the image.
        upsampling: bilinear from the coarse grid to the pixels: `"corners"` lays the outer centres on each other, as
            the released network does and as suits sides of 8 k + 1; `"pixels"` lays the borders on each other.
    """

    def __init__(
        self,
        backbone: Any,
        context: nn.Module,
        *,
        mixer: str,
        head_width: int,
        num_classes: int,
        drop_rate: float,
        img_size: int | tuple[int, int],
        in_chans: int,
        upsampling: Upsampling,
        factory: Mapping[str, Any],
    ) -> None:
        super().__init__()
        if upsampling not in get_args(Upsampling):
            raise unknown_name("upsampling", upsampling, get_args(Upsampling))
        self.backbone, self.context = backbone, context
        self.classifier = nn.Conv2d(head_width, num_classes, 1, **factory)
        self.drop = nn.Dropout2d(drop_rate)
        self.mixer_name, self.img_size, self.in_chans = mixer, pair(img_size), in_chans
        self.num_classes, self.upsampling = num_classes, upsampling
        self.feature_info = list(backbone.feature_info.get_dicts())

    @property
    def own(self) -> Any:
        """The backbone as a model of this library, which takes only one image size; None if it is one of timm's."""
        model = getattr(self.backbone, "model", None)
        return model if hasattr(model, "set_input_size") and hasattr(model, "macs") else None

    @property
    def fixed_size(self) -> bool:
        """Whether images must be of `img_size`."""
        return self.own is not None

    @abstractmethod
    def before_context(self, maps: list[Tensor]) -> Tensor:
        """Maps of the backbone to the map that the block sees."""

    @abstractmethod
    def decode(self, maps: list[Tensor]) -> Tensor:
        """Maps of the backbone to logits on a coarse grid."""

    def forward_features(self, images: Tensor) -> list[Tensor]:
        """The maps of the backbone."""
        if images.dim() != 4 or images.shape[1] != self.in_chans:
            raise UserError(f"a segmenter takes images (B, {self.in_chans}, height, width), got {tuple(images.shape)}")
        return self.backbone(images)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of each pixel, in the type of the weights."""
        logits = self.decode(self.forward_features(images))
        corners = self.upsampling == "corners"
        return F.interpolate(logits, size=images.shape[2:], mode="bilinear", align_corners=corners)

    @torch.no_grad()
    def attention_maps(self, images: Tensor) -> list[BlockMap]:
        """The maps of our backbone's blocks, then that of the block after it."""
        found = [] if self.own is None else list(self.own.attention_maps(images))
        if isinstance(self.context, Mixer):
            x = self.before_context(self.forward_features(images))
            kind, grid = self.context.map_kind(), (x.shape[2], x.shape[3])
            found.append(BlockMap("context", kind, self.context.attention_map(x), grid))
        return found

    def macs(self) -> int:
        """Multiply-adds of one image of `img_size`: convolutions counted on the meta device, mixers by equation."""
        return sum(row.macs for row in self.cost_table())

    def cost_table(self) -> list[PartCost]:
        """Parameters and multiply-adds of backbone, block of attention and head."""
        twin = on_meta(self)
        block, twin.context = twin.context, nn.Identity()
        if self.own is None:
            images = torch.empty(1, self.in_chans, *self.img_size, device="meta")
            maps, backbone = count_macs(twin.backbone, images)
        else:
            maps, backbone = self.meta_maps(), self.own.macs()
        _, head = count_macs(twin.decode, maps)
        mixing = block.macs(maps[-1][0, 0].numel()) if isinstance(block, Mixer) else 0
        parts = [count_parameters(self.backbone), count_parameters(self.context)]
        return [
            PartCost("backbone", parts[0], backbone),
            PartCost("block", parts[1], mixing),
            PartCost("head", count_parameters(self) - sum(parts), head),
        ]

    def warnings(self) -> list[str]:
        """What `tokenmix info` warns of."""
        return self.own.warnings() if hasattr(self.own, "warnings") else []

    def set_input_size(self, img_size: int | tuple[int, int]) -> None:
        """Set the image size for which costs are counted, and which a backbone of ours takes."""
        self.img_size = pair(img_size)
        if self.own is not None:
            self.own.set_input_size(self.img_size)

    def get_classifier(self) -> nn.Conv2d:
        """The last convolution."""
        return self.classifier

    def reset_classifier(self, num_classes: int) -> None:
        """A new last convolution."""
        like = self.classifier.weight
        self.num_classes = num_classes
        self.classifier = nn.Conv2d(self.classifier.in_channels, num_classes, 1, device=like.device, dtype=like.dtype)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the backbone's blocks in the backward pass instead of keeping what they made."""
        (self.backbone if self.own is None else self.own).set_grad_checkpointing(enable)

    def no_weight_decay(self) -> set[str]:
        """Parameters without weight decay, next to those of one axis."""
        return set() if self.own is None else {f"backbone.model.{name}" for name in self.own.no_weight_decay()}
