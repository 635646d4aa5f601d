"""Images that a user names for an answer: reading them as they are stored, and names for what is written of each."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import Tensor

from tokenmix.data.images.decode import UnreadableImage, decode_stored
from tokenmix.errors import UserError

__all__ = ["check_stems", "stored_images"]


def stored_images(files: Sequence[str | Path]) -> Iterator[tuple[Path, Tensor]]:
    """Each file with its image, uint8 (3, H, W), one in memory at a time; `UserError` naming one that has none."""
    for file in map(Path, files):
        try:
            image = decode_stored(file)
        except UnreadableImage as reason:
            raise UserError(f"{file} {reason}; give a readable PNG, JPEG, WebP, BMP, GIF or TIFF image") from None
        yield file, image


def check_stems(files: Sequence[str | Path]) -> None:
    """Raise `UserError` if what is written of two files would have one name."""
    seen: dict[str, str | Path] = {}
    for file in files:
        stem = Path(file).stem
        if stem in seen:
            raise UserError(f"{seen[stem]} and {file} would both be answered in {stem}-*; rename one, or ask apart")
        seen[stem] = file
