"""Pascal VOC in its published layout: classes of pixels, boxes, or masks of objects.

Everingham, Van Gool, Williams, Winn and Zisserman, "The Pascal Visual Object Classes (VOC) Challenge", 2010. Where the
lists and masks of Hariharan et al. (2011) are, trainaug.txt and SegmentationClassAug, segmentation trains on them.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tokenmix.data.images.image_set import Skipped
from tokenmix.data.lookup import DataRequest
from tokenmix.data.scenes.pairs import PairScenes, folder_in, lines_of, numbers_table, read_stored
from tokenmix.data.scenes.scenes import IMAGENET, Scene, SceneData, Scenes, bit_palette, no_objects, objects_of_boxes
from tokenmix.data.scenes.voc_masks import MaskScenes
from tokenmix.data.scenes.voc_xml import Boxes, read_boxes
from tokenmix.errors import UserError

__all__ = ["OBJECTS", "BoxScenes", "load_voc"]

OBJECTS = [
    "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable", "dog",
    "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor",
]  # fmt: skip
IGNORE = 255
CROP = (513, 513)
ROOTS = ("", "VOC2012", "VOCdevkit/VOC2012", "VOC2007", "VOCdevkit/VOC2007")


def load_voc(request: DataRequest) -> SceneData:
    """Training and validation images of the folder that has JPEGImages, or of VOCdevkit above it."""
    root = folder_in(request.path, ROOTS, "JPEGImages", "Pascal VOC")
    read = {"classes": _pixels, "boxes": _boxes, "masks": _masks}[request.kind]
    return read(request, root)


def _pixels(request: DataRequest, root: Path) -> SceneData:
    lists = root / "ImageSets" / "Segmentation"
    augmented = (lists / "trainaug.txt").is_file() and (root / "SegmentationClassAug").is_dir()
    train = _pairs(root, lists / ("trainaug.txt" if augmented else "train.txt"), augmented)
    classes = ["background", *OBJECTS]
    table = numbers_table({IGNORE: IGNORE, **{i: i for i in range(len(classes))}})
    return SceneData(
        spec=request.spec,
        train=PairScenes(train, table),
        test=PairScenes(_pairs(root, lists / "val.txt", False), table),
        classes=classes,
        ignore=IGNORE,
        palette=bit_palette(len(classes)),
        mean=IMAGENET[0],
        std=IMAGENET[1],
        crop=CROP,
        source=f"Pascal VOC in {root}, training on {'trainaug' if augmented else 'train'}",
    )


def _pairs(root: Path, names: Path, augmented: bool) -> list[tuple[Path, Path]]:
    """Files of the images that are listed; the published trainaug.txt may name paths, of which the last part counts."""
    masks = root / ("SegmentationClassAug" if augmented else "SegmentationClass")
    stems = [Path(line.split()[0]).stem for line in lines_of(names)]
    return [(root / "JPEGImages" / f"{stem}.jpg", masks / f"{stem}.png") for stem in stems]


def _masks(request: DataRequest, root: Path) -> SceneData:
    lists = root / "ImageSets" / "Segmentation"
    parts = []
    for part, purpose in (("train", "learn from"), ("val", "evaluate on")):
        scenes = MaskScenes(root, [line.split()[0] for line in lines_of(lists / f"{part}.txt")], len(OBJECTS))
        found = (scenes.scene(index).objects for index in range(len(scenes)))
        if not any(objects is not None and len(objects.labels) for objects in found):
            raise UserError(f"no image of {lists / part}.txt has an object in SegmentationObject to {purpose}")
        parts.append(scenes)
    return _objects(request, parts[0], parts[1], f"Pascal VOC in {root}, masks of objects, train and val")


def _objects(request: DataRequest, train: Scenes, test: Scenes, source: str, **more: Any) -> SceneData:
    """Scenes with objects; background is none of their classes."""
    return SceneData(
        spec=request.spec,
        train=train,
        test=test,
        classes=OBJECTS,
        ignore=IGNORE,
        palette=bit_palette(len(OBJECTS) + 1)[1:],
        mean=IMAGENET[0],
        std=IMAGENET[1],
        crop=None,
        source=source,
        **more,
    )


class BoxScenes(Scenes):
    """Images with boxes from XML files; `difficult` objects are marked as a crowd, so neither learnt nor missed."""

    def __init__(self, images: Sequence[Path], boxes: Sequence[Boxes], annotations: Sequence[Path]) -> None:
        self.images, self.boxes = images, boxes
        self.labels = [_labels(b.names, path) for b, path in zip(boxes, annotations)]

    def __len__(self) -> int:
        return len(self.images)

    def name(self, index: int) -> str:
        """The file of the image."""
        return str(self.images[index])

    def scene(self, index: int) -> Scene:
        """The image and its objects; none of them is background."""
        path, boxes = self.images[index], self.boxes[index]
        image = read_stored(path)
        size = (image.shape[1], image.shape[2])
        if boxes.size not in (None, (0, 0), size):
            raise UserError(f"{path} has height x width {size}, its annotation says {boxes.size}; both must agree")
        if not boxes.corners:
            return Scene(image, str(path), objects=no_objects(None), key=index)
        corners = torch.tensor(boxes.corners)
        if (corners < -1).any() or (corners[:, 2] > size[1] + 1).any() or (corners[:, 3] > size[0] + 1).any():
            raise UserError(f"{path} has a box beyond its {size[1]} x {size[0]} pixels; correct its annotation")
        corners[:, 0::2] = corners[:, 0::2].clamp(0, size[1])
        corners[:, 1::2] = corners[:, 1::2].clamp(0, size[0])
        return Scene(
            image, str(path), objects=objects_of_boxes(corners, self.labels[index], boxes.difficult), key=index
        )


def _labels(names: list[str], path: Path) -> list[int]:
    unknown = [name for name in names if name not in OBJECTS]
    if unknown:
        raise UserError(f"{path} has an object {unknown[0]!r}, which is no class of Pascal VOC: {', '.join(OBJECTS)}")
    return [OBJECTS.index(name) for name in names]


def _boxes(request: DataRequest, root: Path) -> SceneData:
    lists = root / "ImageSets" / "Main"
    if not (root / "Annotations").is_dir():
        raise UserError(f"{root} has no folder Annotations with the boxes; for classes of pixels want='classes'")
    # VOC 2007 has published its test set; of 2012 val.txt takes its place.
    parts = ("trainval", "test") if (lists / "test.txt").is_file() else ("train", "val")
    train, test = (_read(root, lists / f"{part}.txt") for part in parts)
    for part, (scenes, _), purpose in zip(parts, (train, test), ("learn from", "evaluate on")):
        if not any(found.corners for found in scenes.boxes):
            raise UserError(f"no image of {lists / part}.txt has an object in {root / 'Annotations'} to {purpose}")
    skipped = [*train[1], *test[1]]
    return _objects(
        request,
        train[0],
        test[0],
        f"Pascal VOC in {root}, boxes, {' and '.join(parts)}",
        skipped=skipped,
        notes={"boxes_without_area": sum(b.dropped for scenes, _ in (train, test) for b in scenes.boxes)},
    )


def _read(root: Path, names: Path) -> tuple[BoxScenes, list[Skipped]]:
    images, boxes, annotations, skipped = [], [], [], []
    for line in lines_of(names):
        image, path = root / "JPEGImages" / f"{line.split()[0]}.jpg", root / "Annotations" / f"{line.split()[0]}.xml"
        if not image.is_file():
            raise UserError(f"{image} does not exist, though {names} lists it; add it or remove its line")
        found = read_boxes(path.read_bytes(), path) if path.is_file() else Boxes([], [], [], 0, None)
        if found.dropped:
            skipped.append(Skipped(str(path), f"{found.dropped} of its boxes have no area"))
        images.append(image)
        boxes.append(found)
        annotations.append(path)
    return BoxScenes(images, boxes, annotations), skipped
