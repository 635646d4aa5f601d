"""Sliding-window detection in an image that is larger than a detector takes, merged into one list."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torchvision.ops import batched_nms, box_area

from tokenmix.lab.tasks.images import window_starts
from tokenmix.models.detection.pictures import PlacedMasks

Found = dict[str, Any]
# How far a box may end from the edge of a window and still be taken for one that the edge cuts.
EDGE = 2.0
# Pieces that are compared with whole boxes at a time.
PIECES = 256
# Boxes up to this many are all compared with each other.
FEW = 100_000


def find_in_windows(
    detect: Callable[[Sequence[Tensor]], list[Found]],
    image: Tensor,
    *,
    window: int,
    overlap: float,
    nms: float,
    count: int,
    at_once: int = 4,
) -> Found:
    """The objects of an image, found in square windows that share `overlap` of their side.

    A box that the edge of a window cuts is kept only where no other window saw more of the object: where less than half
    of it is in a box of its class. The rest is merged by NMS of each class.

    Args:
        detect: images to detections of each; their masks are dense or `PlacedMasks`, and so are those that come out.
        image: (3, H, W).
        window: side of a window.
        overlap: share of the side, best more than the largest object.
        nms: overlap of two boxes of which the worse is dropped.
        count: at most as many objects.
        at_once: windows in a batch.
    """
    height, width = image.shape[1:]
    step = max(round(window * (1 - overlap)), 1)
    rows, columns = window_starts(height, window, step), window_starts(width, window, step)
    corners = [(top, left) for top in rows for left in columns]
    parts: list[tuple[Found, int, int]] = []
    for i in range(0, len(corners), at_once):
        some = corners[i : i + at_once]
        found = detect([image[:, top : top + window, left : left + window] for top, left in some])
        parts += [(part, *corner) for part, corner in zip(found, some, strict=True)]
    boxes = torch.cat([part["boxes"] + part["boxes"].new_tensor([left, top, left, top]) for part, top, left in parts])
    scores, labels = (torch.cat([part[key] for part, _, _ in parts]) for key in ("scores", "labels"))
    cut = torch.cat([_cut(part["boxes"], top, left, window, (height, width)) for part, top, left in parts])
    whole, pieces = (~cut).nonzero()[:, 0], cut.nonzero()[:, 0]
    whole = whole[near_nms(boxes[whole], scores[whole], labels[whole], nms)]
    pieces = torch.cat([_uncovered(some, whole, boxes, labels) for some in pieces.split(PIECES)])
    keep = torch.cat([whole, pieces[near_nms(boxes[pieces], scores[pieces], labels[pieces], nms)]])
    keep = keep[scores[keep].argsort(descending=True, stable=True)][:count]
    merged: Found = {"boxes": boxes[keep], "scores": scores[keep], "labels": labels[keep]}
    if "masks" in parts[0][0]:
        owners = [(part["masks"], i, top, left) for part, top, left in parts for i in range(len(part["masks"]))]
        masks = PlacedMasks([_crop(*owners[place]) for place in keep.tolist()], (height, width))
        merged["masks"] = masks if isinstance(parts[0][0]["masks"], PlacedMasks) else masks.dense()
    return merged


def _cut(boxes: Tensor, top: int, left: int, window: int, size: tuple[int, int]) -> Tensor:
    """Which boxes end at an edge of their window that is not an edge of the image."""
    height, width = size
    return (
        (boxes[:, 0] < EDGE) & (left > 0)
        | (boxes[:, 1] < EDGE) & (top > 0)
        | (boxes[:, 2] > window - EDGE) & (left + window < width)
        | (boxes[:, 3] > window - EDGE) & (top + window < height)
    )


def near_nms(boxes: Tensor, scores: Tensor, labels: Tensor, nms: float) -> Tensor:
    """`batched_nms`, which compares each box that is kept with all others; here with those nearby, where they are many.

    Boxes that overlap have their middles in one cell as large as the largest box, or in cells next to each other.
    """
    if len(boxes) <= FEW:
        return batched_nms(boxes, scores, labels, nms)
    side = float((boxes[:, 2:] - boxes[:, :2]).max().clamp(min=1.0))
    cells = torch.cat([((boxes[:, :2] + boxes[:, 2:]) / 2 / side).floor(), labels[:, None]], 1).long().tolist()
    areas = box_area(boxes)
    kept: dict[tuple[int, ...], list[int]] = defaultdict(list)
    found = []
    for place in scores.argsort(descending=True, stable=True).tolist():
        column, row, label = cells[place]
        near = [i for c in range(column - 1, column + 2) for r in range(row - 1, row + 2) for i in kept[c, r, label]]
        low, high = torch.maximum(boxes[near, :2], boxes[place, :2]), torch.minimum(boxes[near, 2:], boxes[place, 2:])
        common = (high - low).clamp(min=0).prod(1)
        if not (common > nms * (areas[near] + areas[place] - common)).any():
            kept[column, row, label].append(place)
            found.append(place)
    return torch.tensor(found, dtype=torch.int64, device=boxes.device)


def _uncovered(pieces: Tensor, whole: Tensor, boxes: Tensor, labels: Tensor) -> Tensor:
    """The pieces without a whole box of their class that has more than half of them; only near ones are compared, as
    pieces are in the order of their windows."""
    if not len(pieces):
        return pieces
    low, high = boxes[pieces, :2].amin(0), boxes[pieces, 2:].amax(0)
    whole = whole[((boxes[whole, 2:] > low) & (boxes[whole, :2] < high)).all(1)]
    ours, theirs = boxes[pieces], boxes[whole]
    starts = torch.maximum(ours[:, None, :2], theirs[None, :, :2])
    common = (torch.minimum(ours[:, None, 2:], theirs[None, :, 2:]) - starts).clamp(min=0).prod(2)
    covered = common / (ours[:, 2:] - ours[:, :2]).clamp(min=0).prod(1, keepdim=True).clamp(min=1e-6)
    return pieces[((covered <= 0.5) | (labels[pieces, None] != labels[None, whole])).all(1)]


def _crop(masks: Any, index: int, top: int, left: int) -> tuple[Tensor, int, int]:
    """A mask of a window, as a crop of the image."""
    if isinstance(masks, PlacedMasks):
        crop, down, along = masks.crops[index]
        return crop, top + down, left + along
    return masks[index], top, left
