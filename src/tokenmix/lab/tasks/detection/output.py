"""What is found in an image as rows, as COCO's results, and drawn on it."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageColor, ImageDraw, ImageFont
from torch import Tensor
from torchvision.ops import box_convert

from tokenmix.lab.data.scenes.coco import encode_mask

# Bright ones, since what they are drawn on is a photograph, with much green, blue and grey in it.
COLORS = ("#ffe11a", "#1ae5ff", "#ff4dff", "#ff8c1a", "#66ff33", "#ff3b3b", "#4d79ff", "#b366ff", "#99ffcc", "#ffb3c6")


VEIL = 0.45


def class_color(label: int) -> tuple[int, ...]:
    """Red, green and blue, 0 to 255, in which objects of a class are drawn; they come again after ten classes."""
    return ImageColor.getrgb(COLORS[label % len(COLORS)])


def image_numbers(files: Sequence[str | Path]) -> list[int]:
    """COCO's image_id of each: the number at the end of its name, as in 000000000042.jpg and
    COCO_val2014_000000000042.jpg; their indices in the list if not all have one of their own."""
    ends = [re.search(r"(?<![0-9])[0-9]{1,15}$", Path(file).stem) for file in files]
    numbers = [int(end[0]) for end in ends if end]
    return numbers if len(set(numbers)) == len(files) else list(range(len(files)))


def object_rows(file: str, found: Mapping[str, Any], classes: Sequence[str]) -> list[dict[str, Any]]:
    """One row for each object, the most confident first; a row without a label where there is none."""
    rows = []
    for i, (label, score, box) in enumerate(_objects(found)):
        row = {"file": file, "label": classes[label], "score": round(score, 4), "box": [round(v, 1) for v in box]}
        rows.append(row | ({"pixels": int(found["masks"].crops[i][0].count_nonzero())} if "masks" in found else {}))
    names = ("label", "score", "box", "pixels")[: 4 if "masks" in found else 3]
    return rows or [{"file": file, **dict.fromkeys(names)}]


def coco_results(
    found: Mapping[str, Any], *, image_id: int, file: str, category_ids: Sequence[int]
) -> list[dict[str, Any]]:
    """The objects of an image in COCO's form of results: box as left, top, width, height; masks run-length encoded."""
    entries = []
    for i, (label, score, box) in enumerate(_objects(found)):
        entry: dict[str, Any] = {
            "image_id": image_id,
            "category_id": category_ids[label],
            "bbox": [round(v, 2) for v in box],
            "score": round(score, 5),
            "file_name": file,
        }
        if "masks" in found:
            entry["segmentation"] = encode_mask(found["masks"].whole(i))
        entries.append(entry)
    return entries


def draw_objects(
    image: Image.Image,
    found: Mapping[str, Any],
    classes: Sequence[str],
    first: int = 0,
    size: tuple[int, int] | None = None,
) -> Image.Image:
    """The image in RGB with masks, boxes, names and scores drawn on it; one in RGB is changed itself.

    Args:
        image: the whole one, or a strip of it.
        found: in the whole image.
        classes: their names.
        first: the first row of the strip.
        size: (height, width) of the whole; the image's own if None.
    """
    image = image if image.mode == "RGB" else image.convert("RGB")
    colors = [class_color(label) for label in found["labels"].tolist()]
    for color, (crop, top, left) in zip(colors, found["masks"].crops if "masks" in found else ()):
        if crop.numel():
            corner, veil = (left, top - first), Image.fromarray(crop.numpy().astype("uint8") * round(255 * VEIL))
            image.paste(color, corner, veil)
    # Names over dozens of boxes hide what is in them.
    side = min(size or image.size)
    named, width = len(colors) <= 20 and side >= 200, 1 if side < 400 else 2
    pen, font = ImageDraw.Draw(image), ImageFont.load_default()
    boxes = (found["boxes"].long() - torch.tensor([0, first, 0, first])).tolist()
    for color, box, (label, score, _) in zip(colors, boxes, _objects(found), strict=False):
        pen.rectangle(box, width=width, outline=color)
        if named:
            corner = (box[0] + width + 1, box[1] + width + 1)
            pen.text(corner, f"{classes[label]} {score:.2f}", fill=color, font=font)
    return image


def _objects(found: Mapping[str, Tensor]) -> list[tuple[int, float, list[float]]]:
    """Label, score and box as left, top, width, height."""
    boxes = box_convert(found["boxes"].detach().cpu().float(), "xyxy", "xywh").tolist()
    return list(zip(found["labels"].tolist(), found["scores"].tolist(), boxes, strict=True))
