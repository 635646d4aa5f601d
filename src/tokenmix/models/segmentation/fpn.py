"""A feature pyramid for segmentation, over any backbone that returns maps."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tokenmix.errors import UserError
from tokenmix.layers.memory import Tie
from tokenmix.models.context import make_context
from tokenmix.models.registry import create_model
from tokenmix.models.segmentation.backbones import make_backbone
from tokenmix.models.segmentation.base import Segmenter, Upsampling
from tokenmix.ops.external.api import Normalization
from tokenmix.registry import list_models

FINEST = 4


class FPNSegmenter(Segmenter):
    """Semantic FPN: a pyramid with lateral connections, its levels brought to a quarter of the image and summed.

        P_i    = lateral_i(C_i) + up(P_(i+1)),   P of the last level through the block, if there is one
        logits = upsample(classifier(sum_i (up conv3x3)^(log2(stride_i / 4)) P_i))

    Paper: Kirillov, Girshick, He, Dollar, Panoptic Feature Pyramid Networks, arXiv 1901.02446. The block of attention
    on the coarsest level is ours. A backbone of one scale, such as gMLP, gives a pyramid of one level.

    Shapes: images (B, in_chans, H, W) to logits (B, num_classes, H, W); a backbone of ours takes `img_size` alone.

    Args:
        backbone: name of a model of timm's, or of an image classifier of ours.
        backbone_kwargs: arguments of its constructor.
        mixer: `"external"`; `"self"`, the same block of self-attention; `"none"`; or any other in that block.
        width, head_width: channels around the block, and before the classifier.
        num_slots, tie, normalization, chunk_size: of external attention, see `ExternalAttention2d`; 64 slots, no tie,
            double normalisation and all pixels at once if not given.
        num_classes: classes of a pixel.
        pretrained_backbone: start from the backbone's weights.
        drop_rate: dropout of whole channels before the classifier.
        img_size: size of the images, or that for which `macs` counts.
        in_chans: channels of the image.
        upsampling: see `Segmenter`.

    Raises:
        UserError: a backbone or option that does not exist or does not fit.
    """

    def __init__(
        self,
        *,
        backbone: str = "resnet50",
        backbone_kwargs: Mapping[str, Any] | None = None,
        mixer: str = "none",
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
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        factory = {"device": device, "dtype": dtype}
        given = {"in_chans": in_chans, **_own_arguments(backbone, img_size), **(backbone_kwargs or {})}
        maps = make_backbone(backbone, pretrained=pretrained_backbone, kwargs=given, factory=factory)
        options = {"num_slots": num_slots, "tie": tie, "normalization": normalization, "chunk_size": chunk_size}
        context = make_context(mixer, width, options, factory)
        super().__init__(
            maps,
            context,
            mixer=mixer,
            head_width=head_width,
            num_classes=num_classes,
            drop_rate=drop_rate,
            img_size=img_size,
            in_chans=in_chans,
            upsampling=upsampling,
            factory=factory,
        )
        if self.own is not None and mixer == "none":
            self.mixer_name = getattr(self.own, "mixer_name", mixer)
        self.levels = _levels([entry["reduction"] for entry in self.feature_info], backbone)
        chosen = [self.feature_info[i] for i in self.levels]
        self.laterals = nn.ModuleList(nn.Conv2d(entry["num_chs"], width, 1, **factory) for entry in chosen)
        self.ups = nn.ModuleList(_ladder(width, head_width, entry["reduction"], factory) for entry in chosen)

    def before_context(self, maps: list[Tensor]) -> Tensor:
        """The coarsest map at the width of the pyramid."""
        return self.laterals[-1](maps[self.levels[-1]])

    def decode(self, maps: list[Tensor]) -> Tensor:
        """The levels' sum as logits, at a quarter of the image's sides."""
        levels = [lateral(maps[i]) for lateral, i in zip(self.laterals, self.levels, strict=True)]
        levels[-1] = self.context(levels[-1])
        for i in range(len(levels) - 2, -1, -1):
            levels[i] = levels[i] + F.interpolate(levels[i + 1], size=levels[i].shape[2:], mode="nearest")
        finest = self.feature_info[self.levels[0]]["reduction"] // FINEST
        size = [side * finest for side in levels[0].shape[2:]]
        first, *others = (_climb(steps, level, size) for steps, level in zip(self.ups, levels, strict=True))
        for other in others:
            first = first + other
        return self.classifier(self.drop(first))


def _own_arguments(backbone: str, img_size: int | tuple[int, int]) -> dict[str, Any]:
    """A backbone of ours is built for one image size, and returns its last three maps by default."""
    if backbone.split(".")[0] not in list_models(task="image-classification"):
        return {}
    entries: Any = create_model(backbone, device="meta").feature_info
    return {"img_size": img_size, "out_indices": _levels([entry["reduction"] for entry in entries], backbone)}


def _levels(reductions: list[int], name: str) -> list[int]:
    """The last map of each scale from a quarter of the image on."""
    chosen = {reduction: i for i, reduction in enumerate(reductions) if reduction >= FINEST}
    if not chosen or any(math.log2(reduction) % 1 for reduction in chosen):
        raise UserError(f"backbone {name!r} has maps reduced by {reductions}; a pyramid needs powers of 2, at least 4")
    return list(chosen.values())


def _ladder(width: int, out: int, reduction: int, factory: Mapping[str, Any]) -> nn.ModuleList:
    """One 3 x 3 convolution with norm and ReLU for each doubling, at least one."""
    steps = max(1, int(math.log2(reduction // FINEST)))
    return nn.ModuleList(
        nn.Sequential(
            nn.Conv2d(width if i == 0 else out, out, 3, padding=1, bias=False, **factory),
            nn.GroupNorm(math.gcd(32, out), out, **factory),
            nn.ReLU(),
        )
        for i in range(steps)
    )


def _climb(steps: nn.Module, x: Tensor, size: list[int]) -> Tensor:
    for i, step in enumerate(steps.children(), 1):
        x = step(x)
        grown = size if i == len(list(steps.children())) else [2 * side for side in x.shape[2:]]
        if list(x.shape[2:]) != list(grown):
            x = F.interpolate(x, size=grown, mode="bilinear", align_corners=False)
    return x
