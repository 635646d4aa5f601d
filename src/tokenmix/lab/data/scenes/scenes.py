"""An image with what is known of its pixels and objects, sets of them, and what their readers share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, get_args

import numpy as np
import torch
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor
from torchvision.ops import masks_to_boxes

from tokenmix.errors import UserError
from tokenmix.lab.data.fetch import log
from tokenmix.lab.data.images.decode import UnreadableImage, decode_stored
from tokenmix.lab.data.indexed import DataSet
from tokenmix.lab.data.lookup import load_data
from tokenmix.lab.data.reading import NAMED

Want = Literal["classes", "boxes", "masks"]
IGNORE = 255
T = TypeVar("T")


@dataclass(frozen=True)
class Objects:
    """The objects of a scene.

    Attributes:
        boxes: float32 (M, 4), left, top, right, bottom in pixels.
        labels: int64 (M,), counted from 0 as in `SceneData.classes`; a detector adds its background itself.
        masks: bool (M, H, W), or None where only boxes are known.
        crowd: bool (M,), regions that COCO marks as a crowd: ignored in training and evaluation.
        area: float32 (M,), pixels that decide the size class of an object in evaluation, as COCO's annotations give
            them; None where they are those of its mask, or of its box.
    """

    boxes: Tensor
    labels: Tensor
    masks: Tensor | None
    crowd: Tensor
    area: Tensor | None = None

    def kept(self, keep: Tensor) -> "Objects":
        """Those of them that `keep`, bool (M,), marks."""
        masks, area = (None if values is None else values[keep] for values in (self.masks, self.area))
        return Objects(self.boxes[keep], self.labels[keep], masks, self.crowd[keep], area)

    def areas(self) -> Tensor:
        """`area`, or that of each mask, or of each box: float32 (M,)."""
        if self.area is not None:
            return self.area
        if self.masks is not None:
            # One by one: a sum would convert them all to eight bytes a pixel.
            return torch.tensor([float(mask.count_nonzero()) for mask in self.masks])
        return (self.boxes[:, 2] - self.boxes[:, 0]) * (self.boxes[:, 3] - self.boxes[:, 1])


@dataclass(frozen=True)
class Scene:
    """An image and what is known of it.

    Attributes:
        image: uint8 (3, H, W).
        name: its file, or what else finds it again.
        classes: uint8 or int64 (H, W), the class of each pixel or `SceneData.ignore`; None for tasks on objects.
        objects: None for tasks on pixels.
        key: the number that a published layout gives the image, such as COCO's image_id; None for its index.
    """

    image: Tensor
    name: str
    classes: Tensor | None = None
    objects: Objects | None = None
    key: int | None = None


class Scenes(Generic[T]):
    """Numbered scenes of any size, opened one by one.

    Args:
        items: what the scenes are read from, such as files.
        read: the scene of an item, without augmentation; `UserError` naming its file if it cannot be read.
    """

    def __init__(self, items: Sequence[T], read: Callable[[T], Scene]) -> None:
        self.items, self.read = items, read

    def __len__(self) -> int:
        return len(self.items)

    def scene(self, index: int) -> Scene:
        """The scene with this index."""
        return self.read(self.items[index])

    def subset(self, indices: Tensor) -> "Scenes[int]":
        """The scenes with these indices, in this order."""
        return Scenes(indices.tolist(), self.scene)


def repeated(scenes: Scenes, times: int) -> Scenes:
    """Each scene `times` times in a row, so that any even spread over the numbers has many scenes."""
    return scenes.subset(torch.arange(len(scenes)).repeat_interleave(times))


@dataclass(frozen=True, kw_only=True)
class SceneData(DataSet[Scenes]):
    """Scenes for training and testing.

    Attributes:
        palette: colour of each class for figures, 0 to 255.
        ignore: label of pixels that are neither learned nor counted.
        mean, std: per channel, in 0..1; ImageNet's where nothing is decoded at the start.
        crop: (height, width) that suits training on this set, if the user names none; None for whole scenes.
        notes: what the published layout says besides, as values for JSON, such as COCO's category numbers.
    """

    palette: Sequence[tuple[int, int, int]]
    ignore: int = IGNORE
    mean: tuple[float, ...] = IMAGENET_DEFAULT_MEAN
    std: tuple[float, ...] = IMAGENET_DEFAULT_STD
    crop: tuple[int, int] | None = None
    notes: dict[str, Any] = field(default_factory=dict)


def load_scenes(spec: str, *, want: Want, seed: int = 0, root: Path | None = None) -> SceneData:
    """Scenes with the classes of their pixels, or with boxes or masks of their objects.

    The test scenes and their content do not depend on the seed.

    Args:
        spec: a name of `tokenmix list data`, or a published layout with its folder, such as `voc:PATH`.
        want: what is to be known of the images.
        seed: of training scenes that are composed on the fly; real ones do not depend on it.
        root: the cache; $TOKENMIX_DATA or ~/.cache/tokenmix/data if not given.

    Raises:
        UserError: unknown set, one that lacks what is wanted, unusable folder, or a data set that cannot be obtained.
    """
    if want not in get_args(Want):
        raise UserError(f"want is one of {', '.join(get_args(Want))}, got {want!r}")
    return load_data(spec, want, root=root, seed=seed)


def objects_of(
    labels: Tensor | list[int],
    *,
    boxes: np.ndarray | Tensor | None = None,
    masks: Tensor | None = None,
    crowd: list[bool] | None = None,
) -> Objects:
    """Objects of which boxes (M, 4), left, top, right, bottom, or masks bool (M, H, W) with a pixel or more are known.

    The boxes of masks end after the last pixel.
    """
    if boxes is None:
        assert masks is not None
        boxes = masks_to_boxes(masks).float() + torch.tensor([0.0, 0.0, 1.0, 1.0])
    corners = torch.as_tensor(boxes, dtype=torch.float32).reshape(-1, 4)
    marked = torch.tensor([False] * len(corners) if crowd is None else crowd, dtype=torch.bool)
    return Objects(corners, torch.as_tensor(labels, dtype=torch.int64), masks, marked)


def warn_of_absent(absent: Sequence[str], source: Path | str, ignore: str = "") -> None:
    """One line on stderr with the classes that no training image shows."""
    if absent:
        more = f" and {len(absent) - NAMED} more" if len(absent) > NAMED else ""
        log(f"{source} has no example of {', '.join(map(repr, absent[:NAMED]))}{more}, so it cannot be learned{ignore}")


def bit_palette(count: int) -> list[tuple[int, int, int]]:
    """Colours of classes 0 to count - 1, as Pascal VOC gives them: the bits of the number, dealt to red, green, blue.

    Bits 0, 3 and 6 of a number are the highest bits of its red, bits 1, 4 and 7 of its green, 2, 5 and 8 of its blue.
    """
    return [  # pyrefly: ignore[bad-return]
        tuple(sum((n >> 3 * place + c & 1) << 7 - place for place in range(8)) for c in range(3)) for n in range(count)
    ]


def read_stored(path: Path) -> Tensor:
    """An image as stored, uint8 (3, H, W); `UserError` naming it."""
    try:
        return decode_stored(path)
    except UnreadableImage as reason:
        raise UserError(f"{path} {reason}; give a readable image or remove it from the set") from None


def folder_in(path: Path, candidates: Sequence[str], marker: str, layout: str) -> Path:
    """The first of path / candidate that has `marker` in it; `UserError` saying what the layout looks like."""
    if not path.is_dir():
        raise UserError(f"{path} is not a folder; give one in the layout of {layout}")
    for candidate in candidates:
        if (path / candidate / marker).exists():
            return path / candidate
    raise UserError(
        f"{path} has no {marker} in it, so it is not in the layout of {layout}; give the folder that has it"
    )
