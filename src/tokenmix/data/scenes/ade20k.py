"""ADE20K's 150 classes in the layout of its scene parsing challenge.

Zhou, Zhao, Puig, Fidler, Barriuso and Torralba, "Scene Parsing through ADE20K Dataset", 2017. 0 in a label picture is
what no class fits; it is ignored, and the classes 1 to 150 become 0 to 149.
"""

from pathlib import Path

from tokenmix.data.lookup import DataRequest
from tokenmix.data.scenes.pairs import PairScenes, folder_in, images_below, numbers_table
from tokenmix.data.scenes.scenes import IMAGENET, SceneData, bit_palette
from tokenmix.errors import UserError

__all__ = ["load_ade20k"]

CLASSES = 150
IGNORE = 255
CROP = (512, 512)


def load_ade20k(request: DataRequest) -> SceneData:
    """Training and validation images of ADEChallengeData2016, given itself or the folder it is in."""
    root = folder_in(request.path, ("", "ADEChallengeData2016"), "annotations", "ADEChallengeData2016")
    table = numbers_table({0: IGNORE, **{number: number - 1 for number in range(1, CLASSES + 1)}})
    train, test = (PairScenes(_pairs(root, part), table) for part in ("training", "validation"))
    return SceneData(
        spec=request.spec,
        train=train,
        test=test,
        classes=_names(root),
        ignore=IGNORE,
        palette=bit_palette(CLASSES + 1)[1:],
        mean=IMAGENET[0],
        std=IMAGENET[1],
        crop=CROP,
        source=f"ADE20K in {root}",
    )


def _pairs(root: Path, part: str) -> list[tuple[Path, Path]]:
    images = images_below(root / "images" / part)
    return [(image, root / "annotations" / part / f"{image.stem}.png") for image in images]


def _names(root: Path) -> list[str]:
    """The first of a class's names in objectInfo150.txt, which the set brings along; else its number."""
    path = root / "objectInfo150.txt"
    if not path.is_file():
        return [f"class {number}" for number in range(1, CLASSES + 1)]
    rows = [line.split("\t") for line in path.read_text(encoding="utf-8", errors="replace").splitlines()[1:] if line]
    if len(rows) != CLASSES:
        raise UserError(f"{path} names {len(rows)} classes, not {CLASSES}; take the file of the set or remove it")
    return [row[-1].split(",")[0].strip() for row in rows]
