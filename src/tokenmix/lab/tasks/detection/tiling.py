"""Sliding-window detection in an image that is larger than a detector takes, merged into one list."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torchvision.ops import batched_nms

from tokenmix.files import Values
from tokenmix.lab.tasks.images import window_starts
from tokenmix.models.detection.pictures import PlacedMasks

Found = Values
# How far a box may end from the edge of a window and still be taken for one that the edge cuts.
EDGE = 2.0
# Pieces that are compared with whole boxes at a time.
PIECES = 256


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
        detect: images to detections of each; their masks are `PlacedMasks`, and so are those that come out.
        image: (3, H, W).
        window: side of a window, of which `overlap` is best more than the largest object.
        nms: overlap of two boxes of which the worse is dropped.
        count: at most as many objects.
        at_once: windows in a batch.
    """
    height, width = image.shape[1:]
    step = max(round(window * (1 - overlap)), 1)
    rows, columns = window_starts(height, window, step), window_starts(width, window, step)
    parts, crops, seen = list[tuple[Tensor, ...]](), list[tuple[Tensor, int, int]](), list[Found]()
    for top in rows:
        seen = []
        for i in range(0, len(columns), at_once):
            seen += detect([image[:, top : top + window, left : left + window] for left in columns[i : i + at_once]])
        # A row together: thousands of small tensors among what the detector allocates would keep that memory.
        boxes, scores, labels = (torch.cat([one[name] for one in seen]) for name in ("boxes", "scores", "labels"))
        lefts = torch.tensor(columns).repeat_interleave(torch.tensor([len(one["boxes"]) for one in seen]))
        starts = torch.stack([lefts, torch.full_like(lefts, top)], 1).to(boxes)
        parts.append((starts, boxes + starts.repeat(1, 2), scores, labels))
        found = [(*crop, left) for one, left in zip(seen, columns) if "masks" in one for crop in one["masks"].crops]
        crops += [(mask, top + y, left + x) for mask, y, x, left in found]
    starts, boxes, scores, labels = map(torch.cat, zip(*parts))
    # Those that end at an edge of their window which is not an edge of the image.
    ends = starts + window
    at_start = (boxes[:, :2] < starts + EDGE) & (starts > 0)
    at_end = (boxes[:, 2:] > ends - EDGE) & (ends < boxes.new_tensor([width, height]))
    cut = (at_start | at_end).any(1)
    whole, pieces = (~cut).nonzero()[:, 0], cut.nonzero()[:, 0]
    whole = whole[batched_nms(boxes[whole], scores[whole], labels[whole], nms)]
    pieces = torch.cat([_uncovered(some, whole, boxes, labels) for some in pieces.split(PIECES)])
    keep = torch.cat([whole, pieces[batched_nms(boxes[pieces], scores[pieces], labels[pieces], nms)]])
    keep = keep[scores[keep].argsort(descending=True, stable=True)][:count]
    merged: Found = {"boxes": boxes[keep], "scores": scores[keep], "labels": labels[keep]}
    if "masks" in seen[0]:
        merged["masks"] = PlacedMasks([crops[place] for place in keep.tolist()], (height, width))
    return merged


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
