"""Images of any size to a detector, and masks back, without full-size copies."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import floor

import torch
from torch import Tensor
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.roi_heads import expand_boxes, expand_masks
from torchvision.models.detection.transform import GeneralizedRCNNTransform, resize_boxes

from tokenmix.environment import check_mask_memory
from tokenmix.errors import UserError

# Pixels interpolated at a time.
BLOCK_PIXELS = 1 << 20


def bilinear_blocks(image: Tensor, size: tuple[int, int]) -> Iterator[Tensor]:
    """Resize an image (C, H, W) as F.interpolate (bilinear, no antialiasing), in float32 blocks (C, rows, width)."""
    (top, bottom, down), (left, right, along) = (
        _neighbours(old, new) for old, new in zip(image.shape[1:], size, strict=True)
    )
    per_row = max(size[1], image.shape[2] * max(1, image.shape[1] // size[0]))
    for rows in torch.arange(size[0]).split(max(1, BLOCK_PIXELS // per_row)):
        first, last = int(top[rows[0]]), int(bottom[rows[-1]])
        seen = image[:, first : last + 1, :].float()
        shift = down[rows, None].to(seen.device)
        block = torch.lerp(seen[:, top[rows] - first], seen[:, bottom[rows] - first], shift)
        yield torch.lerp(block[..., left], block[..., right], along.to(seen.device))


def _neighbours(old: int, new: int) -> tuple[Tensor, Tensor, Tensor]:
    """For each of `new` pixels along a side of `old`: its two neighbours, and the distance from the first."""
    place = ((torch.arange(new, dtype=torch.float64) + 0.5) * (old / new) - 0.5).clamp(0, old - 1)
    lower = place.floor().long()
    return lower, (lower + 1).clamp_max(old - 1), (place - lower).float()


class PictureTransform(GeneralizedRCNNTransform):
    """torchvision's transform for images of any size.

    uint8 images are resized before normalisation, so a large image has no float copy. Masks are only stored within
    their boxes, see `place_masks`. `Detector` sets `device`, the target of the batch, for each pass. With `masks_later`
    the second stage resizes the true masks, see `BlockRoIHeads`.
    """

    device = torch.device("cpu")
    masks_later = False

    def forward(
        self, images: list[Tensor], targets: list[dict[str, Tensor]] | None = None
    ) -> tuple[ImageList, list[dict[str, Tensor]] | None]:
        if all(isinstance(image, Tensor) and image.is_floating_point() for image in images):
            return super().forward(images, targets)
        seen, sides = [], self.min_size
        assert not isinstance(sides, int)
        for image in images:
            height, width = image.shape[1:]
            scale = min(sides[-1] / min(height, width), self.max_size / max(height, width))
            size = (floor(height * scale), floor(width * scale))
            if min(size) < 1:
                raise UserError(
                    f"an image of {width} x {height} pixels is too narrow for {self.max_size} at most; "
                    "cut it, or raise max_size"
                )
            seen.append(self.normalize(torch.cat(list(bilinear_blocks(image, size)), 1).div_(255).to(self.device)))
        return ImageList(self.batch_images(seen, self.size_divisible), [(x.shape[1], x.shape[2]) for x in seen]), None

    def resize(self, image: Tensor, target: dict[str, Tensor] | None = None) -> tuple[Tensor, dict[str, Tensor] | None]:
        masks = target.pop("masks", None) if target is not None and self.masks_later else None
        image, target = super().resize(image, target)
        return image, target if target is None or masks is None else {**target, "masks": masks}

    def postprocess(
        self,
        result: list[dict[str, Tensor]],
        image_shapes: list[tuple[int, int]],
        original_image_sizes: list[tuple[int, int]],
    ) -> list[dict[str, Tensor]]:
        """Boxes in image pixels; masks (M, 1, 28, 28) relative to their boxes."""
        if not self.training:
            for found, seen, size in zip(result, image_shapes, original_image_sizes, strict=True):
                found["boxes"] = resize_boxes(found["boxes"], list(seen), list(size))
        return result


@dataclass(frozen=True)
class PlacedMasks:
    """Masks as crops (bool (h, w), top, left) for an image of `size`; 100 full masks of it could need gigabytes."""

    crops: Sequence[tuple[Tensor, int, int]]
    size: tuple[int, int]

    def __len__(self) -> int:
        return len(self.crops)

    def __getitem__(self, keep: Tensor) -> "PlacedMasks":
        return PlacedMasks([crop for crop, kept in zip(self.crops, keep.tolist(), strict=True) if kept], self.size)

    def cpu(self) -> "PlacedMasks":
        return PlacedMasks([(crop.cpu(), top, left) for crop, top, left in self.crops], self.size)

    def whole(self, index: int) -> Tensor:
        """One mask, bool (H, W), stored by columns as in run-length encoding."""
        crop, top, left = self.crops[index]
        mask = crop.new_zeros(self.size[::-1]).T
        mask[top : top + crop.shape[0], left : left + crop.shape[1]] = crop
        return mask

    def dense(self) -> Tensor:
        """All masks, bool (M, H, W); `UserError` if they need too much memory."""
        check_mask_memory(len(self), self.size)
        masks = [self.whole(i) for i in range(len(self))]
        return torch.stack(masks) if masks else torch.zeros(0, *self.size, dtype=torch.bool)


def place_masks(probabilities: Tensor, boxes: Tensor, size: tuple[int, int]) -> PlacedMasks:
    """Masks from the probabilities (M, 1, h, w) in their boxes, pasted like torchvision with threshold 0.5."""
    padded, factor = expand_masks(probabilities, padding=1)
    crops = []
    for crop, box in zip(padded, expand_boxes(boxes, factor).long().tolist(), strict=True):
        width, height = (max(box[i + 2] - box[i] + 1, 1) for i in (0, 1))
        mask = torch.cat([block[0] > 0.5 for block in bilinear_blocks(crop, (height, width))])
        left, top = max(box[0], 0), max(box[1], 0)
        inside = mask[top - box[1] : size[0] - box[1], left - box[0] : size[1] - box[0]]
        crops.append((inside.clone(), top, left))
    return PlacedMasks(crops, size)


def with_dense_masks(found: Mapping[str, Tensor | PlacedMasks]) -> dict[str, Tensor]:
    return {name: value.dense() if isinstance(value, PlacedMasks) else value for name, value in found.items()}
