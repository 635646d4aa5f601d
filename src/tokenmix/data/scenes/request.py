"""What is asked of a reader of scenes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["Request", "Want"]

Want = Literal["classes", "boxes", "masks"]


@dataclass(frozen=True)
class Request:
    """What is wanted, and from where.

    Attributes:
        name: of the set in the table.
        variant: what stands behind the name and a colon: a path, a number, or nothing.
        want: what is to be known of the images.
        seed: of training scenes that are composed.
        root: the cache; $TOKENMIX_DATA or ~/.cache/tokenmix/data if None.
    """

    name: str
    variant: str
    want: Want
    seed: int = 0
    root: Path | None = None

    @property
    def spec(self) -> str:
        """Name and variant as the user gives them."""
        return f"{self.name}:{self.variant}" if self.variant else self.name

    @property
    def path(self) -> Path:
        """The variant as a path."""
        return Path(self.variant).expanduser()
