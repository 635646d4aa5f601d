"""Images with label images: ADE20K, Cityscapes, and users' folders.

Zhou, Zhao, Puig, Fidler, Barriuso and Torralba, "Scene Parsing through ADE20K Dataset", 2017. Cordts et al., "The
Cityscapes Dataset for Semantic Urban Scene Understanding", 2016; the table of classes is torchvision's.
"""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor
from torchvision.datasets import Cityscapes

from tokenmix.errors import UserError
from tokenmix.files import read_bytes
from tokenmix.lab.data.fetch import log
from tokenmix.lab.data.images.decode import UnreadableImage, decode_numbers, read_stored
from tokenmix.lab.data.lookup import DataRequest
from tokenmix.lab.data.reading import NAMED, names_in
from tokenmix.lab.data.scenes import (
    IGNORE,
    Scene,
    SceneData,
    Scenes,
    bit_palette,
    folder_in,
    warn_of_absent,
)

ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff")
OUT_OF_RANGE = -1
PART_ROWS = 256
ADE20K = 150
LAYOUT = "train/images, train/masks, val/images and val/masks"
EVALUATED = [kind for kind in Cityscapes.classes if 0 <= kind.train_id < IGNORE]
# -1, a licence plate, is 255 in eight bits.
LABEL_IDS = {kind.id & 255: kind.train_id & 255 for kind in Cityscapes.classes}
TRAIN_IDS = {**{kind.train_id: kind.train_id for kind in EVALUATED}, IGNORE: IGNORE}


def load_ade20k(request: DataRequest) -> SceneData:
    """Training and validation images of ADEChallengeData2016, or of the folder that contains it.

    0 in a label image means unlabelled and is ignored; classes 1 to 150 become 0 to 149. A class has its first name in
    objectInfo150.txt, which is part of the data set; else its number.
    """
    root = folder_in(request.path, ("", "ADEChallengeData2016"), "annotations", "ADEChallengeData2016")
    table = numbers_table({0: IGNORE, **{number: number - 1 for number in range(1, ADE20K + 1)}})
    train, test = (
        pair_scenes(_masks_below(root / "images" / part, root / "annotations" / part), table)
        for part in ("training", "validation")
    )
    path, classes = root / "objectInfo150.txt", [f"class {number}" for number in range(1, ADE20K + 1)]
    if path.exists():
        lines = read_bytes(path).decode(errors="replace").splitlines()[1:]
        classes = [line.split("\t")[-1].split(",")[0].strip() for line in lines if line]
        if len(classes) != ADE20K:
            raise UserError(f"{path} names {len(classes)} classes, not {ADE20K}; take the set's own file or remove it")
    return SceneData(
        train=train,
        test=test,
        classes=classes,
        palette=bit_palette(ADE20K + 1)[1:],
        crop=(512, 512),
        source=f"ADE20K in {root}",
    )


def load_cityscapes(request: DataRequest) -> SceneData:
    """Training and validation images of a folder with leftImg8bit and gtFine, with 19 classes.

    Reads the user's *_gtFine_labelTrainIds.png if they exist, else the published *_gtFine_labelIds.png.
    """
    root = folder_in(request.path, ("",), "leftImg8bit", "Cityscapes")
    parts = []
    for images, labels in ((root / "leftImg8bit" / part, root / "gtFine" / part) for part in ("train", "val")):
        found = images_below(images)
        stems = [labels / p.parent.relative_to(images) / p.stem.removesuffix("_leftImg8bit") for p in found]
        names, table = [stem.with_name(f"{stem.name}_gtFine_labelTrainIds.png") for stem in stems], TRAIN_IDS
        if not all(path.is_file() for path in names):
            names, table = [stem.with_name(f"{stem.name}_gtFine_labelIds.png") for stem in stems], LABEL_IDS
        parts.append(pair_scenes(list(zip(found, names)), numbers_table(table)))
    train, test = parts
    return SceneData(
        train=train,
        test=test,
        classes=[kind.name for kind in EVALUATED],
        palette=[kind.color for kind in EVALUATED],
        crop=(769, 769),
        source=f"Cityscapes in {root}",
    )


def load_masks(request: DataRequest) -> SceneData:
    """Users' images, each with a PNG of the same name whose pixels are class numbers; 255 is ignored.

        PATH/train/images/a.jpg    PATH/train/masks/a.png
        PATH/val/images/b.jpg      PATH/val/masks/b.png      (val may be called test)
        PATH/classes.txt           one name per line, the first is class 0

    Without classes.txt, the training masks give the number of classes. stderr names classes without pixels in any mask.
    """
    root = request.path
    if not (root / "train").is_dir():
        raise UserError(f"{root} has no folder train; give one with {LAYOUT}")
    held_out = next((part for part in ("val", "test") if (root / part).is_dir()), None)
    if held_out is None:
        raise UserError(f"{root} has neither val nor test to evaluate on; give a folder with {LAYOUT}")
    train, test = (
        checked_pairs(_masks_below(root / part / "images", root / part / "masks")) for part in ("train", held_out)
    )
    path, masks = root / "classes.txt", root / "train" / "masks"
    classes = names_in(path) if path.exists() else []
    if classes and not 2 <= len(classes) <= IGNORE:
        raise UserError(f"{path} names {len(classes)} classes; give 2 to {IGNORE}")
    shown = _numbers_shown([labels for _, labels in train], len(classes) or None)
    classes = classes or [f"class {i}" for i in range(max(shown - {IGNORE}, default=-1) + 1)]
    absent = [name for number, name in enumerate(classes) if number not in shown]
    ignored = f"; {IGNORE} means ignored" if IGNORE in shown else ""
    # Reading a mask reports numbers outside the classes.
    if len(classes) - len(absent) < 2 and shown <= {*range(len(classes)), IGNORE}:
        missing = f", none of class {', '.join(map(repr, absent[:NAMED]))}" if absent else ""
        raise UserError(
            f"{masks} has only pixels of {_ranges(sorted(shown))}{missing}{ignored}; write classes as 0, 1, 2, ..."
        )
    warn_of_absent(absent, masks, ignored)
    tested = _numbers_shown([labels for _, labels in test], len(classes))
    strange = sorted(tested - shown - {*range(len(classes))})
    # 255 alone, beside all classes, is ignored.
    if strange and (strange != [IGNORE] or not tested.issuperset(range(len(classes)))):
        log(
            f"{root / held_out / 'masks'} has pixels of {_ranges(strange)}, which {masks} never has, so these images "
            "are not tested; write the same class numbers in both"
        )
    table = numbers_table({IGNORE: IGNORE, **{i: i for i in range(len(classes))}})
    return SceneData(
        train=pair_scenes(train, table),
        test=pair_scenes(test, table),
        classes=classes,
        palette=bit_palette(len(classes)),
        source=f"images and masks in {root}",
    )


def _numbers_shown(masks: Sequence[Path], count: int | None) -> set[int]:
    """Numbers in these label images, or with a `count`, until all below it are found; `UserError` if out of range."""
    shown: set[int] = set()
    problem: UserError | None = None
    for path in masks:
        try:
            found = _read_numbers(path).unique()
        except UserError as reason:
            # Reported where the image is needed, unless there are no others.
            problem = problem or reason
            continue
        if count is None and not 0 <= int(found[0]) <= int(found[-1]) <= IGNORE:
            wrong = int(found[0] if found[0] < 0 else found[-1])
            raise UserError(
                f"{path} has the label {wrong}, out of range: classes are 0 to {IGNORE - 1}, {IGNORE} ignored; "
                "correct it"
            )
        shown.update(found.tolist())
        if count is not None and shown.issuperset(range(count)):
            break
    if problem is not None and not shown:
        raise problem
    return shown


def _masks_below(images: Path, masks: Path) -> list[tuple[Path, Path]]:
    """Images in a folder and below, each with the PNG at the same path in the other folder."""
    pairs = [(path, masks / path.relative_to(images).with_suffix(".png")) for path in images_below(images)]
    owners = dict[Path, Path]()
    for image, mask in pairs:
        if (other := owners.setdefault(mask, image)) != image:
            raise UserError(f"{other} and {image} both have the mask {mask}; rename or remove one of them")
    return pairs


def checked_pairs(pairs: Sequence[tuple[Path, Path]]) -> Sequence[tuple[Path, Path]]:
    """The pairs; `UserError` for a missing file, with a likely alternative."""
    for image, labels in pairs:
        if not image.is_file():
            raise UserError(f"{image} does not exist, though {labels} is to label it; add it or remove its entry")
        if not labels.is_file():
            pattern = re.compile(rf"{re.escape(labels.stem)}(?![A-Za-z0-9])")
            alike = sorted(path.name for path in labels.parent.glob("*") if pattern.match(path.name))
            found = f", though there is {alike[0]}" if alike else ""
            raise UserError(f"{image} has no label image {labels}{found}; add it, rename it or remove the image")
    return pairs


def pair_scenes(pairs: Sequence[tuple[Path, Path]], table: Tensor) -> Scenes[tuple[Path, Path]]:
    """Images and their label images, opened on demand; `UserError` if a file of the pairs (image, labels) is missing.

    `table` int64 (L,) is the class of each number in a label image, at most 255, or -1 for an unknown number.
    """
    return Scenes(checked_pairs(pairs), partial(_read_pair, table=table))


def _read_pair(pair: tuple[Path, Path], table: Tensor) -> Scene:
    image = read_stored(pair[0])
    return Scene(image, str(pair[0]), classes=read_labels(pair, table, image))


def read_labels(pair: tuple[Path, Path], table: Tensor, image: Tensor) -> Tensor:
    """Classes of a label image, uint8 (H, W); `UserError` if it is unreadable or does not fit the image."""
    numbers = _read_numbers(pair[1])
    if numbers.shape != image.shape[1:]:
        raise UserError(
            f"{pair[1]} has {numbers.shape[1]} x {numbers.shape[0]} pixels, its image {pair[0]} "
            f"{image.shape[2]} x {image.shape[1]}; both must have the same size, before EXIF rotation"
        )
    parts = []
    # In parts, because the table takes int64.
    for part in numbers.split(PART_ROWS):
        part = part.long()
        inside = (part >= 0) & (part < len(table))
        classes = torch.where(inside, table[part.clamp(0, len(table) - 1)], OUT_OF_RANGE)
        if (classes == OUT_OF_RANGE).any():
            wrong = int(part[classes == OUT_OF_RANGE][0])
            known = torch.nonzero(table != OUT_OF_RANGE).flatten().tolist()
            raise UserError(f"{pair[1]} has the label {wrong}, out of range: known are {_ranges(known)}; correct it")
        parts.append(classes.byte())
    return torch.cat(parts)


def numbers_table(classes: Mapping[int, int]) -> Tensor:
    """Table for `pair_scenes` with these numbers only."""
    return torch.tensor([classes.get(number, OUT_OF_RANGE) for number in range(256)])


def _read_numbers(path: Path) -> Tensor:
    """A label image (H, W), uint8 or int64; `UserError` names the file."""
    try:
        return decode_numbers(path)
    except UnreadableImage as reason:
        raise UserError(f"{path} {reason}; a label image is a PNG whose pixels are class numbers") from None


def images_below(folder: Path) -> list[Path]:
    """Images in a folder and below, sorted by name; `UserError` if there are none."""
    images = sorted(p for p in folder.rglob("*") if p.suffix.lower() in ENDINGS) if folder.is_dir() else []
    if not images:
        raise UserError(f"{folder} has no images; give a folder with {', '.join(ENDINGS)} files")
    return images


def _ranges(numbers: list[int]) -> str:
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)
