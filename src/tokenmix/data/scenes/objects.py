"""Objects out of boxes or masks."""

import numpy as np
import torch
from torch import Tensor
from torchvision.ops import masks_to_boxes

from tokenmix.data.scenes.scenes import Objects

__all__ = ["no_objects", "objects_of_boxes", "objects_of_masks"]


def objects_of_boxes(
    boxes: np.ndarray | Tensor, labels: Tensor | list[int], crowd: list[bool] | None = None
) -> Objects:
    """Objects of which only boxes are known, (M, 4) left, top, right, bottom."""
    corners = torch.as_tensor(boxes, dtype=torch.float32).reshape(-1, 4)
    return Objects(corners, _int(labels), None, _crowd(crowd, len(corners)))


def objects_of_masks(masks: Tensor, labels: Tensor | list[int], crowd: list[bool] | None = None) -> Objects:
    """Objects by their masks, bool (M, H, W), each with a pixel or more; the boxes end behind the last pixel."""
    boxes = masks_to_boxes(masks).float() + torch.tensor([0.0, 0.0, 1.0, 1.0])
    return Objects(boxes.reshape(-1, 4), _int(labels), masks, _crowd(crowd, len(masks)))


def no_objects(size: tuple[int, int] | None) -> Objects:
    """None of them, with masks of this size (height, width) if one is given."""
    none = objects_of_boxes(torch.empty(0, 4), [])
    masks = None if size is None else torch.empty((0, *size), dtype=torch.bool)
    return Objects(none.boxes, none.labels, masks, none.crowd)


def _int(labels: Tensor | list[int]) -> Tensor:
    return torch.as_tensor(labels, dtype=torch.int64)


def _crowd(crowd: list[bool] | None, count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.bool) if crowd is None else torch.tensor(crowd, dtype=torch.bool)
