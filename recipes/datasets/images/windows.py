"""Windows cut out of large scenes in memory, with what is known of their pixels and objects."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tokenmix.lab.data.scenes.scenes import Objects, Scene, Scenes

__all__ = ["CutScenes", "Window", "cut", "starts"]

# An object of which less than this share is inside the window is left out: what is seen of it is hardly an object.
VISIBLE = 0.5


@dataclass(frozen=True)
class Window:
    """A rectangle of the scene at `place` in a sequence of scenes."""

    place: int
    top: int
    left: int
    height: int
    width: int


class CutScenes(Scenes):
    """The scenes that windows on larger ones show."""

    def __init__(self, whole: Sequence[Scene], windows: Sequence[Window]) -> None:
        self.whole, self.windows = whole, windows

    def __len__(self) -> int:
        return len(self.windows)

    def scene(self, index: int) -> Scene:
        """What the window shows; objects of which less than half is inside are left out."""
        window = self.windows[index]
        return replace(cut(self.whole[window.place], window), name=self.name(index), key=index)

    def name(self, index: int) -> str:
        """The large scene, and where in it."""
        window = self.windows[index]
        return f"{self.whole[window.place].name} from row {window.top}, column {window.left}"


def starts(length: int, side: int, overlap: int = 0) -> list[int]:
    """Where windows of this side begin that cover a length, evenly spread, neighbours sharing `overlap` or more."""
    if length <= side:
        return [0]
    count = -(-(length - overlap) // (side - overlap))
    return [round(i * (length - side) / (count - 1)) for i in range(count)]


def cut(scene: Scene, window: Window) -> Scene:
    """The part of a scene that a window shows."""
    rows = slice(window.top, window.top + window.height)
    columns = slice(window.left, window.left + window.width)
    objects = None if scene.objects is None else _cut_objects(scene.objects, window)
    classes = None if scene.classes is None else scene.classes[rows, columns]
    return replace(scene, image=scene.image[:, rows, columns], classes=classes, objects=objects)


def _cut_objects(objects: Objects, window: Window) -> Objects:
    corner = torch.tensor([window.left, window.top, window.left, window.top])
    most = torch.tensor([window.width, window.height, window.width, window.height])
    moved = objects.boxes - corner
    boxes = torch.minimum(moved.clamp_min(0), most)
    keep = _area(boxes) >= VISIBLE * _area(moved).clamp_min(1e-6)
    masks = objects.masks
    if masks is not None:
        rows = slice(window.top, window.top + window.height)
        masks = masks[keep, rows, window.left : window.left + window.width]
    return Objects(boxes[keep], objects.labels[keep], masks, objects.crowd[keep])


def _area(boxes: Tensor) -> Tensor:
    return (boxes[:, 2] - boxes[:, 0]).clamp_min(0) * (boxes[:, 3] - boxes[:, 1]).clamp_min(0)
