"""Average precision as COCO measures it, of boxes or of masks."""

import contextlib
import io
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, Literal

import torch
from torch import Tensor

from tokenmix.errors import needs
from tokenmix.lab.tasks.detection.matching import OVERLAPS, RECALLS, encoded
from tokenmix.lab.train.distributed import all_gather
from tokenmix.lab.train.metrics import Metric

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
        self.kinds = {"": "bbox"} if iou == "bbox" else {"": "segm", "box_": "bbox"}
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

    def _evaluated(self, images: Sequence[tuple[list[dict[str, Any]], ...]], kind: str) -> dict[str, Tensor]:
        from pycocotools.coco import COCO
        from pycocotools.cocoeval import COCOeval

        with contextlib.redirect_stdout(io.StringIO()):
            sides = COCO(), COCO()
            for place, side in enumerate(sides):
                rows = [(number, row) for number, image in enumerate(images) for row in image[place]]
                side.dataset = {
                    "images": [{"id": number, **_size(image)} for number, image in enumerate(images)],
                    "categories": [{"id": label} for label in range(self.num_classes)],
                    # 0 would stand for no object.
                    "annotations": [
                        {**row, "id": i, "image_id": number, "area": row["areas"][kind]}
                        for i, (number, row) in enumerate(rows, 1)
                    ],
                }
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
