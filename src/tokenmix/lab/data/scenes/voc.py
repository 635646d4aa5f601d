"""Pascal VOC in its published layout: classes of pixels, boxes, or masks of objects.

Everingham, Van Gool, Williams, Winn and Zisserman, "The Pascal Visual Object Classes (VOC) Challenge", 2010. Where the
lists and masks of Hariharan et al. (2011) are, trainaug.txt and SegmentationClassAug, segmentation trains on them.
"""

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import isfinite, nan
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchvision.ops import clip_boxes_to_image

from tokenmix.environment import check_mask_memory
from tokenmix.errors import UserError
from tokenmix.lab.data.fetch import log
from tokenmix.lab.data.lookup import DataRequest
from tokenmix.lab.data.reading import Skipped, names_in, read_file
from tokenmix.lab.data.scenes.label_maps import PairScenes, numbers_table
from tokenmix.lab.data.scenes.scenes import (
    IGNORE,
    Scene,
    SceneData,
    Scenes,
    bit_palette,
    folder_in,
    objects_of_boxes,
    objects_of_masks,
    read_stored,
)

NAMES = (
    "aeroplane bicycle bird boat bottle bus car cat chair cow "
    "diningtable dog horse motorbike person pottedplant sheep sofa train tvmonitor"
)
OBJECTS = list[str](NAMES.split())
ROOTS = ("", "VOC2012", "VOCdevkit/VOC2012", "VOC2007", "VOCdevkit/VOC2007")
# Who a pixel belongs to: 0 is nobody, and so is the border around each object.
OWNERS = numbers_table({**{number: number for number in range(IGNORE)}, IGNORE: 0})
CLASS_OF_OBJECT = numbers_table({0: IGNORE, IGNORE: IGNORE, **{i + 1: i for i in range(len(OBJECTS))}})
SIDES = ("xmin", "ymin", "xmax", "ymax")


def load_voc(request: DataRequest) -> SceneData:
    """Training and validation images of the folder that has JPEGImages, or of VOCdevkit above it."""
    root = folder_in(request.path, ROOTS, "JPEGImages", "Pascal VOC")
    return {"classes": _load_classes, "boxes": _load_boxes, "masks": _load_masks}[request.kind](request, root)


def _load_classes(request: DataRequest, root: Path) -> SceneData:
    lists = root / "ImageSets" / "Segmentation"
    augmented = (lists / "trainaug.txt").is_file() and (root / "SegmentationClassAug").is_dir()
    part = "trainaug" if augmented else "train"
    classes = ["background", *OBJECTS]
    table = numbers_table({IGNORE: IGNORE, **{i: i for i in range(len(classes))}})
    train, test = (
        PairScenes(_pairs(root, _stems(lists / f"{name}.txt"), folder), table)
        for name, folder in ((part, f"SegmentationClass{'Aug' * augmented}"), ("val", "SegmentationClass"))
    )
    return SceneData(
        spec=request.spec,
        train=train,
        test=test,
        classes=classes,
        palette=bit_palette(len(classes)),
        crop=(513, 513),
        source=f"Pascal VOC in {root}, training on {part}",
    )


def _load_masks(request: DataRequest, root: Path) -> SceneData:
    parts = []
    for part, purpose in (("train", "learn from"), ("val", "evaluate on")):
        names = root / "ImageSets" / "Segmentation" / f"{part}.txt"
        scenes = MaskScenes(root, _stems(names))
        found = (scenes.scene(index).objects for index in range(len(scenes)))
        if not any(objects is not None and len(objects.labels) for objects in found):
            raise UserError(f"no image of {names} has an object in SegmentationObject to {purpose}; list one that has")
        parts.append(scenes)
    return _object_data(request, *parts, source=f"Pascal VOC in {root}, masks of objects, train and val")


def _load_boxes(request: DataRequest, root: Path) -> SceneData:
    lists = root / "ImageSets" / "Main"
    if not (root / "Annotations").is_dir():
        raise UserError(f"{root} has no folder Annotations with the boxes; for classes of pixels want='classes'")
    # VOC 2007 has published its test set; of 2012 val.txt takes its place.
    names = ("trainval", "test") if (lists / "test.txt").is_file() else ("train", "val")
    parts = [BoxScenes(root, lists / f"{name}.txt") for name in names]
    for scenes, name, purpose in zip(parts, names, ("learn from", "evaluate on")):
        if not any(found.corners for found in scenes.boxes):
            raise UserError(
                f"no image of {lists / name}.txt has an object in {root / 'Annotations'} to {purpose}; "
                "list one that has"
            )
    dropped = [(path, found.dropped) for part in parts for path, found in zip(part.annotations, part.boxes)]
    return _object_data(
        request,
        *parts,
        source=f"Pascal VOC in {root}, boxes, {' and '.join(names)}",
        skipped=[Skipped(str(path), f"{count} of its boxes have no area") for path, count in dropped if count],
        notes={"boxes_without_area": sum(count for _, count in dropped)},
    )


def _object_data(request: DataRequest, train: Scenes, test: Scenes, **more: Any) -> SceneData:
    """Scenes with objects; background is none of their classes."""
    palette = bit_palette(len(OBJECTS) + 1)[1:]
    return SceneData(spec=request.spec, train=train, test=test, classes=OBJECTS, palette=palette, **more)


def _stems(names: Path) -> list[str]:
    """The images that are listed; the published trainaug.txt may name paths, of which the last part counts."""
    return [re.sub(r"\.(jpe?g|png)$", "", Path(line.split()[0]).name) for line in names_in(names, "images")]


def _pairs(root: Path, stems: Sequence[str], folder: str) -> list[tuple[Path, Path]]:
    return [(root / "JPEGImages" / f"{stem}.jpg", root / folder / f"{stem}.png") for stem in stems]


class MaskScenes(PairScenes):
    """Images with a mask for each object, from the image of object numbers and the one of their classes.

    An object's class is that of most of its pixels.

    Raises:
        UserError: an image or a label image that does not exist.
    """

    def __init__(self, root: Path, stems: Sequence[str]) -> None:
        super().__init__(_pairs(root, stems, "SegmentationObject"), OWNERS)
        self.classes = PairScenes(_pairs(root, stems, "SegmentationClass"), CLASS_OF_OBJECT)

    def scene(self, index: int) -> Scene:
        scene = super().scene(index)
        owners, classes = scene.classes, self.classes.labels(index, scene.image)
        assert owners is not None
        numbers = [number for number in owners.unique().tolist() if number]
        check_mask_memory(len(numbers), (owners.shape[0], owners.shape[1]))
        masks = owners == torch.tensor(numbers).view(-1, 1, 1)
        labels = [self._label(classes[mask], number, index) for mask, number in zip(masks, numbers, strict=True)]
        return replace(scene, classes=None, objects=objects_of_masks(masks, labels))

    def _label(self, classes: Tensor, number: int, index: int) -> int:
        known = classes[classes != IGNORE]
        if not len(known):
            owners, told = self.pairs[index][1], self.classes.pairs[index][1]
            raise UserError(f"object {number} of {owners} has no class in {told}; both images must show it")
        return int(known.mode().values)


class BoxScenes(Scenes):
    """Images with boxes from XML files; `difficult` objects are marked as crowd and so ignored.

    Raises:
        UserError: a listed image that does not exist, or what `read_boxes` raises.
    """

    def __init__(self, root: Path, names: Path) -> None:
        stems = _stems(names)
        self.images = [root / "JPEGImages" / f"{stem}.jpg" for stem in stems]
        missing = next((image for image in self.images if not image.is_file()), None)
        if missing is not None:
            raise UserError(f"{missing} does not exist, though {names} lists it; add it or remove its line")
        self.annotations = [root / "Annotations" / f"{stem}.xml" for stem in stems]
        if without := [path for path in self.annotations if not path.exists()]:
            log(f"{without[0]} does not exist: {len(without)} images of {names} have no annotation and are background")
        self.boxes = [
            read_boxes(read_file(path), path) if path.exists() else Boxes([], [], [], 0, None)
            for path in self.annotations
        ]
        for found, path in zip(self.boxes, self.annotations):
            if unknown := [name for name in found.names if name not in OBJECTS]:
                raise UserError(
                    f"{path} has an object {unknown[0]!r}, which is not a class of Pascal VOC; "
                    f"give one of {', '.join(OBJECTS)}, "
                    "or remove it"
                )

    def __len__(self) -> int:
        return len(self.images)

    def scene(self, index: int) -> Scene:
        path, boxes = self.images[index], self.boxes[index]
        image = read_stored(path)
        size = (image.shape[1], image.shape[2])
        if boxes.size not in (None, (0, 0), size):
            raise UserError(f"{path} has height x width {size}, its annotation says {boxes.size}; both must agree")
        corners = torch.tensor(boxes.corners, dtype=torch.float32).reshape(-1, 4)
        if (corners < -1).any() or (corners[:, 2] > size[1] + 1).any() or (corners[:, 3] > size[0] + 1).any():
            raise UserError(f"{path} has a box beyond its {size[1]} x {size[0]} pixels; correct its annotation")
        corners = clip_boxes_to_image(corners, size)
        objects = objects_of_boxes(corners, [OBJECTS.index(name) for name in boxes.names], boxes.difficult)
        return Scene(image, str(path), objects=objects, key=index)


@dataclass(frozen=True)
class Boxes:
    """What an XML file says of an image.

    Attributes:
        corners: left, top, right, bottom of each object, in pixels from the corner of the image.
        names: of the class of each.
        difficult: objects that the benchmark ignores in training and evaluation.
        dropped: number of boxes of no area.
        size: (height, width) that is known of the image; None if it is not.
    """

    corners: list[tuple[float, ...]]
    names: list[str]
    difficult: list[bool]
    dropped: int
    size: tuple[int, int] | None


class _DoctypeError(Exception):
    pass


class _NoEntities(ElementTree.TreeBuilder):
    """Raises where entities could be declared: 8 MB of them are 800 MB of text."""

    def doctype(self, name: str, pubid: str | None, system: str | None) -> None:
        raise _DoctypeError


def read_boxes(text: str | bytes, path: Path | str, *, first: int = 1) -> Boxes:
    """The boxes of a file.

    Args:
        text: its content.
        path: for messages.
        first: 1 where the corners are numbers of pixels, the first of them 1 and the last within the box, as VOC has
            it; 0 where they are the edges themselves.

    Raises:
        UserError: no XML, a DOCTYPE, an object without a name or without a box of numbers, corners that are exchanged.
    """
    try:
        root = ElementTree.fromstring(text, ElementTree.XMLParser(target=_NoEntities()))
    except _DoctypeError:
        raise UserError(f"{path} has a DOCTYPE, whose entities may grow without end; remove it") from None
    except (ElementTree.ParseError, ValueError, LookupError) as error:
        raise UserError(f"{path} is not XML ({error}); give an annotation of Pascal VOC") from None
    corners, names, difficult, dropped = [], [], [], 0
    for place, node in enumerate(root.iter("object")):
        box = _corners(node, f"{path}, object {place + 1}")
        if box[2] == box[0] or box[3] == box[1]:
            dropped += 1
            continue
        corners.append((box[0] - first, box[1] - first, box[2], box[3]))
        names.append(_text(node, "name", f"{path}, object {place + 1}"))
        difficult.append(node.findtext("difficult", "0").strip() == "1")
    return Boxes(corners, names, difficult, dropped, _size(root))


def _corners(node: ElementTree.Element, where: str) -> tuple[float, ...]:
    texts = [_text(node, f"bndbox/{side}", where) for side in SIDES]
    box: tuple[float, ...] = (nan, nan, nan, nan)
    with suppress(ValueError):
        box = tuple(map(float, texts))
    if not all(map(isfinite, box)):
        raise UserError(f"{where} has a corner that is not a number: {SIDES} = {', '.join(texts)}; correct it")
    if box[0] > box[2] or box[1] > box[3]:
        raise UserError(f"{where} has its corners swapped: {SIDES} = {box}; correct them")
    return box


def _text(node: ElementTree.Element, tag: str, where: str) -> str:
    text = (node.findtext(tag) or "").strip()
    if not text:
        raise UserError(f"{where} has no <{tag}>; add it or remove the object")
    return text


def _size(root: ElementTree.Element) -> tuple[int, int] | None:
    sides = [root.findtext(f"size/{side}", "").strip() for side in ("height", "width")]
    # Python itself reads no whole number of thousands of digits.
    return (int(sides[0]), int(sides[1])) if all(s.isdecimal() and len(s) < 10 for s in sides) else None
