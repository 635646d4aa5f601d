"""What a segmenter's predictions look like as files: masks in colours, overlays, shares and masks as JSON."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor
from torchvision.transforms.functional import to_pil_image

from tokenmix.data.scenes.coco import encode_mask
from tokenmix.files import replacing, write_json

VEIL = 0.5


def shares(classes: Tensor, names: Sequence[str]) -> dict[str, float]:
    """Share of the pixels of each class that occurs, the largest first."""
    counts = classes.flatten().bincount(minlength=len(names)).tolist()
    found = sorted(((count, name) for count, name in zip(counts, names, strict=True) if count), reverse=True)
    return {name: round(count / classes.numel(), 6) for count, name in found}


def run_lengths(classes: Tensor, names: Sequence[str]) -> list[dict[str, Any]]:
    """One mask for each class that occurs, in COCO's compressed run lengths; empty without pycocotools."""
    if find_spec("pycocotools") is None:
        return []
    chosen = {label: classes == label for label in classes.unique().tolist()}
    return [
        {"category_id": i, "category": names[i], "area": int(mask.sum()), "segmentation": encode_mask(mask)}
        for i, mask in chosen.items()
    ]


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
        classes: int64 (H, W).
        answer: what was printed.
        names: of the classes.
        palette: colour of each class, 0 to 255.
        stem: where, and how the names begin.
    """
    picture = Image.fromarray(classes.byte().numpy(), mode="P")
    picture.putpalette([level for colour in palette for level in colour])
    files = [stem.with_name(f"{stem.name}{end}") for end in ("-mask.png", "-overlay.png", ".json")]
    for file, shown in zip(files, (picture, Image.blend(to_pil_image(image), picture.convert("RGB"), VEIL))):
        with replacing(file) as partial:
            shown.save(partial)
    colors = {names[label]: "#{:02x}{:02x}{:02x}".format(*palette[label]) for label in classes.unique().tolist()}
    told = {**answer, "colors": colors, "masks": run_lengths(classes, names)}
    write_json(files[2], told)
    return [str(file) for file in files]
