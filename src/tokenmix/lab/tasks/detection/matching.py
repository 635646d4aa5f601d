"""Which detections are right, image by image, and the average precision of images that count several times."""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

# In single precision, as most of COCO's users have them.
OVERLAPS = torch.linspace(0.5, 0.95, 10).double()
RECALLS = torch.linspace(0.0, 1.0, 101).double()


def matched_rows(
    found: Mapping[str, Tensor], there: Mapping[str, Tensor], index: int, kind: Literal["boxes", "masks"]
) -> dict[str, Tensor]:
    """Columns of one image: a row of table `found` for each detection, of `there` for each object that counts.

    `found.right` and `found.ignored` have a bit for each of the ten overlaps: the detection is of an object, or of a
    region of a crowd, which counts for nothing.
    """
    order = found["scores"].argsort(descending=True, stable=True)
    scores, labels = found["scores"][order].cpu(), found["labels"][order].cpu()
    objects, crowd = there["labels"].cpu(), there["iscrowd"].cpu().bool()
    right, ignored = (torch.zeros(len(OVERLAPS), len(scores), dtype=torch.bool) for _ in range(2))
    ours, theirs = (encoded(one[kind].cpu(), kind) for one in ({kind: found[kind][order]}, there))
    for label in labels.unique().tolist():
        mine, true = (labels == label).nonzero()[:, 0], (objects == label).nonzero()[:, 0]
        overlap = _overlaps([ours[i] for i in mine], [theirs[i] for i in true], crowd[true])
        right[:, mine], ignored[:, mine] = match(overlap, crowd[true])
    bits = 1 << torch.arange(len(OVERLAPS))
    counted = objects[~crowd]
    return {
        "index": torch.tensor([index]),
        "found.index": torch.full((len(scores),), index),
        "found.label": labels.short(),
        "found.score": scores.float(),
        "found.right": (right * bits[:, None]).sum(0).short(),
        "found.ignored": (ignored * bits[:, None]).sum(0).short(),
        "there.index": torch.full((len(counted),), index),
        "there.label": counted.short(),
    }


def match(overlap: Tensor, crowd: Tensor) -> tuple[Tensor, Tensor]:
    """COCO's greedy matching of one class in one image, at each of the ten overlaps.

    A detection takes the free object that it overlaps most, else a crowd, which may be taken again.

    Shape:
        overlap (D, G) of detections by falling score, crowd bool (G,); returns right and ignored, bool (10, D).
    """
    rows, columns = overlap.shape
    right, ignored = (torch.zeros(len(OVERLAPS), rows, dtype=torch.bool) for _ in range(2))
    free = (~crowd).repeat(len(OVERLAPS), 1)
    for row in range(rows if columns else 0):
        enough = overlap[row] >= OVERLAPS[:, None]
        wanted = torch.where(enough & free, overlap[row], -1.0)
        # Of equal overlaps the last, as COCO's.
        best = columns - 1 - wanted.flip(1).argmax(1)
        taken = wanted.amax(1) >= 0
        right[:, row], ignored[:, row] = taken, ~taken & (enough & crowd).any(1)
        free[taken, best[taken]] = False
    return right, ignored


def average_precision(
    predictions: Mapping[str, Tensor], weights: Tensor, classes: int, overlaps: range = range(10)
) -> Tensor:
    """COCO's mean average precision, each image counting so often; nan where no object is.

        AP = 1/101 sum_r max_{r' >= r} precision(r'),   r = 0, 0.01, ..., 1

    Args:
        predictions: columns of `matched_rows`, of all images.
        weights: float64 (R, n), of the images in the order of `index`.
        classes: number of classes.
        overlaps: those of the ten that the mean is over.

    Returns:
        (R,)
    """
    means = []
    for label in range(classes):
        rows = (predictions["found.label"] == label).nonzero()[:, 0]
        rows = rows[predictions["found.score"][rows].argsort(descending=True, stable=True)]
        objects = predictions["there.index"][predictions["there.label"] == label]
        total = weights[:, torch.searchsorted(predictions["index"], objects)].sum(1, keepdim=True)
        own = weights[:, torch.searchsorted(predictions["index"], predictions["found.index"][rows])]
        each = []
        for bit in overlaps:
            right, ignored = ((predictions[f"found.{name}"][rows] >> bit & 1).bool() for name in ("right", "ignored"))
            hits, misses = (own * right).cumsum(1), (own * ~(right | ignored)).cumsum(1)
            precision = hits / (hits + misses).clamp_min(torch.finfo(torch.float64).tiny)
            envelope = precision.flip(1).cummax(1).values.flip(1) if len(rows) else precision
            padded = torch.cat([envelope, torch.zeros_like(total)], 1)
            place = torch.searchsorted((hits / total).contiguous(), RECALLS.expand(len(weights), -1).contiguous())
            each.append(padded.gather(1, place).mean(1))
        means.append(torch.where(total[:, 0] > 0, torch.stack(each).mean(0), torch.nan))
    return torch.stack(means).nanmean(0)


def encoded(shapes: Tensor, kind: Literal["boxes", "masks"]) -> list[Any]:
    """As pycocotools takes them: boxes as left, top, width and height, masks as run lengths."""
    if kind == "boxes":
        return torch.cat([shapes[:, :2], shapes[:, 2:] - shapes[:, :2]], 1).double().tolist()
    from pycocotools.mask import encode

    return [encode(np.asfortranarray(mask.byte().numpy())) for mask in shapes]


def _overlaps(found: list[Any], there: list[Any], crowd: Tensor) -> Tensor:
    """Intersection over union float64 (D, G); with a crowd over the detection alone."""
    from pycocotools.mask import iou

    if not found or not there:
        return torch.zeros(len(found), len(there), dtype=torch.float64)
    return torch.from_numpy(np.asarray(iou(found, there, crowd.int().tolist()), dtype=np.float64))
