"""Matching of detections image by image, and COCO's average precision of boxes or masks."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from tokenmix.errors import needs
from tokenmix.lab.train.metrics import Metric, Rows

# In double precision, as in pycocotools: overlaps of whole pixels are often 0.6 or 0.8.
OVERLAPS = torch.from_numpy(np.linspace(0.5, 0.95, 10))
RECALLS = torch.from_numpy(np.linspace(0.0, 1.0, 101))
BITS = 1 << torch.arange(len(OVERLAPS))
SIZES = torch.tensor([[0, 1e10], [0, 32**2], [32**2, 96**2], [96**2, 1e10]], dtype=torch.float64)
"""Least and largest area: all objects, small, medium and large ones."""
Kind = Literal["boxes", "masks"]


def matched_rows(found: Mapping[str, Tensor], there: Mapping[str, Tensor], index: int, want: Kind) -> dict[str, Tensor]:
    """Columns of one image: table `found` has a row per detection, `there` a row per object that counts.

    `found.right` and `found.ignored` (D, 4) have a bit per overlap (ten) for each size class. right: the detection
    matches an object. ignored: it matches a crowd region or an object of another size, which do not count. `there.size`
    (G, 4): size classes of an object. For masks, columns of their boxes have the prefix `box_`.
    """
    order = found["scores"].argsort(descending=True, stable=True)
    scores, labels = found["scores"][order].cpu(), found["labels"][order].cpu()
    objects, crowd = there["labels"].cpu(), there["iscrowd"].cpu().bool()
    counted = _within(there["area"].cpu()) & ~crowd
    columns = {
        "index": torch.tensor([index]),
        "found.index": torch.full((len(scores),), index),
        "found.label": labels.short(),
        "found.score": scores.float(),
        "there.index": torch.full((int((~crowd).sum()),), index),
        "there.label": objects[~crowd].short(),
        "there.size": counted[:, ~crowd].T,
    }
    for prefix, kind in _kinds(want).items():
        ours, areas = _encoded(found[kind][order], kind)
        theirs, _ = _encoded(there[kind], kind)
        right, ignored = (torch.zeros(len(SIZES), len(OVERLAPS), len(scores), dtype=torch.bool) for _ in range(2))
        for label in labels.unique().tolist():
            mine, true = (labels == label).nonzero()[:, 0], (objects == label).nonzero()[:, 0]
            overlap = _overlaps([ours[i] for i in mine], [theirs[i] for i in true], crowd[true])
            right[..., mine], ignored[..., mine] = match(overlap, crowd[true], counted[:, true])
        ignored |= ~right & ~_within(areas)[:, None]
        for name, marks in (("right", right), ("ignored", ignored)):
            columns[f"found.{prefix}{name}"] = (marks * BITS[:, None]).sum(1).short().T
    return columns


def match(overlap: Tensor, crowd: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """COCO's greedy matching of one class in one image, at each of the ten overlaps, for each size class.

    A detection takes the free object with the largest overlap, else one that does not count. A crowd can match
    repeatedly.

    Shape: overlap (D, G) of detections by falling score, crowd bool (G,), counted bool (4, G), no crowd and of the size
    class; returns right and ignored, bool (4, 10, D).
    """
    rows, columns = overlap.shape
    right, ignored = (torch.zeros(len(counted), len(OVERLAPS), rows, dtype=torch.bool) for _ in range(2))
    free = torch.ones(len(counted), len(OVERLAPS), columns, dtype=torch.bool)
    for row in range(rows if columns else 0):
        enough = free & (overlap[row] >= OVERLAPS[:, None])
        first = enough & counted[:, None]
        right[..., row] = first.any(-1)
        ignored[..., row] = enough.any(-1) & ~right[..., row]
        wanted = torch.where(torch.where(right[..., row, None], first, enough), overlap[row], -1.0)
        # The last of equal overlaps, as in COCO.
        best = (columns - 1 - wanted.flip(-1).argmax(-1))[..., None]
        free.scatter_(-1, best, crowd[best] | ~enough.any(-1, keepdim=True) & free.gather(-1, best))
    return right, ignored


def object_metrics(want: Kind, classes: Sequence[str]) -> dict[str, Metric]:
    """COCO's metrics of boxes; or of masks, and with prefix `box_` of their boxes.

    `map` is the mean over overlaps of 0.5, 0.55, ..., 0.95 and over the classes that occur. `mar` is the recall.
    `per_class` has the mean of each class. small ends at an area of 32 x 32 pixels, medium at 96 x 96. -1 if the data
    has no such object.
    """
    with needs("COCO's average precision"):
        import pycocotools  # noqa: F401

    def numbers(prefix: str) -> dict[str, Metric]:
        def metric(part: int, size: int = 0, overlaps: range = range(10), names: Sequence[str] | None = None) -> Metric:
            def measure(rows: Rows, weights: Tensor) -> Tensor:
                values = precision_recall(rows, weights, len(classes), prefix, size, overlaps)[part]
                return values.nanmean(1) if names is None else values

            return Metric(measure, names=names, undefined=-1.0)

        return {
            "map": metric(0),
            "map_50": metric(0, overlaps=range(1)),
            "map_75": metric(0, overlaps=range(5, 6)),
            "map_small": metric(0, 1),
            "map_medium": metric(0, 2),
            "map_large": metric(0, 3),
            "mar": metric(1),
            "per_class": metric(0, names=classes),
        }

    return {f"{prefix}{name}": metric for prefix in _kinds(want) for name, metric in numbers(prefix).items()}


def precision_recall(
    rows: Rows, weights: Tensor, classes: int, prefix: str = "", size: int = 0, overlaps: range = range(10)
) -> tuple[Tensor, Tensor]:
    """COCO's average precision and recall per class, with weighted images; nan for a class without objects.

        AP = 1/101 sum_r max_{r' >= r} precision(r'),   r = 0, 0.01, ..., 1

    `rows` are those of `matched_rows` for all images, in columns that start with `prefix`; `size` is an index of
    `SIZES`, and `overlaps`, of ten, are averaged over.

    Shape: weights float64 (R, n), of the images in the order of `index`; returns (R, classes) twice.
    """
    found: list[tuple[Tensor, Tensor]] = []
    for label in range(classes):
        indices = (rows["found.label"] == label).nonzero()[:, 0]
        indices = indices[rows["found.score"][indices].argsort(descending=True, stable=True)]
        objects = rows["there.index"][(rows["there.label"] == label) & rows["there.size"][:, size]]
        total = weights[:, torch.searchsorted(rows["index"], objects)].sum(1, keepdim=True)
        own = weights[:, torch.searchsorted(rows["index"], rows["found.index"][indices])]
        precisions, recalls = [], []
        for bit in overlaps:
            right, ignored = (
                (rows[f"found.{prefix}{name}"][indices, size] >> bit & 1).bool() for name in ("right", "ignored")
            )
            hits, misses = (own * right).cumsum(1), (own * ~(right | ignored)).cumsum(1)
            precision = hits / (hits + misses).clamp_min(torch.finfo(torch.float64).tiny)
            envelope = precision.flip(1).cummax(1).values.flip(1) if len(indices) else precision
            padded = torch.cat([envelope, torch.zeros_like(total)], 1)
            place = torch.searchsorted((hits / total).contiguous(), RECALLS.expand(len(weights), -1).contiguous())
            precisions.append(padded.gather(1, place).mean(1))
            recalls.append(((own * right).sum(1, keepdim=True) / total)[:, 0])
        means = (torch.stack(values).mean(0) for values in (precisions, recalls))
        found.append(tuple(torch.where(total[:, 0] > 0, mean, torch.nan) for mean in means))  # type: ignore[arg-type]
    precision, recall = (torch.stack(values, 1) for values in zip(*found, strict=True))
    return precision, recall


def _kinds(want: Kind) -> dict[str, Kind]:
    return {"": "boxes"} if want == "boxes" else {"": "masks", "box_": "boxes"}


def _within(areas: Tensor) -> Tensor:
    """Which of the four size classes the areas (M,) belong to: bool (4, M)."""
    return (areas.double() >= SIZES[:, :1]) & (areas.double() <= SIZES[:, 1:])


def _encoded(shapes: Tensor, kind: Kind) -> tuple[list[Any], Tensor]:
    """Shapes for pycocotools, boxes as left, top, width and height, masks as run lengths; and their areas."""
    if kind == "boxes":
        boxes = torch.cat([shapes[:, :2], shapes[:, 2:] - shapes[:, :2]], 1).detach().cpu().double()
        return boxes.tolist(), boxes[:, 2:].prod(1)
    from pycocotools.mask import area, encode

    masks = [encode(np.asfortranarray(mask.byte().cpu().numpy())) for mask in shapes]
    return masks, torch.tensor([float(area(mask)) for mask in masks], dtype=torch.float64)


def _overlaps(found: list[Any], there: list[Any], crowd: Tensor) -> Tensor:
    """Intersection over union float64 (D, G); for a crowd, intersection over the detection's area."""
    from pycocotools.mask import iou

    if not found or not there:
        return torch.zeros(len(found), len(there), dtype=torch.float64)
    return torch.from_numpy(np.asarray(iou(found, there, crowd.int().tolist()), dtype=np.float64))
