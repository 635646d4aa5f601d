"""Photographs of solar cells, sound or with a defect: 2,624 electroluminescence images of 300 x 300 pixels.

Deitsch and others, "Automatic classification of defective photovoltaic module cells in electroluminescence images",
2019, from the authors' package. A cell is called defective where its experts gave a probability above one half.
Neighbours in the list come from one module, so blocks of it are held out for testing and validation, never cells at
random.
"""

from pathlib import Path

import torch

from recipes.datasets.packages import Wheel, read_wheel
from tokenmix.lab.data.fetch import FetchError
from tokenmix.lab.data.images.decode import UnreadableImage, decode_numbers
from tokenmix.lab.data.images.image_set import ImageData, InMemoryImages
from tokenmix.lab.data.lookup import DataRequest, stored_path
from tokenmix.lab.data.store import Stored, fetched

__all__ = ["load_cells"]

NAME = "solar-cells"
CELLS, SIDE = 2624, 300
BLOCK, EVERY = 64, 5
"""Blocks of so many cells, of which every fifth is for testing."""
DEFECT = 0.5
WHEEL = Wheel(
    "elpv_dataset-1.0.0.post1-py3-none-any.whl",
    "85e31c1126ee9b48e62d3a0232c58f58b2d189b0814a45c13642fa0415af4a4c",
    91,
)


def load_cells(request: DataRequest) -> ImageData:
    """Of 41 blocks of 64 neighbours 33 for training and 8 for testing."""
    tensors, notes = fetched(NAME, request.root, fetch_cells)
    block = torch.arange(CELLS) // BLOCK
    whole = InMemoryImages(tensors["images"], tensors["labels"], flip=True, fill=None)
    is_test = block % EVERY == EVERY - 1
    train, test = (whole.subset(torch.nonzero(is_test == side).flatten()) for side in (0, 1))
    source = f"ELPV: {notes['source']}, CC-BY-NC-SA-4.0, in {stored_path(NAME, request.root)}"
    return ImageData(train, test, ["sound", "defect"], source, groups=block[~is_test])


def fetch_cells(folder: Path) -> Stored:
    """From the package of PyPI."""
    names = [f"elpv_dataset/data/images/cell{number:04}.png" for number in range(1, CELLS + 1)]
    (listed, *contents), source = read_wheel(WHEEL, ["elpv_dataset/data/labels.csv", *names], folder)
    rows = [line.split() for line in listed.decode().splitlines()]
    if [row[0] for row in rows] != [name.removeprefix("elpv_dataset/data/") for name in names]:
        raise FetchError(f"{WHEEL.file} lists other images than expected")
    try:
        images = torch.stack([decode_numbers(content).byte() for content in contents]).unsqueeze(1)
    except (UnreadableImage, RuntimeError) as reason:
        raise FetchError(f"an image of {WHEEL.file} {reason}") from None
    labels = torch.tensor([int(float(row[1]) > DEFECT) for row in rows])
    return {"images": images, "labels": labels}, {"source": source}
