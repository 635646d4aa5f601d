"""Boxes as Pascal VOC writes them: one XML file an image."""

import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from tokenmix.errors import UserError

__all__ = ["Boxes", "read_boxes"]

SIDES = ("xmin", "ymin", "xmax", "ymax")


@dataclass(frozen=True)
class Boxes:
    """What an XML file says of an image.

    Attributes:
        corners: left, top, right, bottom of each object, in pixels from the corner of the image.
        names: of the class of each.
        difficult: objects that the benchmark neither learns nor counts as missed.
        dropped: number of boxes of no area.
        size: (height, width) that is told of the image; None if it is not.
    """

    corners: list[tuple[float, ...]]
    names: list[str]
    difficult: list[bool]
    dropped: int
    size: tuple[int, int] | None


def read_boxes(text: str | bytes, path: Path | str, *, first: int = 1) -> Boxes:
    """The boxes of a file.

    Args:
        text: what stands in it.
        path: for messages.
        first: 1 where the corners are numbers of pixels, the first of them 1 and the last within the box, as VOC has
            it; 0 where they are the edges themselves.

    Raises:
        UserError: no XML, an object without a name or without a box of numbers, corners that are exchanged.
    """
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise UserError(f"{path} is no XML ({error}); give an annotation of Pascal VOC") from None
    corners, names, difficult, dropped = [], [], [], 0
    for place, node in enumerate(root.iter("object")):
        box = _corners(node, f"{path}, object {place + 1}")
        if box[2] == box[0] or box[3] == box[1]:
            dropped += 1
            continue
        corners.append((box[0] - first, box[1] - first, box[2], box[3]))
        names.append(_text(node, "name", f"{path}, object {place + 1}"))
        difficult.append(node.findtext("difficult", "0").strip() == "1")
    return Boxes(corners, names, difficult, dropped, _size(root))


def _corners(node: ElementTree.Element, where: str) -> tuple[float, ...]:
    try:
        box = tuple(float(_text(node, f"bndbox/{side}", where)) for side in SIDES)
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{where} has a corner that is no number ({error})") from None
    if not all(map(isfinite, box)):
        raise UserError(f"{where} has a corner that is no number: {SIDES} = {box}")
    if box[0] > box[2] or box[1] > box[3]:
        raise UserError(f"{where} has its corners exchanged: {SIDES} = {box}")
    return box


def _text(node: ElementTree.Element, tag: str, where: str) -> str:
    text = (node.findtext(tag) or "").strip()
    if not text:
        raise UserError(f"{where} has no <{tag}>; add it or remove the object")
    return text


def _size(root: ElementTree.Element) -> tuple[int, int] | None:
    height, width = root.findtext("size/height", ""), root.findtext("size/width", "")
    return (int(height), int(width)) if height.strip().isdecimal() and width.strip().isdecimal() else None
