"""What is found in an image as rows, as COCO's results, and drawn on it."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import ImageColor
from torch import Tensor
from torchvision.ops import box_convert
from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

from tokenmix.data.scenes.coco import encode_mask

# Bright ones, since what they are drawn on is a photograph, with much green, blue and grey in it.
COLORS = (
    "#ffe11a", "#1ae5ff", "#ff4dff", "#ff8c1a", "#66ff33", "#ff3b3b", "#4d79ff", "#b366ff", "#99ffcc", "#ffb3c6"
)  # fmt: skip


def class_color(label: int) -> tuple[int, ...]:
    """Red, green and blue, 0 to 255, in which objects of a class are drawn; they come again after ten classes."""
    return ImageColor.getrgb(COLORS[label % len(COLORS)])


def image_numbers(files: Sequence[str | Path]) -> list[int]:
    """COCO's image_id of each: the number at the end of its name, as in 000000000042.jpg and
    COCO_val2014_000000000042.jpg; their indices in the list if not all have one of their own."""
    ends = [re.search(r"(?<![0-9])[0-9]{1,15}$", Path(file).stem) for file in files]
    numbers = [int(end[0]) for end in ends if end]
    return numbers if len(set(numbers)) == len(files) else list(range(len(files)))


def object_rows(file: str, found: Mapping[str, Tensor], classes: Sequence[str]) -> list[dict[str, Any]]:
    """One row for each object, the most confident first; a row without a label where there is none."""
    rows = []
    for i, (label, score, box) in enumerate(_objects(found)):
        row = {"file": file, "label": classes[label], "score": round(score, 4), "box": [round(v, 1) for v in box]}
        rows.append(row | ({"pixels": int(found["masks"][i].sum())} if "masks" in found else {}))
    names = ("label", "score", "box", "pixels")[: 4 if "masks" in found else 3]
    return rows or [{"file": file, **dict.fromkeys(names)}]


def coco_results(
    found: Mapping[str, Tensor], *, image_id: int, file: str, category_ids: Sequence[int]
) -> list[dict[str, Any]]:
    """The objects of an image in COCO's form of results: box as left, top, width, height; masks run-length encoded."""
    entries = []
    for i, (label, score, box) in enumerate(_objects(found)):
        entry = {
            "image_id": image_id, "category_id": category_ids[label], "bbox": [round(v, 2) for v in box],
            "score": round(score, 5), "file_name": file,
        }  # fmt: skip
        entries.append({**entry, **({"segmentation": encode_mask(found["masks"][i])} if "masks" in found else {})})
    return entries


def draw_objects(image: Tensor, found: Mapping[str, Tensor], classes: Sequence[str]) -> Tensor:
    """The image, uint8 (3, H, W), with boxes, names and scores, and masks if there are any."""
    if not len(found["boxes"]):
        return image
    colors = [class_color(label) for label in found["labels"].tolist()]
    if "masks" in found:
        image = draw_segmentation_masks(image, found["masks"].cpu(), alpha=0.45, colors=colors)  # type: ignore[arg-type]
    names = [f"{classes[label]} {score:.2f}" for label, score, _ in _objects(found)]
    # Names over dozens of boxes hide what is in them.
    shown = names if len(names) <= 20 and min(image.shape[1:]) >= 200 else None
    width = 1 if min(image.shape[1:]) < 400 else 2
    return draw_bounding_boxes(image, found["boxes"].cpu(), labels=shown, colors=colors, width=width)  # type: ignore[arg-type]


def _objects(found: Mapping[str, Tensor]) -> list[tuple[int, float, list[float]]]:
    """Label, score and box as left, top, width, height."""
    boxes = box_convert(found["boxes"].detach().cpu().float(), "xyxy", "xywh").tolist()
    return list(zip(found["labels"].tolist(), found["scores"].tolist(), boxes, strict=True))
