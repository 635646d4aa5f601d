"""COCO in its published layout: boxes and masks of 80 classes, as polygons or column-wise run lengths; tests on val.

Lin et al., "Microsoft COCO: Common Objects in Context", 2014. COCO numbers its categories 1 to 90 with gaps. Labels
here count from 0; `notes["category_ids"]` has the published numbers. Images without annotations are kept as background.
"""

from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.ops import clip_boxes_to_image

from tokenmix.environment import check_mask_memory
from tokenmix.errors import UserError, needs
from tokenmix.files import Values, inside
from tokenmix.lab.data.images.decode import read_stored
from tokenmix.lab.data.lookup import DataRequest
from tokenmix.lab.data.reading import Skipped, parse_json, read_file
from tokenmix.lab.data.scenes import (
    Scene,
    SceneData,
    Scenes,
    bit_palette,
    folder_in,
    objects_of,
    warn_of_absent,
)

YEARS = ("2017", "2014")
ROBOFLOW = "_annotations.coco.json"
LAYOUT = f"annotations/instances_train2017.json and instances_val2017.json, or train/{ROBOFLOW} and valid/{ROBOFLOW}"
# Fields that are read, and their types.
IMAGE = {"id": (int,), "file_name": (str,), "height": (int, float), "width": (int, float)}
CATEGORY = {"id": (int,), "name": (str,)}
MOST, MOST_BITS = 2**53, 40
ANNOTATION = {"id": (int, str), "image_id": (int,), "category_id": (int,), "bbox": (list,)}


class CocoScenes(Scenes[tuple[Values, list[Values]]]):
    """Images of an annotation file, each with its annotations of non-zero area; `UserError` names a wrong entry.

    `categories` has number and name of each, `dropped` image files with their boxes without area inside the image.
    """

    def __init__(self, path: Path, folder: Path, *, with_masks: bool) -> None:
        self.path, self.folder, self.with_masks = path, folder, with_masks
        if not path.exists():
            raise UserError(f"{path} does not exist; COCO's layout has {LAYOUT}")
        given = parse_json(read_file(path), path)
        if not isinstance(given, dict):
            raise UserError(
                f"{path} holds a {type(given).__name__}, not images, annotations and categories; "
                "give a COCO instances file"
            )
        images, kinds = _entries(given, "images", IMAGE, path), _entries(given, "categories", CATEGORY, path)
        for key, entries, name in (("images", images, "id"), *(("categories", kinds, n) for n in ("id", "name"))):
            value, count = Counter(entry[name] for entry in entries).most_common(1)[0] if entries else (None, 0)
            if count > 1:
                raise UserError(f"{path} has {count} {key} of the {name} {value}; each needs its own")
        self.categories = dict(sorted((c["id"], c["name"]) for c in kinds))
        if not images or not kinds:
            raise UserError(f"{path} has no {'categories' if images else 'images'}; nothing can be read from it")
        self.labels = {number: label for label, number in enumerate(self.categories)}
        self.dropped: Counter[Path] = Counter()
        beyond = small = 0
        by_id = {image["id"]: (image, list[Values]()) for image in images}
        for entry in _entries(given, "annotations", ANNOTATION, path):
            _check_annotation(entry, by_id, self.categories, path)
            image, kept = by_id[entry["image_id"]]
            left, top, width, height = entry["bbox"]
            beyond += left + width > image["width"] + 2 or top + height > image["height"] + 2
            small += max(entry["bbox"]) <= 1
            if min(left + width, image["width"]) > max(left, 0) and min(top + height, image["height"]) > max(top, 0):
                kept.append(entry)
            else:
                self.dropped[folder / image["file_name"]] += 1
        given_boxes = len(given["annotations"])
        for count, wrong in ((small, "are at most 1 in every number"), (beyond, "end outside their images")):
            if given_boxes >= 2 and count > given_boxes / 4:
                raise UserError(
                    f"{path}: {count} of {given_boxes} boxes {wrong}; COCO's bbox is left, top, width and height, in "
                    "pixels"
                )
        super().__init__(list(by_id.values()), self._scene)

    @property
    def annotations(self) -> list[Values]:
        return [entry for _, found in self.items for entry in found]

    def _scene(self, item: tuple[Values, list[Values]]) -> Scene:
        given, found = item
        name = given["file_name"]
        # Links in the user's folder may lead elsewhere, names in a file may not.
        clean = not Path(name).is_absolute() and ".." not in Path(name).parts
        path = self.folder / name if clean else inside(self.folder, name)
        image = read_stored(path)
        size = (image.shape[1], image.shape[2])
        if (given["height"], given["width"]) != size:
            raise UserError(
                f"{path} has {size[1]} x {size[0]} pixels, {self.path} says {given['width']} x {given['height']}; "
                "both must agree"
            )
        boxes = torch.tensor([a["bbox"] for a in found], dtype=torch.float32).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        labels, crowd = [self.labels[a["category_id"]] for a in found], [bool(a.get("iscrowd", 0)) for a in found]
        objects = objects_of(labels, boxes=clip_boxes_to_image(boxes, size), crowd=crowd)
        if self.with_masks:
            check_mask_memory(len(found), size)
            masks = torch.empty((len(found), *size), dtype=torch.bool)
            for mask, annotation in zip(masks, found):
                try:
                    mask[:] = decode_mask(annotation.get("segmentation"), *size)
                except UserError as reason:
                    where = f"{self.path}, annotation {annotation.get('id')} of {path}"
                    raise UserError(f"{where}: {reason}; correct or remove it") from None
            objects = replace(objects, masks=masks)
        area = torch.tensor([nan if a.get("area") is None else a["area"] for a in found], dtype=torch.float32)
        objects = replace(objects, area=area.where(area.isfinite(), objects.areas()))
        return Scene(image, str(path), objects=objects, key=int(given["id"]))


def load_coco(request: DataRequest) -> SceneData:
    """Training and validation images of a folder with annotations/instances_train2017.json, or 2014; or of Roboflow."""
    root = request.path
    if (root / "train" / ROBOFLOW).is_file():
        # As Roboflow exports it, with the images beside the annotations.
        held_out = next((part for part in ("valid", "test") if (root / part / ROBOFLOW).is_file()), "valid")
        places = [(root / part / ROBOFLOW, root / part) for part in ("train", held_out)]
    else:
        root = folder_in(root, ("", "coco"), "annotations", f"COCO: {LAYOUT}")
        lists = root / "annotations"
        year = next((y for y in YEARS if (lists / f"instances_train{y}.json").is_file()), YEARS[0])
        places = [(lists / f"instances_{part}{year}.json", root / f"{part}{year}") for part in ("train", "val")]
    train, test = (CocoScenes(*place, with_masks=request.kind == "masks") for place in places)
    if train.categories != test.categories:
        raise UserError(f"{train.path} and {test.path} have different categories; both splits must have the same")
    for part, purpose in ((train, "learn from"), (test, "evaluate on")):
        if all(entry.get("iscrowd") for entry in part.annotations):
            beside = " that are no crowd" if part.annotations else ""
            raise UserError(
                f"{part.path} has no annotations with an area{beside}, so there is nothing to {purpose}; add some"
            )
    shown = {entry["category_id"] for entry in train.annotations}
    warn_of_absent([name for number, name in train.categories.items() if number not in shown], train.path)
    dropped = {**train.dropped, **test.dropped}
    return SceneData(
        train=train,
        test=test,
        classes=list(train.categories.values()),
        palette=bit_palette(len(train.categories) + 1)[1:],
        source=f"COCO in {root}, {train.folder.name} and {test.folder.name}",
        skipped=[Skipped(str(path), f"{count} of its boxes have no area in it") for path, count in dropped.items()],
        notes={"category_ids": list(train.categories), "boxes_without_area": sum(dropped.values())},
    )


def _entries(given: Values, key: str, wanted: Mapping[str, tuple[type, ...]], path: Path) -> list[Values]:
    entries = given.get(key)
    if not isinstance(entries, list):
        raise UserError(f"{path} has no list of {key}; it is not a COCO instances file")
    for place, entry in enumerate(entries):
        for name, types in wanted.items():
            if not isinstance(entry, dict) or name not in entry:
                raise UserError(f"{path}, entry {place} of {key}, has no {name}; add it, or remove the entry")
            if not isinstance(entry[name], types) or (isinstance(entry[name], int) and abs(entry[name]) > MOST):
                meant = " or ".join(one.__name__ for one in types)
                raise UserError(f"{path}, entry {place} of {key}, has {name}={entry[name]!r}; give {meant}")
    return entries


def _check_annotation(entry: Values, images: Container[int], categories: Container[int], path: Path) -> None:
    where = f"{path}, annotation {entry['id']},"
    if entry["image_id"] not in images:
        raise UserError(
            f"{where} belongs to image {entry['image_id']}, which is not among the images; "
            "add that, or remove the annotation"
        )
    if entry["category_id"] not in categories:
        raise UserError(
            f"{where} has category {entry['category_id']}, which is not among the categories; "
            "add that, or remove the annotation"
        )
    box = entry["bbox"]
    if len(box) != 4 or not all(isinstance(x, int | float) and abs(x) <= MOST for x in box):
        raise UserError(f"{where} has the box {box}; give x, y, width and height")
    area = entry.get("area")
    if area is not None and not (isinstance(area, int | float) and 0 <= area <= MOST):
        raise UserError(f"{where} has area={area!r}; give a number of pixels, or none for that of the mask or box")
    if entry.get("iscrowd", 0) not in (0, 1):
        raise UserError(f"{where} has iscrowd={entry['iscrowd']!r}; give 0 or 1")


def decode_mask(segmentation: object, height: int, width: int) -> Tensor:
    """Decode a COCO `segmentation` to a mask, bool (H, W). A `UserError` does not name the file.

    Run lengths are checked here, because pycocotools reads outside its memory if there are too few.
    """
    if isinstance(segmentation, Mapping):
        return _from_runs(segmentation, height, width)
    if isinstance(segmentation, list) and segmentation:
        return _from_polygons(segmentation, height, width)
    raise UserError(f"the segmentation is {str(segmentation)[:40]!r}, neither polygons nor run lengths")


def encode_mask(mask: Tensor) -> dict[str, object]:
    """Encode a mask bool (H, W) as {"size": [H, W], "counts": string}, for COCO's own tools."""
    coded = _pycocotools().encode(np.asfortranarray(mask.cpu().numpy().view(np.uint8)))
    return {"size": [int(side) for side in coded["size"]], "counts": coded["counts"].decode("ascii")}


def _from_runs(segmentation: Mapping[str, object], height: int, width: int) -> Tensor:
    size = segmentation.get("size")
    if not isinstance(size, list | tuple) or list(size) != [height, width]:
        raise UserError(f"the run lengths are of size {size}, the image has [{height}, {width}]")
    counts = segmentation.get("counts")
    runs = _lengths_of_string(counts) if isinstance(counts, str | bytes) else counts
    if not isinstance(runs, list) or not all(isinstance(run, int) and run >= 0 for run in runs):
        raise UserError("the run lengths do not decode: some are not numbers >= 0")
    if sum(runs) != height * width:
        raise UserError(f"the run lengths do not decode: they fill {sum(runs)} of {height * width} pixels")
    pixels = np.repeat(np.arange(len(runs)) % 2 == 1, runs)
    return torch.from_numpy(np.ascontiguousarray(pixels.reshape(width, height).T))


def _lengths_of_string(coded: str | bytes) -> list[int]:
    """Signed numbers of five bits per letter, lowest first; from the fourth on, stored minus the last but one."""
    letters = coded.encode("latin-1", "replace") if isinstance(coded, str) else coded
    runs: list[int] = []
    value = shift = 0
    for letter in letters:
        bits = letter - 48
        if not 0 <= bits < 64:
            raise UserError(f"the run lengths do not decode: {chr(letter)!r} is not one of their characters")
        value |= (bits & 31) << shift
        shift += 5
        if shift > MOST_BITS:
            raise UserError("the run lengths do not decode: one has no end")
        if bits & 32:
            continue
        value -= (1 << shift) if bits & 16 else 0
        runs.append(value + (runs[-2] if len(runs) > 2 else 0))
        value = shift = 0
    if shift:
        raise UserError("the run lengths do not decode: the string ends within a number")
    return runs


def _from_polygons(polygons: list[object], height: int, width: int) -> Tensor:
    """`UserError` for polygons that crash pycocotools, which allocates an entry per step of the outline, unchecked."""
    reach = 2 * max(height, width)
    for polygon in polygons:
        given = str(polygon)[:40]
        numbers = isinstance(polygon, list) and all(isinstance(x, int | float) for x in polygon)
        if not numbers or len(polygon) < 6 or len(polygon) % 2:
            raise UserError(f"the polygon {given} is not a list of three or more corners, x and y each")
        if not all(abs(x) <= reach for x in polygon):
            raise UserError(f"the polygon {given} is far outside the image of {width} x {height} pixels")
        corners = np.array(polygon, dtype=np.float64).reshape(-1, 2)
        steps = np.abs(corners - np.roll(corners, 1, axis=0)).max(1).sum()
        if steps > height * width + 8 * reach:
            raise UserError(f"the polygon {given} has a longer outline than {width} x {height} pixels can hold")
    tools = _pycocotools()
    return _from_runs(tools.merge(tools.frPyObjects(polygons, height, width)), height, width)


def _pycocotools() -> Any:
    with needs("reading COCO's masks"):
        from pycocotools import mask
    return mask
