"""Which detections are right, image by image, and average precision as COCO measures it, of boxes or of masks."""

import contextlib
import io
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from tokenmix.errors import needs
from tokenmix.lab.train.distributed import all_gather
from tokenmix.lab.train.metrics import Metric

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


NUMBERS = ("map", "map_50", "map_75", "map_small", "map_medium", "map_large", "mar")


class AveragePrecision(Metric):
    """COCO's average precision by pycocotools.

    `map` is the mean over overlaps of 0.5, 0.55, ..., 0.95 and over the classes that occur; small ends at an area of
    32 x 32 pixels, medium at 96 x 96; `mar` is the recall; `per_class` (num_classes,) has the mean of each class. The
    area of a true object is its target's `area`, which COCO annotates; that of its mask, or of its box, where there is
    none. -1 where nothing of the kind is in the data.

    Masks are kept run-length encoded, so thousands of images fit in memory.

    Args:
        iou: of boxes; or of masks, and under `box_*` of their boxes as well.
        num_classes: length of `per_class`.
        count: boxes of an image that count, those of the highest scores.
    """

    higher_is_better = True

    def __init__(self, iou: Literal["bbox", "segm"], *, num_classes: int, count: int = 100) -> None:
        with needs("COCO's average precision"):
            import pycocotools  # noqa: F401
        self.kinds: dict[str, Literal["bbox", "segm"]] = {"": "bbox"} if iou == "bbox" else {"": "segm", "box_": "bbox"}
        self.names = tuple(f"{prefix}{name}" for prefix in self.kinds for name in (*NUMBERS, "per_class"))
        self.num_classes, self.count = num_classes, count
        self.reset()

    def reset(self) -> None:
        self.images: list[tuple[list[dict[str, Any]], list[dict[str, Any]]]] = []

    def update(self, preds: Sequence[Mapping[str, Tensor]], target: Sequence[Mapping[str, Tensor]]) -> None:
        """Add images: what is found in each, and what is there."""
        self.images += [(self._rows(found), self._rows(there)) for found, there in zip(preds, target, strict=True)]

    def _rows(self, objects: Mapping[str, Tensor]) -> list[dict[str, Any]]:
        """Objects of an image as COCO's annotations, with their areas by kind."""
        boxes = encoded(objects["boxes"].detach().cpu(), "boxes")
        columns: dict[str, list[Any]] = {
            "category_id": objects["labels"].tolist(),
            "bbox": boxes,
            "score": objects["scores"].tolist() if "scores" in objects else [0.0] * len(boxes),
            "iscrowd": objects["iscrowd"].int().tolist() if "iscrowd" in objects else [0] * len(boxes),
            "areas": [{"bbox": width * height} for _, _, width, height in boxes],
        }
        rows = [dict(zip(columns, values)) for values in zip(*columns.values(), strict=True)]
        if "segm" in self.kinds.values():
            from pycocotools.mask import area

            for row, mask in zip(rows, encoded(objects["masks"].detach().cpu(), "masks"), strict=True):
                row["segmentation"], row["areas"]["segm"] = mask, float(area(mask))
        if "area" in objects:
            for row, given in zip(rows, objects["area"].tolist(), strict=True):
                row["areas"] = dict.fromkeys(row["areas"], given)
        return rows

    def compute(self) -> dict[str, Tensor]:
        """The numbers by their names; of all processes, process r having every R-th image."""
        images = [image for row in zip_longest(*all_gather(self.images)) for image in row if image is not None]
        found = {prefix: self._evaluated(images, kind) for prefix, kind in self.kinds.items()}
        return {f"{prefix}{name}": value for prefix, values in found.items() for name, value in values.items()}

    def _evaluated(
        self, images: Sequence[tuple[list[dict[str, Any]], ...]], kind: Literal["bbox", "segm"]
    ) -> dict[str, Tensor]:
        from pycocotools.coco import COCO
        from pycocotools.cocoeval import COCOeval

        with contextlib.redirect_stdout(io.StringIO()):
            sides = COCO(), COCO()
            for place, side in enumerate(sides):
                rows = [(number, row) for number, image in enumerate(images) for row in image[place]]
                dataset: Any = {
                    "images": [{"id": number, **_size(image)} for number, image in enumerate(images)],
                    "categories": [{"id": label} for label in range(self.num_classes)],
                    # 0 would stand for no object.
                    "annotations": [
                        {**row, "id": i, "image_id": number, "area": row["areas"][kind]}
                        for i, (number, row) in enumerate(rows, 1)
                    ],
                }
                side.dataset = dataset
                side.createIndex()
            evaluation = COCOeval(sides[1], sides[0], kind)
            evaluation.params.maxDets = [self.count]
            evaluation.params.iouThrs, evaluation.params.recThrs = OVERLAPS.numpy(), RECALLS.numpy()
            evaluation.evaluate()
            evaluation.accumulate()
        precision, recall = (torch.from_numpy(evaluation.eval[name])[..., 0] for name in ("precision", "recall"))
        whole = precision[..., 0]
        parts = (whole, whole[0], whole[5], *precision[..., 1:].unbind(-1), recall[..., 0])
        values = {name: _mean(part) for name, part in zip(NUMBERS, parts, strict=True)}
        return {**values, "per_class": torch.stack([_mean(one) for one in whole.unbind(2)])}


def _size(image: Sequence[list[dict[str, Any]]]) -> dict[str, int]:
    """Height and width of an image with masks."""
    sizes = (row["segmentation"]["size"] for rows in image for row in rows if "segmentation" in row)
    return dict(zip(("height", "width"), next(sizes, ())))


def _mean(values: Tensor) -> Tensor:
    """The mean over what COCO evaluated; it marks the rest by -1."""
    known = values[values > -1]
    return known.mean() if len(known) else torch.tensor(-1.0, dtype=values.dtype)
