"""Windows cut out of large scenes in memory, with what is known of their pixels and objects."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from tokenmix.lab.data.scenes import Scene, Scenes

__all__ = ["Window", "cut", "cut_scenes", "starts"]

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


def cut_scenes(whole: Sequence[Scene], windows: Sequence[Window]) -> Scenes[Window]:
    """The scenes that windows on larger ones show."""
    return Scenes(windows, partial(_shown, whole))


def _shown(whole: Sequence[Scene], window: Window) -> Scene:
    scene = whole[window.place]
    return replace(cut(scene, window), name=f"{scene.name} from row {window.top}, column {window.left}")


def starts(length: int, side: int, overlap: int = 0) -> list[int]:
    """Where windows of this side begin that cover a length, evenly spread, neighbours sharing `overlap` or more."""
    if length <= side:
        return [0]
    count = -(-(length - overlap) // (side - overlap))
    return [round(i * (length - side) / (count - 1)) for i in range(count)]


def cut(scene: Scene, window: Window) -> Scene:
    """The part of a scene that a window shows; objects of which less than half is inside are left out."""
    rows = slice(window.top, window.top + window.height)
    columns = slice(window.left, window.left + window.width)
    classes = None if scene.classes is None else scene.classes[rows, columns]
    objects = scene.objects
    if objects is not None:
        moved = objects.boxes - torch.tensor([window.left, window.top, window.left, window.top])
        boxes = torch.minimum(
            moved.clamp_min(0), torch.tensor([window.width, window.height, window.width, window.height])
        )
        keep = _area(boxes) >= VISIBLE * _area(moved).clamp_min(1e-6)
        masks = None if objects.masks is None else objects.masks[:, rows, columns]
        objects = replace(objects, boxes=boxes, masks=masks).kept(keep)
    return replace(scene, image=scene.image[:, rows, columns], classes=classes, objects=objects)


def _area(boxes: Tensor) -> Tensor:
    return (boxes[:, 2] - boxes[:, 0]).clamp_min(0) * (boxes[:, 3] - boxes[:, 1]).clamp_min(0)
