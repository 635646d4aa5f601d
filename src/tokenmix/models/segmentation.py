"""Semantic segmentation networks: a dilated backbone with an attention block, or a feature pyramid."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, cast, get_args

import timm
import torch
import torch.nn.functional as F
from timm.models import FeatureDictNet, FeatureHookNet, FeatureListNet
from timm.models._features import FeatureGetterNet
from torch import Tensor, nn

from tokenmix.errors import UserError, unknown_name
from tokenmix.layers.base import Device, Factory, Mixer, count_macs, count_parameters, on_meta
from tokenmix.layers.external import Tie
from tokenmix.models.eanet import make_context
from tokenmix.models.interface import BlockMap, Classifier, FeatureMaps, MapInfo, PartCost, pair
from tokenmix.models.registry import create_model, timm_model
from tokenmix.ops.checks import check_choice
from tokenmix.ops.external_blocks import Normalization
from tokenmix.registry import Arguments, list_models

MULTI_GRID = (1, 2, 4)
"""Dilation factors of the three blocks of the last stage, as in the released network."""
FINEST = 4
StemKind = Literal["large", "small"]
Upsampling = Literal["corners", "pixels"]
MapNet = FeatureListNet | FeatureDictNet | FeatureHookNet | FeatureGetterNet
"""A model of timm with `features_only`."""


class Segmenter(FeatureMaps, nn.Module, ABC):
    """Images (B, C, H, W) to logits (B, classes, H, W).

    A family implements `make_backbone`, `add_head` and `decode`, which maps features to coarse logits, through
    `context` if there is one. `tokenmix.create_model` builds the published configurations.

    Args:
        backbone: name of a timm model; for a pyramid also of an image classifier of ours.
        backbone_kwargs: arguments of its constructor.
        stem: `"large"`, the backbone's own; `"small"`, one 3 x 3 convolution of stride 2 in place of a ResNet's stem
            and pooling, for small images. Only for dilated backbones, like `output_stride`.
        output_stride: stride of the last map: 8 (default, as published) or 16; 4 with a small stem.
        mixer: `"external"`; `"self"`, the same block with self-attention; `"none"`; or any other mixer in that block.
        mixer_kwargs: arguments of the mixer's constructor; `"self"` has one head by default.
        width, head_width: channels around the block, and before the classifier.
        num_slots, tie, normalization, chunk_size: of external attention, see `ExternalAttention2d` (default: 64 slots,
            no tie, double normalisation, no chunks).
        num_classes: classes of a pixel.
        pretrained_backbone: load pretrained weights of the backbone.
        drop_rate: dropout of whole channels before the classifier.
        img_size: image size for `macs`, and the required size if the backbone has a fixed size.
        in_chans: channels of the image.
        upsampling: bilinear, from the coarse grid to the pixels. `"corners"` aligns the centres of the corner pixels,
            as in the released network, for sides of 8 k + 1. `"pixels"` aligns the borders.

    Shape: images (B, in_chans, H, W) to logits (B, num_classes, H, W); any H and W, unless the backbone is one of ours.
    """

    def __init__(
        self,
        *,
        backbone: str,
        backbone_kwargs: Arguments | None = None,
        stem: StemKind | None = None,
        output_stride: int | None = None,
        mixer: str = "none",
        mixer_kwargs: Arguments | None = None,
        width: int = 256,
        head_width: int = 128,
        num_slots: int | None = None,
        tie: Tie | None = None,
        normalization: Normalization | None = None,
        chunk_size: int | None = None,
        num_classes: int = 21,
        pretrained_backbone: bool = False,
        drop_rate: float = 0.1,
        img_size: int | tuple[int, int] = 512,
        in_chans: int = 3,
        upsampling: Upsampling = "pixels",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_choice("upsampling", upsampling, get_args(Upsampling))
        factory: Factory = {"device": device, "dtype": dtype}
        self.mixer_name, self.img_size, self.in_chans = mixer, pair(img_size), in_chans
        self.num_classes, self.upsampling = num_classes, upsampling
        given = {"pretrained": pretrained_backbone, "in_chans": in_chans, **(backbone_kwargs or {})}
        self.backbone_name, self.stem_kind, self.output_stride = backbone, stem, output_stride
        self.backbone = self.make_backbone(given, factory)
        self.feature_info: list[MapInfo] = list(self.backbone.feature_info.get_dicts())
        options = {"num_slots": num_slots, "tie": tie, "normalization": normalization, "chunk_size": chunk_size}
        self.context = make_context(mixer, width, options, factory, mixer_kwargs)
        self.classifier = nn.Conv2d(head_width, num_classes, 1, **factory)
        self.dropout = nn.Dropout2d(drop_rate)
        self.add_head(width, head_width, factory)

    @property
    def own(self) -> Classifier | None:
        """The backbone as a model of this library, with a fixed image size; None for a timm backbone."""
        model = getattr(self.backbone, "model", None)
        return model if isinstance(model, Classifier) else None

    @property
    def fixed_size(self) -> bool:
        """Whether images must have the size `img_size`."""
        return self.own is not None

    @abstractmethod
    def make_backbone(self, kwargs: Arguments, factory: Factory) -> Any:
        """Images to maps, finest first, with timm's `feature_info`."""

    @abstractmethod
    def add_head(self, width: int, head_width: int, factory: Factory) -> None:
        """Add the layers around the block."""

    @abstractmethod
    def before_context(self, maps: list[Tensor]) -> Tensor:
        """Maps of the backbone to the input of the block."""

    @abstractmethod
    def decode(self, maps: list[Tensor]) -> Tensor:
        """Maps of the backbone to logits on a coarse grid."""

    def forward_features(self, images: Tensor) -> list[Tensor]:
        if images.dim() != 4 or images.shape[1] != self.in_chans:
            raise UserError(
                f"a segmenter takes images (B, {self.in_chans}, height, width), got {tuple(images.shape)}; "
                "image.unsqueeze(0) makes a batch of one"
            )
        return self.backbone(images)

    def forward(self, images: Tensor) -> Tensor:
        logits = self.decode(self.forward_features(images))
        corners = self.upsampling == "corners"
        return F.interpolate(logits, size=images.shape[2:], mode="bilinear", align_corners=corners)

    @torch.no_grad()
    def attention_maps(self, images: Tensor) -> list[BlockMap]:
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
        return [] if self.own is None else self.own.warnings()

    def set_input_size(self, img_size: int | tuple[int, int]) -> None:
        """Set the image size for the cost functions, and for a backbone of ours."""
        self.img_size = pair(img_size)
        if self.own is not None:
            self.own.set_input_size(self.img_size)

    def get_classifier(self) -> nn.Conv2d:
        return self.classifier

    def reset_classifier(self, num_classes: int) -> None:
        like = self.classifier.weight
        self.num_classes = num_classes
        self.classifier = nn.Conv2d(self.classifier.in_channels, num_classes, 1, device=like.device, dtype=like.dtype)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        (self.backbone if self.own is None else self.own).set_grad_checkpointing(enable)

    def no_weight_decay(self) -> set[str]:
        return set() if self.own is None else {f"backbone.model.{name}" for name in self.own.no_weight_decay()}


def timm_maps(name: str, kwargs: Arguments, factory: Factory) -> Any:
    """A model with `features_only`: images to maps, finest first; `UserError` if unknown or without maps or weights."""
    if name.split(".")[0] not in timm.list_models():
        raise unknown_name("backbone", name, timm.list_models())
    placed = {key: value for key, value in factory.items() if value is not None}
    try:
        return timm_model(name, {"features_only": True, **kwargs, **placed})
    except (TypeError, RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(
            f"backbone {name!r} cannot be used for segmentation ({' '.join(str(error).split())}); give a convolutional "
            "one that timm dilates, such as resnet50s, or a pyramid for an fpn_seg model"
        ) from None


class EANetSegmenter(Segmenter):
    """A dilated backbone and the head of the released segmentation network.

        x      = relu(BN(conv3x3(backbone(images))))            to `width` channels
        y      = relu(x + BN(conv2(Norm(conv1(x) M_k^T) M_v)))  the EANet block
        logits = upsample(classifier(dropout(relu(BN(conv3x3(y))))))

    Bottleneck ResNets use the multi-grid of the released network: after the first block of the last stage, dilations
    are multiplied by 2 and 4. The released ResNet has a stem of three 3 x 3 convolutions (64, 64, 128) and shortcuts
    without pooling, as timm's `resnet50s` and `resnet101s`. There is no auxiliary loss.

    Arguments are those of `Segmenter`.

    Reference: Guo et al., Beyond Self-attention: External Attention using Two Linear Layers, arXiv 2105.02358.
    """

    def make_backbone(self, kwargs: Arguments, factory: Factory) -> MapNet:
        """The backbone's last map only, with stride `output_stride`."""
        stem, output_stride = self.stem_kind or "large", self.output_stride or 8
        check_choice("stem", stem, get_args(StemKind))
        strides = (8, 16, 32) if stem == "large" else (4, 8, 16)
        if output_stride not in strides:
            raise UserError(f"output_stride must be one of {strides} with stem={stem!r}, got {output_stride}")
        name = self.backbone_name
        if name in list_models(task="image-classification"):
            raise UserError(f"{name} has no dilated form; give a timm backbone, or use an fpn_seg model")
        given = {"output_stride": output_stride * (1 if stem == "large" else 2), **kwargs, "out_indices": (-1,)}
        backbone = timm_maps(name, given, factory)
        if stem == "small":
            if not isinstance(getattr(backbone, "conv1", None), nn.Conv2d):
                raise UserError(
                    f"stem='small' is for a ResNet whose stem is one convolution, such as resnet18, not {name!r}"
                )
            width = backbone.bn1.num_features
            backbone.conv1 = nn.Conv2d(self.in_chans, width, 3, 2, padding=1, bias=False, **factory)
            nn.init.kaiming_normal_(backbone.conv1.weight, mode="fan_out", nonlinearity="relu")
            backbone.maxpool = nn.Identity()
        last = getattr(backbone, "layer4", None)
        if last is not None and hasattr(last[0], "conv3") and output_stride <= 16:
            for block, grid in list(zip(last, MULTI_GRID, strict=False))[1:]:
                dilation = block.conv2.dilation[0] * grid
                block.conv2.dilation = block.conv2.padding = (dilation, dilation)
        return backbone

    def add_head(self, width: int, head_width: int, factory: Factory) -> None:
        self.feature_info[-1]["reduction"] = self.output_stride or 8
        self.reduce = _conv_norm_relu(self.feature_info[-1]["num_chs"], width, factory)
        self.head = _conv_norm_relu(width, head_width, factory)

    def before_context(self, maps: list[Tensor]) -> Tensor:
        return self.reduce(maps[-1])

    def decode(self, maps: list[Tensor]) -> Tensor:
        return self.classifier(self.dropout(self.head(self.context(self.before_context(maps)))))


def _conv_norm_relu(width: int, out: int, factory: Factory) -> nn.Sequential:
    conv = nn.Conv2d(width, out, 3, padding=1, bias=False, **factory)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return nn.Sequential(conv, nn.BatchNorm2d(out, **factory), nn.ReLU())


class FPNSegmenter(Segmenter):
    """Semantic FPN: a pyramid with lateral connections, summed at a quarter of the image size.

        P_i    = lateral_i(C_i) + up(P_(i+1)),   P of the last level through the block, if there is one
        logits = upsample(classifier(sum_i (up conv3x3)^(log2(stride_i / 4)) P_i))

    The attention block on the coarsest level is an extension. A backbone with one scale, such as gMLP, gives a pyramid
    of one level.

    Arguments are those of `Segmenter`, without `stem` and `output_stride`; our backbones only accept images of
    `img_size`.

    Reference: Kirillov, Girshick, He, Dollar, Panoptic Feature Pyramid Networks, arXiv 1901.02446.
    """

    def make_backbone(self, kwargs: Arguments, factory: Factory) -> MapNet:
        """All maps; for a backbone of ours the levels, because its default is the last three maps."""
        for option, value in (("stem", self.stem_kind), ("output_stride", self.output_stride)):
            if value is not None:
                raise UserError(f"{option}={value!r} is for a dilated backbone, an eanet_seg model; leave it out")
        if self.backbone_name.split(".")[0] in list_models(task="image-classification"):
            meta = cast(Classifier, create_model(self.backbone_name, device="meta"))
            kwargs = {"img_size": self.img_size, "out_indices": self._levels(meta.feature_info), **kwargs}
        return timm_maps(self.backbone_name, kwargs, factory)

    def add_head(self, width: int, head_width: int, factory: Factory) -> None:
        if self.own is not None and self.mixer_name == "none":
            self.mixer_name = self.own.mixer_name
        self.levels = self._levels(self.feature_info)
        chosen = [self.feature_info[i] for i in self.levels]
        self.laterals = nn.ModuleList(nn.Conv2d(entry["num_chs"], width, 1, **factory) for entry in chosen)
        self.ups = nn.ModuleList()
        for entry in chosen:
            # One 3 x 3 convolution with norm and ReLU per doubling, at least one.
            steps = max(1, int(math.log2(entry["reduction"] // FINEST)))
            convs = [
                nn.Conv2d(width if i == 0 else head_width, head_width, 3, padding=1, bias=False, **factory)
                for i in range(steps)
            ]
            norms = [nn.GroupNorm(math.gcd(32, head_width), head_width, **factory) for _ in convs]
            self.ups.append(nn.ModuleList(nn.Sequential(conv, norm, nn.ReLU()) for conv, norm in zip(convs, norms)))

    def _levels(self, maps: Sequence[MapInfo]) -> list[int]:
        """The last map of each scale from a quarter of the image on."""
        reductions = [entry["reduction"] for entry in maps]
        chosen = {reduction: i for i, reduction in enumerate(reductions) if reduction >= FINEST}
        if not chosen or any(math.log2(reduction) % 1 for reduction in chosen):
            raise UserError(
                f"backbone {self.backbone_name!r} has maps reduced by {reductions}; a pyramid needs powers of 2, at "
                "least 4"
            )
        return list(chosen.values())

    def before_context(self, maps: list[Tensor]) -> Tensor:
        return self.laterals[-1](maps[self.levels[-1]])

    def decode(self, maps: list[Tensor]) -> Tensor:
        levels = [lateral(maps[i]) for lateral, i in zip(self.laterals, self.levels, strict=True)]
        levels[-1] = self.context(levels[-1])
        for i in range(len(levels) - 2, -1, -1):
            levels[i] = levels[i] + F.interpolate(levels[i + 1], size=levels[i].shape[2:], mode="nearest")
        finest = self.feature_info[self.levels[0]]["reduction"] // FINEST
        size = [side * finest for side in levels[0].shape[2:]]
        total: Tensor | None = None
        for steps, x in zip(self.ups, levels, strict=True):
            convs = list(steps.children())
            for i, conv in enumerate(convs, 1):
                x = conv(x)
                grown = size if i == len(convs) else [2 * side for side in x.shape[2:]]
                if list(x.shape[2:]) != list(grown):
                    x = F.interpolate(x, size=grown, mode="bilinear", align_corners=False)
            total = x if total is None else total + x
        return self.classifier(self.dropout(total))
