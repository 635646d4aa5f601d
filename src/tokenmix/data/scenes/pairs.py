"""Scenes out of files: an image, and a picture whose pixels are numbers of classes."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from tokenmix.data.images.decode import UnreadableImage, decode_numbers, decode_stored
from tokenmix.data.scenes.scenes import Scene, Scenes
from tokenmix.errors import UserError

__all__ = ["IMAGE_ENDINGS", "PairScenes", "folder_in", "images_below", "lines_of", "numbers_table", "read_stored"]

IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff")
OUT_OF_RANGE = -1


class PairScenes(Scenes):
    """Images and their label pictures, opened when they are asked for.

    Args:
        pairs: (image, label picture).
        table: int64 (L,): the class of each number in a label picture, or -1 where there is no such number.

    Raises:
        UserError: a pair of which a file does not exist.
    """

    def __init__(self, pairs: Sequence[tuple[Path, Path]], table: Tensor) -> None:
        for image, labels in pairs:
            if not image.is_file():
                raise UserError(f"{image} does not exist, though {labels} is to label it; add it or remove its entry")
            if not labels.is_file():
                raise UserError(f"{image} has no label picture {labels}; add it or remove the image from the set")
        self.pairs, self.table = pairs, table

    def __len__(self) -> int:
        return len(self.pairs)

    def name(self, index: int) -> str:
        """The file of the image."""
        return str(self.pairs[index][0])

    def scene(self, index: int) -> Scene:
        """The image and its classes; `UserError` naming the file if they cannot be, or do not fit together."""
        path = self.pairs[index][0]
        image = read_stored(path)
        return Scene(image, str(path), classes=self.labels(index, image), key=index)

    def labels(self, index: int, image: Tensor) -> Tensor:
        """The classes alone, int64 (H, W), which must fit the image."""
        path, labels_path = self.pairs[index]
        numbers = read_numbers(labels_path)
        if numbers.shape != image.shape[1:]:
            raise UserError(
                f"{labels_path} has {numbers.shape[1]} x {numbers.shape[0]} pixels, its image {path} "
                f"{image.shape[2]} x {image.shape[1]}; both must be of one size"
            )
        return self._classes(numbers, labels_path)

    def _classes(self, numbers: Tensor, path: Path) -> Tensor:
        inside = (numbers >= 0) & (numbers < len(self.table))
        classes = torch.where(inside, self.table[numbers.clamp(0, len(self.table) - 1)], OUT_OF_RANGE)
        if (classes == OUT_OF_RANGE).any():
            wrong = int(numbers[classes == OUT_OF_RANGE][0])
            known = torch.nonzero(self.table != OUT_OF_RANGE).flatten().tolist()
            raise UserError(f"{path} has the label {wrong}, out of range: known are {_ranges(known)}")
        return classes


def numbers_table(classes: Mapping[int, int], length: int = 256) -> Tensor:
    """The table of `PairScenes` that knows these numbers and no others."""
    table = torch.full((length,), OUT_OF_RANGE, dtype=torch.int64)
    for number, label in classes.items():
        table[number] = label
    return table


def read_stored(path: Path) -> Tensor:
    """An image as stored, uint8 (3, H, W); `UserError` naming it."""
    try:
        return decode_stored(path)
    except UnreadableImage as reason:
        raise UserError(f"{path} {reason}; give a readable image or remove it from the set") from None


def read_numbers(path: Path) -> Tensor:
    """A label picture, int64 (H, W); `UserError` naming it."""
    try:
        return decode_numbers(path)
    except UnreadableImage as reason:
        raise UserError(f"{path} {reason}; a label picture is a PNG whose pixels are numbers of classes") from None


def lines_of(path: Path, of: str = "images") -> list[str]:
    """The lines of a list that are not empty; `UserError` if there is no such file or nothing in it."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"cannot read {path} ({getattr(error, 'strerror', None) or error}); it lists the {of}"
        ) from None
    if not lines:
        raise UserError(f"{path} is empty; it lists the {of}, one a line")
    return lines


def folder_in(path: Path, candidates: Sequence[str], marker: str, layout: str) -> Path:
    """The first of path / candidate that has `marker` in it; `UserError` saying what the layout looks like."""
    if not path.is_dir():
        raise UserError(f"{path} is no folder; give one in the layout of {layout}")
    for candidate in candidates:
        if (path / candidate / marker).exists():
            return path / candidate
    raise UserError(f"{path} has no {marker} in it, so it is not in the layout of {layout}")


def images_below(folder: Path) -> list[Path]:
    """The images in a folder and below, in the order of their names; `UserError` if there are none."""
    images = sorted(p for p in folder.rglob("*") if p.suffix.lower() in IMAGE_ENDINGS) if folder.is_dir() else []
    if not images:
        raise UserError(f"{folder} has no images; give a folder with {', '.join(IMAGE_ENDINGS)} files")
    return images


def _ranges(numbers: list[int]) -> str:
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in parts)
