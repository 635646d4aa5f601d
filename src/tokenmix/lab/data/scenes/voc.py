"""Pascal VOC in its published layout: classes of pixels, boxes, or masks of objects.

Everingham, Van Gool, Williams, Winn and Zisserman, "The Pascal Visual Object Classes (VOC) Challenge", 2010. If the
lists and masks of Hariharan et al. (2011), trainaug.txt and SegmentationClassAug, exist, segmentation trains on them.
"""

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import isfinite, nan
from pathlib import Path

import torch
from torchvision.ops import clip_boxes_to_image

from tokenmix.environment import check_mask_memory
from tokenmix.errors import UserError
from tokenmix.lab.data.fetch import log
from tokenmix.lab.data.images.decode import read_stored
from tokenmix.lab.data.lookup import DataRequest
from tokenmix.lab.data.reading import NAMED, Skipped, names_in, read_file
from tokenmix.lab.data.scenes import (
    IGNORE,
    Scene,
    SceneData,
    Scenes,
    bit_palette,
    folder_in,
    objects_of,
)
from tokenmix.lab.data.scenes.label_maps import checked_pairs, numbers_table, pair_scenes, read_labels

NAMES = (
    "aeroplane bicycle bird boat bottle bus car cat chair cow "
    "diningtable dog horse motorbike person pottedplant sheep sofa train tvmonitor"
)
OBJECTS = list[str](NAMES.split())
ROOTS = ("", "VOC2012", "VOCdevkit/VOC2012", "VOC2007", "VOCdevkit/VOC2007")
# Object number of each pixel: 0 for background and for the border around objects.
OWNERS = numbers_table({**{number: number for number in range(IGNORE)}, IGNORE: 0})
CLASS_OF_OBJECT = numbers_table({0: IGNORE, IGNORE: IGNORE, **{i + 1: i for i in range(len(OBJECTS))}})
SIDES = ("xmin", "ymin", "xmax", "ymax")
# No class of objects is background.
ObjectData = partial(SceneData, classes=OBJECTS, palette=bit_palette(len(OBJECTS) + 1)[1:])


def load_voc(request: DataRequest) -> SceneData:
    """Training and validation images of a folder with JPEGImages, or of its parent VOCdevkit."""
    root = folder_in(request.path, ROOTS, "JPEGImages", "Pascal VOC")
    return {"classes": _load_classes, "boxes": _load_boxes, "masks": _load_masks}[request.kind](root)


def _load_classes(root: Path) -> SceneData:
    lists = root / "ImageSets" / "Segmentation"
    augmented = (lists / "trainaug.txt").is_file() and (root / "SegmentationClassAug").is_dir()
    part = "trainaug" if augmented else "train"
    classes = ["background", *OBJECTS]
    table = numbers_table({IGNORE: IGNORE, **{i: i for i in range(len(classes))}})
    train, test = (
        pair_scenes(_pairs(root, _stems(lists / f"{name}.txt"), folder), table)
        for name, folder in ((part, f"SegmentationClass{'Aug' * augmented}"), ("val", "SegmentationClass"))
    )
    return SceneData(
        train=train,
        test=test,
        classes=classes,
        palette=bit_palette(len(classes)),
        crop=(513, 513),
        source=f"Pascal VOC in {root}, training on {part}",
    )


def _load_masks(root: Path) -> SceneData:
    """Images with a mask per object, from the images of object numbers and of classes."""
    parts = []
    for part, purpose in (("train", "learn from"), ("val", "evaluate on")):
        names = root / "ImageSets" / "Segmentation" / f"{part}.txt"
        stems = _stems(names)
        owners, classes = (checked_pairs(_pairs(root, stems, f"Segmentation{of}")) for of in ("Object", "Class"))
        scenes = Scenes(list(zip(owners, classes)), _read_masks)
        found = (scenes.scene(index).objects for index in range(len(scenes)))
        if not any(objects is not None and len(objects.labels) for objects in found):
            raise UserError(f"no image of {names} has an object in SegmentationObject to {purpose}; list one that has")
        parts.append(scenes)
    train, test = parts
    return ObjectData(train=train, test=test, source=f"Pascal VOC in {root}, masks of objects, train and val")


def _read_masks(pairs: tuple[tuple[Path, Path], tuple[Path, Path]]) -> Scene:
    """An image with its masks; an object has the class of most of its pixels."""
    of_owners, of_classes = pairs
    image = read_stored(of_owners[0])
    owners, classes = read_labels(of_owners, OWNERS, image), read_labels(of_classes, CLASS_OF_OBJECT, image)
    numbers = [number for number in owners.unique().tolist() if number]
    check_mask_memory(len(numbers), (owners.shape[0], owners.shape[1]))
    masks, labels = owners == torch.tensor(numbers).view(-1, 1, 1), []
    for mask, number in zip(masks, numbers, strict=True):
        known = classes[mask & (classes != IGNORE)]
        if not len(known):
            raise UserError(
                f"object {number} of {of_owners[1]} has no class in {of_classes[1]}; both images must show it"
            )
        labels.append(int(known.mode().values))
    return Scene(image, str(of_owners[0]), objects=objects_of(labels, masks=masks))


def _load_boxes(root: Path) -> SceneData:
    """Images with boxes from XML files; `difficult` objects are marked as crowd, and so ignored.

    classes.txt has the classes; without it they are Pascal's twenty, or those of the training images if one is new.
    """
    lists, folder = root / "ImageSets" / "Main", root / "Annotations"
    if not folder.is_dir():
        raise UserError(f"{root} has no folder Annotations with the boxes; for classes of pixels want='classes'")
    # VOC 2007 has a published test set; for 2012, val.txt is used for testing.
    names = ("trainval", "test") if (lists / "test.txt").is_file() else ("train", "val")
    own = root / "classes.txt"
    classes = names_in(own) if own.exists() else None
    parts, skipped, dropped = [], list[Skipped](), 0
    for name, purpose in zip(names, ("learn from", "evaluate on")):
        listed, items, absent = lists / f"{name}.txt", list[tuple[Path, Boxes]](), list[Path]()
        for stem in _stems(listed):
            image, path = root / "JPEGImages" / f"{stem}.jpg", folder / f"{stem}.xml"
            if not image.is_file():
                raise UserError(f"{image} does not exist, though {listed} lists it; add it or remove its line")
            if path.exists():
                items.append((image, read_boxes(read_file(path), path, known=classes)))
            else:
                absent.append(path)
                items.append((image, Boxes([], [], [], 0, None)))
            if count := items[-1][1].dropped:
                dropped += count
                skipped.append(Skipped(str(path), f"{count} of its boxes have no area"))
        if absent:
            log(f"{absent[0]} does not exist: {len(absent)} images of {listed} have no annotation and are background")
        if not any(found.corners for _, found in items):
            raise UserError(f"no image of {listed} has an object in {folder} to {purpose}; list one that has")
        if classes is None:
            shown = {name for _, found in items for name in found.names}
            classes = OBJECTS if shown <= {*OBJECTS} else sorted(shown)
            if classes is not OBJECTS:
                log(f"classes of {listed}: {', '.join(classes[:NAMED])}; {own} may list others, one per line")
        parts.append(Scenes(items, partial(_read_boxed, classes)))
    train, test = parts
    source = f"Pascal VOC in {root}, boxes, {' and '.join(names)}"
    return SceneData(
        train=train,
        test=test,
        classes=classes or OBJECTS,
        palette=bit_palette(len(classes or OBJECTS) + 1)[1:],
        source=source,
        skipped=skipped,
        notes={"boxes_without_area": dropped},
    )


def _read_boxed(classes: Sequence[str], item: tuple[Path, "Boxes"]) -> Scene:
    path, boxes = item
    image = read_stored(path)
    size = (image.shape[1], image.shape[2])
    if boxes.size not in (None, (0, 0), size):
        raise UserError(f"{path} has height x width {size}, its annotation says {boxes.size}; both must agree")
    corners = torch.tensor(boxes.corners, dtype=torch.float32).reshape(-1, 4)
    if (corners < -1).any() or (corners[:, 2] > size[1] + 1).any() or (corners[:, 3] > size[0] + 1).any():
        raise UserError(f"{path} has a box beyond its {size[1]} x {size[0]} pixels; correct its annotation")
    labels = [classes.index(name) for name in boxes.names]
    objects = objects_of(labels, boxes=clip_boxes_to_image(corners, size), crowd=boxes.difficult)
    return Scene(image, str(path), objects=objects)


def _stems(names: Path) -> list[str]:
    """Listed images; the published trainaug.txt may have paths, of which the file name counts."""
    return [re.sub(r"\.(jpe?g|png)$", "", Path(line.split()[0]).name) for line in names_in(names, "images")]


def _pairs(root: Path, stems: Sequence[str], folder: str) -> list[tuple[Path, Path]]:
    return [(root / "JPEGImages" / f"{stem}.jpg", root / folder / f"{stem}.png") for stem in stems]


@dataclass(frozen=True)
class Boxes:
    """Content of an image's XML file."""

    corners: list[tuple[float, ...]]  # left, top, right, bottom of each object, in pixels from the corner of the image
    names: list[str]  # class of each object
    difficult: list[bool]  # objects that the benchmark ignores in training and evaluation
    dropped: int  # number of boxes without area
    size: tuple[int, int] | None  # (height, width) of the image; None if unknown


class _NoEntities(ElementTree.TreeBuilder):
    """Rejects entity declarations: 8 MB of them are 800 MB of text."""

    def doctype(self, name: str, pubid: str | None, system: str | None) -> None:
        raise UserError("has a DOCTYPE, whose entities may grow without end; remove it")


def read_boxes(text: str | bytes, path: Path | str, *, first: int = 1, known: Sequence[str] | None = None) -> Boxes:
    """Boxes in the text of an XML file; `UserError`, with its path, for invalid XML or an incomplete object.

    `first` is 1 if corners are pixel numbers from 1, with the last pixel inside the box, as in VOC; 0 if they are
    edges. `known` are the allowed classes; None for any.
    """
    try:
        root = ElementTree.fromstring(text, ElementTree.XMLParser(target=_NoEntities()))
    except UserError as reason:
        raise UserError(f"{path} {reason}") from None
    except (ElementTree.ParseError, ValueError, LookupError) as error:
        raise UserError(f"{path} is not XML ({error}); give an annotation of Pascal VOC") from None
    corners, names, difficult, dropped = [], [], [], 0
    for place, node in enumerate(root.iter("object")):
        where = f"{path}, object {place + 1}"
        texts = [_text(node, f"bndbox/{side}", where) for side in SIDES]
        box: tuple[float, ...] = (nan, nan, nan, nan)
        with suppress(ValueError):
            box = tuple(map(float, texts))
        if not all(map(isfinite, box)):
            raise UserError(f"{where} has a corner that is not a number: {SIDES} = {', '.join(texts)}; correct it")
        if box[0] > box[2] or box[1] > box[3]:
            raise UserError(f"{where} has its corners swapped: {SIDES} = {box}; correct them")
        if box[2] == box[0] or box[3] == box[1]:
            dropped += 1
            continue
        corners.append((box[0] - first, box[1] - first, box[2], box[3]))
        names.append(_text(node, "name", where))
        if known is not None and names[-1] not in known:
            raise UserError(
                f"{path} has an object {names[-1]!r}, which is neither in classes.txt nor in the training images; "
                f"give one of {', '.join(known)}, or remove it"
            )
        difficult.append(node.findtext("difficult", "0").strip() == "1")
    sides = [root.findtext(f"size/{side}", "").strip() for side in ("height", "width")]
    # Python refuses whole numbers of thousands of digits.
    size = (int(sides[0]), int(sides[1])) if all(s.isdecimal() and len(s) < 10 for s in sides) else None
    return Boxes(corners, names, difficult, dropped, size)


def _text(node: ElementTree.Element, tag: str, where: str) -> str:
    text = (node.findtext(tag) or "").strip()
    if not text:
        raise UserError(f"{where} has no <{tag}>; add it or remove the object")
    return text
