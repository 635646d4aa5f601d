"""Stems: images to tokens."""

from typing import Unpack

import torch.fx
from timm.layers.norm import LayerNorm2d
from torch import Tensor, nn

from tokenmix.errors import UserError
from tokenmix.layers.base import Factory
from tokenmix.models.interface import Size, check_images, pair

# One torch.fx node, because FX does not know sizes.
torch.fx.wrap("check_images")


class Stem(nn.Module):
    """Base of stems: images (B, C, H, W) to tokens (B, N, D), row by row on `grid_size`."""

    dim: int
    in_chans: int
    img_size: tuple[int, int]
    grid_size: tuple[int, int]
    reduction: int

    def set_input_size(self, img_size: Size) -> None:
        """Set the image size; `UserError` unless the size gives whole tokens."""
        raise NotImplementedError

    def macs(self) -> int:
        """Multiply-adds of one image."""
        raise NotImplementedError

    def check(self, images: Tensor) -> None:
        check_images(images, self.in_chans, self.img_size)


class PatchStem(Stem):
    """Patch embedding: non-overlapping patches through one linear map.

    Shape: images (B, C, H, W) to tokens (B, (H / patch) * (W / patch), D), row by row.
    """

    def __init__(
        self, dim: int, *, img_size: Size, patch_size: int, in_chans: int = 3, **factory: Unpack[Factory]
    ) -> None:
        super().__init__()
        self.dim, self.in_chans, self.patch_size, self.reduction = dim, in_chans, patch_size, patch_size
        self.proj = nn.Conv2d(in_chans, dim, patch_size, patch_size, **factory)
        self.set_input_size(img_size)

    def set_input_size(self, img_size: Size) -> None:
        size = pair(img_size)
        if any(side % self.patch_size or side < self.patch_size for side in size):
            near = max(1, round(min(size) / self.patch_size)) * self.patch_size
            raise UserError(
                f"image size {size[0]} x {size[1]} is not a multiple of the patch size {self.patch_size}; "
                f"give img_size={near} or another patch_size"
            )
        self.img_size = size
        self.grid_size = (size[0] // self.patch_size, size[1] // self.patch_size)

    def forward(self, images: Tensor) -> Tensor:
        self.check(images)
        # Contiguous, or every block would copy strided tokens and return strided sums.
        return self.proj(images).flatten(2).transpose(1, 2).contiguous()

    def macs(self) -> int:
        return self.grid_size[0] * self.grid_size[1] * self.dim * self.in_chans * self.patch_size**2


class ConvStem(PatchStem):
    """3 x 3 convolutions down to the grid of patches, with normalisation and GELU after all but the last.

        tokens = W_1x1 GELU(norm(conv_k(... GELU(norm(conv_1(images))))))

    Strides are the prime factors of the patch size; widths are D/2, then D. A patch of 2 or 3 px has a first
    convolution of stride 1. A larger prime has one convolution with a border of one pixel, because several at full size
    would take most of the training time. `norm` is LayerNorm over the channels of each position; image statistics would
    leak information between tokens.

    On small data sets, transformers learn faster with this stem than with a patch embedding.

    Shape: images (B, C, H, W) to tokens (B, (H / patch) * (W / patch), D), row by row.

    Reference: Xiao et al., Early Convolutions Help Transformers See Better, arXiv 2106.14881.
    """

    def __init__(
        self, dim: int, *, img_size: Size, patch_size: int, in_chans: int = 3, **factory: Unpack[Factory]
    ) -> None:
        super().__init__(dim, img_size=img_size, patch_size=patch_size, in_chans=in_chans, **factory)
        del self.proj  # keeps modules in execution order
        strides, left = [], patch_size
        for factor in range(2, patch_size + 1):
            while left % factor == 0:
                strides.append(factor)
                left //= factor
        strides = [1, *strides] if len(strides) < 2 and patch_size < 4 else strides
        widths = [in_chans, *[max(1, dim // 2)] * (len(strides) - 1), dim]
        layers: list[nn.Module] = []
        for wide_in, wide_out, stride in zip(widths, widths[1:], strides):
            kernel, padding = (3, 1) if stride < 3 else (stride, 0) if len(strides) > 1 else (stride + 2, 1)
            layers += [
                nn.Conv2d(wide_in, wide_out, kernel, stride, padding, bias=False, **factory),
                LayerNorm2d(wide_out, **factory),
                nn.GELU(),
            ]
        self.convs = nn.Sequential(*layers)
        self.proj = nn.Conv2d(dim, dim, 1, **factory)

    def forward(self, images: Tensor) -> Tensor:
        self.check(images)
        return self.proj(self.convs(images)).flatten(2).transpose(1, 2).contiguous()

    def macs(self) -> int:
        total, area = 0, self.img_size[0] * self.img_size[1]
        for conv in (layer for layer in self.convs if isinstance(layer, nn.Conv2d)):
            area //= conv.stride[0] ** 2
            total += area * conv.weight.numel()
        return total + area * self.dim**2
