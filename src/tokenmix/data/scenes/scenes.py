"""An image with what is known of its pixels and objects, and sets of them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from tokenmix.data.images.image_set import Skipped

__all__ = ["DenseData", "Objects", "Often", "Scene", "Scenes"]


@dataclass(frozen=True)
class Objects:
    """The objects of a scene.

    Attributes:
        boxes: float32 (M, 4), left, top, right, bottom in pixels.
        labels: int64 (M,), counted from 0 as in `DenseData.classes`; a detector adds its background itself.
        masks: bool (M, H, W), or None where only boxes are known.
        crowd: bool (M,), regions that COCO marks as a crowd: neither learnt nor counted as missed.
    """

    boxes: Tensor
    labels: Tensor
    masks: Tensor | None
    crowd: Tensor


@dataclass(frozen=True)
class Scene:
    """An image and what is known of it.

    Attributes:
        image: uint8 (3, H, W).
        name: its file, or what else finds it again.
        classes: int64 (H, W), the class of each pixel or `DenseData.ignore`; None for tasks on objects.
        objects: None for tasks on pixels.
        key: the number that a published layout gives the image, such as COCO's image_id; else its place.
    """

    image: Tensor
    name: str
    classes: Tensor | None = None
    objects: Objects | None = None
    key: int = 0


class Scenes(ABC):
    """Numbered scenes of any size, opened one by one; `UserError` naming the file if one cannot be read."""

    @abstractmethod
    def __len__(self) -> int:
        """How many there are."""

    @abstractmethod
    def scene(self, index: int) -> Scene:
        """The scene at this place, as it is, without augmentation."""

    @abstractmethod
    def name(self, index: int) -> str:
        """Where it is, for a message, without opening it."""


class Often(Scenes):
    """Scenes of which each comes `times` times in a row, so that any even spread over the numbers has many scenes."""

    def __init__(self, scenes: Scenes, times: int) -> None:
        self.scenes, self.times = scenes, times

    def __len__(self) -> int:
        return len(self.scenes) * self.times

    def scene(self, index: int) -> Scene:
        """That of the number behind."""
        return self.scenes.scene(index // self.times)

    def name(self, index: int) -> str:
        """That of the number behind."""
        return self.scenes.name(index // self.times)


@dataclass(frozen=True)
class DenseData:
    """Scenes for training and testing.

    Attributes:
        spec: what `load_dense` was asked for.
        train, test: scenes.
        classes: name of each label.
        ignore: label of pixels that are neither learnt nor counted.
        palette: colour of each class for pictures, 0 to 255.
        mean, std: per channel, in 0..1.
        crop: (height, width) that suits training on this set, if the user names none; None for whole scenes.
        source: one line: which home or package, version, licence, path.
        skipped: files that were left out.
        notes: what the published layout says beside, as values for JSON, such as COCO's category numbers.
    """

    spec: str
    train: Scenes
    test: Scenes
    classes: list[str]
    ignore: int
    palette: Sequence[tuple[int, int, int]]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop: tuple[int, int] | None
    source: str
    skipped: Sequence[Skipped] = ()
    notes: dict[str, Any] = field(default_factory=dict)
