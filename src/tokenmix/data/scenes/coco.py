"""COCO in its published layout: boxes and masks of 80 classes.

Lin et al., "Microsoft COCO: Common Objects in Context", 2014. Its categories are numbered 1 to 90 with gaps; labels
here are counted from 0, and `notes["category_ids"]` has the published number of each. Images without annotations are
kept: they are background. The val part is for testing.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tokenmix.data.images.image_set import Skipped
from tokenmix.data.lookup import DataRequest
from tokenmix.data.reading import parse_json, read_file
from tokenmix.data.scenes.rle import decode_mask
from tokenmix.data.scenes.scenes import (
    Objects,
    Scene,
    SceneData,
    Scenes,
    bit_palette,
    folder_in,
    no_objects,
    objects_of_boxes,
    read_stored,
)
from tokenmix.errors import UserError

__all__ = ["CocoScenes", "load_coco"]

YEARS = ("2017", "2014")
# What is read of an entry, and of which types it is.
IMAGE = {"id": (int,), "file_name": (str,), "height": (int, float), "width": (int, float)}
CATEGORY = {"id": (int,), "name": (str,)}
MOST = 2**53
ANNOTATION = {"id": (int, str), "image_id": (int,), "category_id": (int,), "bbox": (list,)}


@dataclass(frozen=True)
class Instances:
    """What an annotation file says.

    Attributes:
        path: the file.
        images: id, file name, height and width of each image.
        annotations: those of each image, in its order, without those of no area within it.
        categories: number and name of each.
        dropped: image files with the number of their boxes of no area within the image.
    """

    path: Path
    images: list[dict[str, Any]]
    annotations: list[list[dict[str, Any]]]
    categories: dict[int, str]
    dropped: dict[str, int]


class CocoScenes(Scenes):
    """The images of an annotation file, opened when they are asked for."""

    def __init__(self, instances: Instances, folder: Path, labels: dict[int, int], *, with_masks: bool) -> None:
        self.instances, self.folder, self.labels, self.with_masks = instances, folder, labels, with_masks

    def __len__(self) -> int:
        return len(self.instances.images)

    def name(self, index: int) -> str:
        """The file of the image."""
        return str(self.folder / self.instances.images[index]["file_name"])

    def scene(self, index: int) -> Scene:
        """The image and its objects; none of them is background."""
        told, path = self.instances.images[index], Path(self.name(index))
        image = read_stored(path)
        size = (image.shape[1], image.shape[2])
        if (told["height"], told["width"]) != size:
            raise UserError(
                f"{path} has {size[1]} x {size[0]} pixels, {self.instances.path} says {told['width']} x "
                f"{told['height']}; both must agree"
            )
        return Scene(image, str(path), objects=self._objects(index, size), key=int(told["id"]))

    def _objects(self, index: int, size: tuple[int, int]) -> Objects:
        found = self.instances.annotations[index]
        if not found:
            return no_objects(size if self.with_masks else None)
        boxes = torch.tensor([a["bbox"] for a in found], dtype=torch.float32)
        boxes[:, 2:] += boxes[:, :2]
        boxes[:, 0::2] = boxes[:, 0::2].clamp(0, size[1])
        boxes[:, 1::2] = boxes[:, 1::2].clamp(0, size[0])
        labels, crowd = [self.labels[a["category_id"]] for a in found], [bool(a.get("iscrowd", 0)) for a in found]
        objects = objects_of_boxes(boxes, labels, crowd)
        if not self.with_masks:
            return objects
        masks = torch.stack([self._mask(a, size, index) for a in found])
        return Objects(objects.boxes, objects.labels, masks, objects.crowd)

    def _mask(self, annotation: dict[str, Any], size: tuple[int, int], index: int) -> torch.Tensor:
        try:
            return decode_mask(annotation.get("segmentation"), *size)
        except UserError as reason:
            raise UserError(
                f"{self.instances.path}, annotation {annotation.get('id')} of {self.name(index)}: {reason}"
            ) from None


def load_coco(request: DataRequest) -> SceneData:
    """Training and validation images of the folder that has annotations/instances_train2017.json, or 2014."""
    root = folder_in(request.path, ("", "coco"), "annotations", "COCO")
    year = next((y for y in YEARS if (root / "annotations" / f"instances_train{y}.json").is_file()), YEARS[0])
    train, test = (read_instances(root / "annotations" / f"instances_{part}{year}.json") for part in ("train", "val"))
    if train.categories != test.categories:
        raise UserError(f"{train.path} and {test.path} have other categories; both parts must have the same")
    for part, purpose in ((train, "learn from"), (test, "evaluate on")):
        _check_any(part, purpose)
    labels = {number: label for label, number in enumerate(train.categories)}
    scenes = [
        CocoScenes(part, root / f"{folder}{year}", labels, with_masks=request.kind == "masks")
        for part, folder in ((train, "train"), (test, "val"))
    ]
    dropped = [(scene.folder / name, count) for scene in scenes for name, count in scene.instances.dropped.items()]
    return SceneData(
        spec=request.spec,
        train=scenes[0],
        test=scenes[1],
        classes=list(train.categories.values()),
        palette=bit_palette(len(labels) + 1)[1:],
        source=f"COCO {year} in {root}",
        skipped=[Skipped(str(path), f"{count} of its boxes have no area in it") for path, count in dropped],
        notes={"category_ids": list(train.categories), "boxes_without_area": sum(count for _, count in dropped)},
    )


def read_instances(path: Path) -> Instances:
    """An annotation file; `UserError` naming it, and the entry in it that is wrong."""
    if not path.exists():
        raise UserError(f"{path} does not exist; COCO's layout has annotations/instances_train2017.json and val")
    told = parse_json(read_file(path), path)
    if not isinstance(told, dict):
        raise UserError(f"{path} holds a {type(told).__name__}, not images, annotations and categories")
    images, kinds = _entries(told, "images", IMAGE, path), _entries(told, "categories", CATEGORY, path)
    for key, entries, name in (("images", images, "id"), ("categories", kinds, "id"), ("categories", kinds, "name")):
        _check_distinct(entries, key, name, path)
    categories = {c["id"]: c["name"] for c in kinds}
    if not images or not categories:
        raise UserError(f"{path} has no {'categories' if images else 'images'}; nothing can be read from it")
    places = {image["id"]: place for place, image in enumerate(images)}
    annotations: list[list[dict[str, Any]]] = [[] for _ in images]
    dropped: dict[str, int] = {}
    for entry in _entries(told, "annotations", ANNOTATION, path):
        _check_annotation(entry, places, categories, path)
        place = places[entry["image_id"]]
        if not _has_area(entry["bbox"], images[place]):
            dropped[images[place]["file_name"]] = dropped.get(images[place]["file_name"], 0) + 1
        else:
            annotations[place].append(entry)
    return Instances(path, images, annotations, dict(sorted(categories.items())), dropped)


def _entries(
    told: dict[str, Any], key: str, wanted: Mapping[str, tuple[type, ...]], path: Path
) -> list[dict[str, Any]]:
    entries = told.get(key)
    if not isinstance(entries, list):
        raise UserError(f"{path} has no list of {key}; it is not a COCO instances file")
    for place, entry in enumerate(entries):
        for name, types in wanted.items():
            if not isinstance(entry, dict) or name not in entry:
                raise UserError(f"{path}, entry {place} of {key}, has no {name}")
            if not isinstance(entry[name], types) or (isinstance(entry[name], int) and abs(entry[name]) > MOST):
                meant = " or ".join(one.__name__ for one in types)
                raise UserError(f"{path}, entry {place} of {key}, has {name}={entry[name]!r}; give {meant}")
    return entries


def _check_distinct(entries: Sequence[Mapping[str, Any]], key: str, name: str, path: Path) -> None:
    value, count = Counter(entry[name] for entry in entries).most_common(1)[0] if entries else (None, 0)
    if count > 1:
        raise UserError(f"{path} has {count} {key} of the {name} {value}; give each its own")


def _check_any(part: Instances, purpose: str) -> None:
    known = [entry for found in part.annotations for entry in found]
    if all(entry.get("iscrowd") for entry in known):
        beside = " that are no crowd" if known else ""
        raise UserError(f"{part.path} has no annotations with an area{beside}, so there is nothing to {purpose}")


def _has_area(box: Sequence[float], image: Mapping[str, Any]) -> bool:
    """Whether a part of the box lies in the image."""
    left, top = max(box[0], 0), max(box[1], 0)
    return min(box[0] + box[2], image["width"]) > left and min(box[1] + box[3], image["height"]) > top


def _check_annotation(entry: dict[str, Any], places: dict[int, int], categories: dict[int, str], path: Path) -> None:
    where = f"{path}, annotation {entry['id']},"
    if entry["image_id"] not in places:
        raise UserError(f"{where} belongs to image {entry['image_id']}, which is not among the images")
    if entry["category_id"] not in categories:
        raise UserError(f"{where} has category {entry['category_id']}, which is not among the categories")
    box = entry["bbox"]
    if len(box) != 4 or not all(isinstance(x, int | float) and abs(x) <= MOST for x in box):
        raise UserError(f"{where} has the box {box}; give x, y, width and height")
    if entry.get("iscrowd", 0) not in (0, 1):
        raise UserError(f"{where} has iscrowd={entry['iscrowd']!r}; give 0 or 1")
