"""EANet for segmentation: a dilated ResNet, one block of external attention, a classifier for each pixel."""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tokenmix.layers.memory import Tie
from tokenmix.models.context import make_context
from tokenmix.models.segmentation.backbones import make_dilated
from tokenmix.models.segmentation.base import Segmenter, Upsampling
from tokenmix.ops.external.api import Normalization


class EANetSegmenter(Segmenter):
    """A dilated backbone and the head of the released segmentation network.

        x      = relu(BN(conv3x3(backbone(images))))            to `width` channels
        y      = relu(x + BN(conv2(Norm(conv1(x) M_k^T) M_v)))  the EANet block
        logits = upsample(classifier(dropout(relu(BN(conv3x3(y))))))

    Paper: Guo et al., Beyond Self-attention: External Attention using Two Linear Layers, arXiv 2105.02358; there is no
    auxiliary loss. The released ResNet has a stem of three 3 x 3 convolutions (64, 64, 128) and shortcuts without
    pooling, timm's `resnet50s` and `resnet101s`; its dilations, multi-grid included, are `make_dilated`'s.

    Shapes: images (B, in_chans, H, W), any H and W, to logits (B, num_classes, H, W).

    Args:
        backbone: name of a convolutional model of timm's that can be dilated.
        backbone_kwargs: arguments of its constructor.
        stem: `"large"`, the backbone's own; `"small"`, see `make_dilated`.
        output_stride: pixels on a side that become one position of the map: 8 or 16 as published; 4 with a small stem.
        mixer: `"external"`; `"self"`, the same block of self-attention; `"none"`; or any other in that block.
        width, head_width: channels around the block, and before the classifier.
        num_slots, tie, normalization, chunk_size: of external attention, see `ExternalAttention2d`; 64 slots, no tie,
            double normalisation and all pixels at once if not given.
        num_classes: classes of a pixel.
        pretrained_backbone: start from timm's weights of the backbone.
        drop_rate: dropout of whole channels before the classifier.
        img_size: size for which `macs` counts.
        in_chans: channels of the image.
        upsampling: see `Segmenter`.

    Raises:
        UserError: a backbone, stride or option that does not exist or does not fit.
    """

    def __init__(
        self,
        *,
        backbone: str = "resnet50s",
        backbone_kwargs: Mapping[str, Any] | None = None,
        stem: Literal["large", "small"] = "large",
        output_stride: int = 8,
        mixer: str = "external",
        width: int = 512,
        head_width: int = 256,
        num_slots: int | None = None,
        tie: Tie | None = None,
        normalization: Normalization | None = None,
        chunk_size: int | None = None,
        num_classes: int = 21,
        pretrained_backbone: bool = False,
        drop_rate: float = 0.1,
        img_size: int | tuple[int, int] = 513,
        in_chans: int = 3,
        upsampling: Upsampling = "corners",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        factory = {"device": device, "dtype": dtype}
        maps = make_dilated(
            backbone,
            output_stride=output_stride,
            stem=stem,
            in_chans=in_chans,
            pretrained=pretrained_backbone,
            kwargs=backbone_kwargs or {},
            factory=factory,
        )
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
        self.feature_info[-1]["reduction"] = output_stride
        self.reduce = _conv_norm_relu(self.feature_info[-1]["num_chs"], width, **factory)
        self.head = _conv_norm_relu(width, head_width, **factory)

    def before_context(self, maps: list[Tensor]) -> Tensor:
        """The backbone's map at the width of the block."""
        return self.reduce(maps[-1])

    def decode(self, maps: list[Tensor]) -> Tensor:
        """The backbone's map to logits on its grid."""
        return self.classifier(self.drop(self.head(self.context(self.before_context(maps)))))


def _conv_norm_relu(width: int, out: int, **factory: Any) -> nn.Sequential:
    """3 x 3 convolution, BatchNorm, ReLU."""
    conv = nn.Conv2d(width, out, 3, padding=1, bias=False, **factory)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return nn.Sequential(conv, nn.BatchNorm2d(out, **factory), nn.ReLU())
