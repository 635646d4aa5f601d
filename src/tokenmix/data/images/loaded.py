"""What the reader of one data set hands to the registry."""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenmix.data.images.image_set import ImageSet, Skipped

__all__ = ["Loaded"]


@dataclass(frozen=True)
class Loaded:
    """A data set as its reader gives it: whole, at the size that was asked for."""

    train: ImageSet
    test: ImageSet
    classes: list[str]
    source: str
    skipped: Sequence[Skipped] = ()
