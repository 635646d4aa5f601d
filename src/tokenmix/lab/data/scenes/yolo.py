"""YOLO's layout: boxes in a text file per image, and data.yaml with the names of the classes.

Paths in data.yaml are not used, because the file may be a stranger's.
"""

from contextlib import suppress
from pathlib import Path

import numpy as np
import yaml

from tokenmix.errors import UserError
from tokenmix.lab.data.fetch import log
from tokenmix.lab.data.images.decode import read_stored
from tokenmix.lab.data.lookup import DataRequest
from tokenmix.lab.data.reading import Skipped, read_file
from tokenmix.lab.data.scenes import Scene, SceneData, Scenes, bit_palette, objects_of, warn_of_absent
from tokenmix.lab.data.scenes.label_maps import images_below

LAYOUT = "data.yaml, images/train, images/val, labels/train and labels/val; or train/images and train/labels"
PARTS = (("train",), ("val", "valid", "test"))
LARGEST, EDGE = 2**20, 0.01  # bytes of data.yaml; share of a side that rounding may exceed


def load_yolo(request: DataRequest) -> SceneData:
    """Training and validation images of a folder with data.yaml, or of the data.yaml itself."""
    names = request.path if request.path.is_file() else request.path / "data.yaml"
    if not names.is_file():
        raise UserError(f"{names} does not exist; give a folder with {LAYOUT}")
    root, classes = names.parent, _class_names(names)
    parts, skipped, dropped = list[Scenes[tuple[Path, np.ndarray]]](), list[Skipped](), 0
    for choices in PARTS:
        places = [root / place.format(part) for part in choices for place in ("images/{}", "{}/images")]
        images = next((place for place in places if place.is_dir()), places[0])
        labels = root / str(images.relative_to(root)).replace("images", "labels")
        items, missing = list[tuple[Path, np.ndarray]](), 0
        for path in images_below(images):
            file = labels / path.relative_to(images).with_suffix(".txt")
            missing += not file.exists()
            given = _read_boxes(file, len(classes)) if file.exists() and file.stat().st_size else np.zeros((0, 5))
            kept = given[(given[:, 3:] > given[:, 1:3]).all(1)]
            if count := len(given) - len(kept):
                dropped += count
                skipped.append(Skipped(str(file), f"{count} of its boxes have no area"))
            items.append((path, kept))
        if missing:
            log(f"{missing} of {len(items)} images of {images} have no file in {labels} and are background")
        if not any(len(boxes) for _, boxes in items):
            raise UserError(f"no image of {images} has a box in {labels}; the layout is {LAYOUT}")
        parts.append(Scenes(items, _scene))
    shown = {int(label) for _, boxes in parts[0].items for label in boxes[:, 0]}
    warn_of_absent([name for i, name in enumerate(classes) if i not in shown], root)
    return SceneData(
        train=parts[0],
        test=parts[1],
        classes=classes,
        palette=bit_palette(len(classes) + 1)[1:],
        source=f"YOLO labels in {root}",
        skipped=skipped,
        notes={"boxes_without_area": dropped},
    )


def _scene(item: tuple[Path, np.ndarray]) -> Scene:
    path, boxes = item
    # As Ultralytics and labelling tools show it.
    image = read_stored(path, upright=True)
    sides = [image.shape[2], image.shape[1]] * 2
    return Scene(image, str(path), objects=objects_of(boxes[:, 0].astype(int).tolist(), boxes=boxes[:, 1:] * sides))


def _class_names(path: Path) -> list[str]:
    """`names` of a data.yaml, a list or a mapping from 0 on."""
    text = read_file(path)
    try:
        # The base loader makes text, lists and mappings only, and expands no merge keys.
        given = yaml.load(text, yaml.BaseLoader) if len(text) <= LARGEST else None
    except (yaml.YAMLError, ValueError, RecursionError):
        given = None
    if isinstance(given, dict) and "kpt_shape" in given:
        raise UserError(f"{path} has kpt_shape, and keypoints are not read; export boxes or polygons without it")
    names = given.get("names") if isinstance(given, dict) else None
    if isinstance(names, dict):
        names = [names.get(str(i)) for i in range(len(names))]
    names = names if isinstance(names, list) else []
    found = [name for name in names if isinstance(name, str) and name]
    if not found or len(found) < len(names):
        raise UserError(f"{path} has no list of class names; write for example names: [cat, dog]")
    if len(set(found)) < len(found):
        raise UserError(f"{path} names a class more than once; give each class a name of its own")
    return found


def _read_boxes(path: Path, count: int) -> np.ndarray:
    """Class, left, top, right and bottom of each line, as shares of the image: (M, 5). Polygons become their boxes."""
    found = []
    for number, line in enumerate(read_file(path).decode("utf-8", "replace").splitlines(), 1):
        where, words, values = f"{path}, line {number}, {line[:60]!r}:", line.split(), np.array([np.nan])
        if not words:
            continue
        with suppress(ValueError):
            values = np.array(words, dtype=float)
        is_box = len(values) == 5
        if not np.isfinite(values).all() or not (is_box or (len(values) >= 7 and len(values) % 2)):
            raise UserError(f"{where} give class, x, y, width and height, or class and the corners of a polygon")
        if values[0] not in range(count):
            raise UserError(f"{where} there is no class {words[0]}; data.yaml has the classes 0 to {count - 1}")
        points = values[1:].reshape(-1, 2)
        low, high = (points[0] - points[1] / 2, points[0] + points[1] / 2) if is_box else (points.min(0), points.max(0))
        if min(*low, *high) < -EDGE or max(*low, *high) > 1 + EDGE:
            raise UserError(f"{where} the box ends outside the image; give shares of width and height, 0 to 1")
        found.append([values[0], *low.clip(0, 1), *high.clip(0, 1)])
    return np.array(found).reshape(-1, 5)
