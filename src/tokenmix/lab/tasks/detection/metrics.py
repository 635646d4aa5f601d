"""Average precision as COCO measures it, of boxes or of masks."""

from itertools import chain, zip_longest
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics.detection import MeanAveragePrecision

from tokenmix.errors import needs

NUMBERS = ("map", "map_50", "map_75", "map_small", "map_medium", "map_large", "mar")
"""What is measured; next to them `per_class`, one number for each class."""


class AveragePrecision(MeanAveragePrecision):
    """torchmetrics' mAP by pycocotools, averaged here from its table of precisions.

    `map` is the mean over overlaps of 0.5, 0.55, ..., 0.95 and over the classes that occur; small ends at an area of
    32 x 32 pixels, medium at 96 x 96; `mar` is the recall. The area of a true object is its target's `area`, which COCO
    annotates; that of its mask, or of its box, where there is none. -1 where nothing of the kind is in the data.
    torchmetrics' own averages are -1 for any other number of boxes in an image than 100, and its averages by class run
    COCO's evaluation once more for each.

    Masks are kept run-length encoded, so thousands of images fit in memory.

    Args:
        iou: of boxes; or of masks, and under `box_*` of their boxes as well. (Of masks alone torchmetrics drops the
            images in which there are none, found or true.)
        num_classes: length of `per_class`.
        count: boxes of an image that count, those of the highest scores.
    """

    def __init__(self, iou: Literal["bbox", "segm"], *, num_classes: int, count: int = 100) -> None:
        self.kinds = {"": ""} if iou == "bbox" else {"": "segm_", "box_": "bbox_"}
        with needs("COCO's average precision"):
            import pycocotools  # noqa: F401  (torchmetrics' backend)
        super().__init__(
            iou_type="bbox" if iou == "bbox" else ("bbox", "segm"),
            extended_summary=True,
            max_detection_thresholds=[1, min(10, count), count],
            backend="pycocotools",
            sync_on_compute=False,
        )
        self.warn_on_many_detections = False
        self.num_classes = num_classes

    def update(self, preds: list[dict[str, Tensor]], target: list[dict[str, Tensor]]) -> None:
        """Add images: what is found in each, and what is there."""
        # torchmetrics takes an area of 0 for one that is not given.
        known = [{**one, "area": one["area"].clamp_min(1e-6)} if "area" in one else one for one in target]
        super().update(preds, known)

    def compute(self) -> dict[str, Any]:
        """The numbers of `NUMBERS`, and `per_class` (num_classes,)."""
        own = self.metric_state
        if dist.is_initialized():
            self._take(_of_all_processes(own))
        found = super().compute()
        self._take(own)
        named = {ours: self._numbers(found, theirs) for ours, theirs in self.kinds.items()}
        return {f"{prefix}{name}": value for prefix, values in named.items() for name, value in values.items()}

    def _take(self, state: dict[str, Any]) -> None:
        for name, values in state.items():
            setattr(self, name, [_moved(value, self.device) for value in values])

    def _numbers(self, found: dict[str, Any], kind: str) -> dict[str, Tensor]:
        shape = (10, 101, 0, 4, 3)
        precision = found.get(f"{kind}precision", torch.empty(shape)).float()[..., -1]
        recall = found.get(f"{kind}recall", torch.empty(10, 0, 4, 3)).float()[..., -1]
        parts = (precision[..., 0], precision[0, ..., 0], precision[5, ..., 0], *precision[..., 1:].unbind(-1))
        values = dict(zip(NUMBERS, [_mean(part) for part in (*parts, recall[..., 0])], strict=True))
        per_class = torch.full((self.num_classes,), -1.0)
        for i, label in enumerate(found["classes"].reshape(-1).tolist() if precision.shape[2] else []):
            per_class[label] = _mean(precision[:, :, i, 0])
        return {**values, "per_class": per_class}


def _moved(value: Any, device: Any) -> Any:
    """A tensor on another device; masks are run lengths, which are on none."""
    return value.to(device) if isinstance(value, Tensor) else value


def _mean(values: Tensor) -> Tensor:
    """The mean over what COCO evaluated; it marks the rest by -1."""
    known = values[values > -1]
    return known.mean() if len(known) else torch.tensor(-1.0)


def _of_all_processes(state: dict[str, Any]) -> dict[str, Any]:
    """The images of all processes in the order of one, process r having every R-th.

    torchmetrics gathers image by image, and hangs, or mixes them up, if one process has one more.
    """
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, {name: [_moved(value, "cpu") for value in values] for name, values in state.items()})
    rows = {name: chain(*zip_longest(*(part[name] for part in parts))) for name in state}
    return {name: [value for value in values if value is not None] for name, values in rows.items()}
