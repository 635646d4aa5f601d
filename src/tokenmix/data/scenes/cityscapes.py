"""Cityscapes in its published layout: leftImg8bit and gtFine, 19 classes.

Cordts et al., "The Cityscapes Dataset for Semantic Urban Scene Understanding", 2016. Read are the pictures
*_gtFine_labelIds.png as they are published; where the user has written *_gtFine_labelTrainIds.png, those.
"""

from pathlib import Path

from tokenmix.data.lookup import DataRequest
from tokenmix.data.scenes.pairs import PairScenes, folder_in, images_below, numbers_table
from tokenmix.data.scenes.scenes import IMAGENET, SceneData

__all__ = ["CLASSES", "load_cityscapes"]

IGNORE = 255
CROP = (769, 769)
# Name: (number in labelIds, colour).
CLASSES: dict[str, tuple[int, tuple[int, int, int]]] = {
    "road": (7, (128, 64, 128)),
    "sidewalk": (8, (244, 35, 232)),
    "building": (11, (70, 70, 70)),
    "wall": (12, (102, 102, 156)),
    "fence": (13, (190, 153, 153)),
    "pole": (17, (153, 153, 153)),
    "traffic light": (19, (250, 170, 30)),
    "traffic sign": (20, (220, 220, 0)),
    "vegetation": (21, (107, 142, 35)),
    "terrain": (22, (152, 251, 152)),
    "sky": (23, (70, 130, 180)),
    "person": (24, (220, 20, 60)),
    "rider": (25, (255, 0, 0)),
    "car": (26, (0, 0, 142)),
    "truck": (27, (0, 0, 70)),
    "bus": (28, (0, 60, 100)),
    "train": (31, (0, 80, 100)),
    "motorcycle": (32, (0, 0, 230)),
    "bicycle": (33, (119, 11, 32)),
}
# The other numbers to 33 are classes that are not evaluated; a licence plate's -1 is 255 in eight bits.
EVALUATED = {number: label for label, (number, _) in enumerate(CLASSES.values())}
LABEL_IDS = {**dict.fromkeys(range(34), IGNORE), **EVALUATED, 255: IGNORE}
TRAIN_IDS = {**{label: label for label in range(len(CLASSES))}, 255: IGNORE}


def load_cityscapes(request: DataRequest) -> SceneData:
    """Training and validation images of the folder that has leftImg8bit and gtFine."""
    root = folder_in(request.path, ("",), "leftImg8bit", "Cityscapes")
    train, test = (_scenes(root, part) for part in ("train", "val"))
    return SceneData(
        spec=request.spec,
        train=train,
        test=test,
        classes=list(CLASSES),
        ignore=IGNORE,
        palette=[color for _, color in CLASSES.values()],
        mean=IMAGENET[0],
        std=IMAGENET[1],
        crop=CROP,
        source=f"Cityscapes in {root}",
    )


def _scenes(root: Path, part: str) -> PairScenes:
    images = images_below(root / "leftImg8bit" / part)
    ready = all(_labels(root, image, part, "labelTrainIds").is_file() for image in images)
    kind = "labelTrainIds" if ready else "labelIds"
    table = numbers_table(TRAIN_IDS if ready else LABEL_IDS)
    return PairScenes([(image, _labels(root, image, part, kind)) for image in images], table)


def _labels(root: Path, image: Path, part: str, kind: str) -> Path:
    name = f"{image.stem.removesuffix('_leftImg8bit')}_gtFine_{kind}.png"
    return root / "gtFine" / part / image.parent.relative_to(root / "leftImg8bit" / part) / name
