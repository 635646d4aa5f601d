"""What a segmenter's predictions look like as files: masks in colours, overlays, shares and masks as JSON."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from tokenmix.files import replace_file, replacing, write_json
from tokenmix.lab.data.scenes.coco import encode_mask
from tokenmix.lab.tasks.images import PART_ROWS, drawn_png

VEIL = 0.5


def shares(classes: Tensor, names: Sequence[str]) -> dict[str, float]:
    """Share of the pixels of each class that occurs, the largest first."""
    counts = pixel_counts(classes, len(names))
    found = sorted(((count, name) for count, name in zip(counts, names, strict=True) if count), reverse=True)
    return {name: round(count / classes.numel(), 6) for count, name in found}


def veiled(image: Image.Image, classes: Tensor, palette: Sequence[Sequence[int]]) -> Image.Image:
    """The image under the colours of its classes; pixels of a class without a colour are left as they are."""
    table = torch.tensor(palette, dtype=torch.uint8)
    known = (classes >= 0) & (classes < len(table))
    colours = Image.fromarray(table[torch.where(known, classes.long(), 0)].numpy())
    blended = Image.blend(image.convert("RGB"), colours, VEIL)
    return Image.composite(blended, image.convert("RGB"), Image.fromarray(known.byte().mul(255).numpy()))


def pixel_counts(classes: Tensor, count: int) -> list[int]:
    """The pixels of each class."""
    return torch.stack([part.flatten().bincount(minlength=count) for part in classes.split(PART_ROWS)]).sum(0).tolist()


def run_lengths(classes: Tensor, names: Sequence[str]) -> list[dict[str, Any]]:
    """One mask for each class that occurs, in COCO's compressed run lengths; empty without pycocotools."""
    if find_spec("pycocotools") is None:
        return []
    # By columns, as run lengths go, and one mask after the other: each is as large as the image.
    mask, found = torch.empty(classes.shape[::-1], dtype=torch.bool).T, []
    for i, count in enumerate(pixel_counts(classes, len(names))):
        if count:
            torch.eq(classes, i, out=mask)
            found.append({"category_id": i, "category": names[i], "area": count, "segmentation": encode_mask(mask)})
    return found


def write_answer(
    image: Tensor,
    classes: Tensor,
    answer: Mapping[str, Any],
    names: Sequence[str],
    palette: Sequence[Sequence[int]],
    stem: Path,
) -> list[str]:
    """Write STEM-mask.png, STEM-overlay.png and STEM.json, which says the colours; returns their names.

    Args:
        image: uint8 (3, H, W).
        classes: uint8 (H, W).
        answer: what was printed.
        names: of the classes.
        palette: colour of each class, 0 to 255.
        stem: where, and how the names begin.
    """
    mask = Image.fromarray(classes.numpy(), mode="P")
    mask.putpalette([level for colour in palette for level in colour])
    files = [stem.with_name(f"{stem.name}{end}") for end in ("-mask.png", "-overlay.png", ".json")]
    with replacing(files[0]) as partial:
        mask.save(partial)

    def veil(strip: Image.Image, top: int) -> Image.Image:
        return Image.blend(strip, mask.crop((0, top, strip.width, top + strip.height)).convert("RGB"), VEIL)

    replace_file(files[1], drawn_png(image, veil))
    shown = [label for label, count in enumerate(pixel_counts(classes, len(names))) if count]
    colors = {names[label]: "#{:02x}{:02x}{:02x}".format(*palette[label]) for label in shown}
    told = {**answer, "colors": colors, "masks": run_lengths(classes, names)}
    write_json(files[2], told)
    return [str(file) for file in files]
