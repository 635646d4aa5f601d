"""A user's own set for segmentation: images, and for each a PNG of the same name whose pixels are numbers of classes.

    PATH/train/images/a.jpg    PATH/train/masks/a.png
    PATH/val/images/b.jpg      PATH/val/masks/b.png      (val may be called test)
    PATH/classes.txt           one name a line, the first is class 0; optional

255 is ignored.
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from tokenmix.data.lookup import DataRequest
from tokenmix.data.scenes.pairs import PairScenes, images_below, lines_of, numbers_table, read_numbers
from tokenmix.data.scenes.scenes import IMAGENET, SceneData, bit_palette
from tokenmix.errors import UserError

__all__ = ["load_masks"]

IGNORE = 255
LAYOUT = "train/images, train/masks, val/images and val/masks"


def load_masks(request: DataRequest) -> SceneData:
    """Training and validation images; without classes.txt the training masks say how many classes there are."""
    root = request.path
    if not (root / "train").is_dir():
        raise UserError(f"{root} has no folder train; give one with {LAYOUT}")
    held_out = next((part for part in ("val", "test") if (root / part).is_dir()), None)
    if held_out is None:
        raise UserError(f"{root} has neither val nor test to evaluate on; give a folder with {LAYOUT}")
    train, test = (_pairs(root / part) for part in ("train", held_out))
    classes = _names(root, train)
    table = numbers_table({IGNORE: IGNORE, **{i: i for i in range(len(classes))}})
    return SceneData(
        spec=request.spec,
        train=PairScenes(train, table),
        test=PairScenes(test, table),
        classes=classes,
        ignore=IGNORE,
        palette=bit_palette(len(classes)),
        mean=IMAGENET[0],
        std=IMAGENET[1],
        crop=None,
        source=f"images and masks in {root}",
    )


def _pairs(part: Path) -> list[tuple[Path, Path]]:
    folder = part / "images"
    return [(image, part / "masks" / image.relative_to(folder).with_suffix(".png")) for image in images_below(folder)]


def _names(root: Path, pairs: Sequence[tuple[Path, Path]]) -> list[str]:
    path = root / "classes.txt"
    if path.is_file():
        names = lines_of(path, "classes")
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise UserError(f"{path} names {twice!r} more than once; give each class a name of its own")
    else:
        seen = torch.cat(
            [read_numbers(labels).unique() for _, labels in pairs if labels.is_file()] or [torch.tensor([0])]
        )
        seen = seen[seen != IGNORE]
        names = [f"class {i}" for i in range(int(seen.max()) + 1 if len(seen) else 0)]
    if not 2 <= len(names) <= IGNORE:
        raise UserError(f"{root} has {len(names)} classes; give 2 to {IGNORE}, by classes.txt or in train/masks")
    return names
