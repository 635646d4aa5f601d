"""Windows over images that are larger than what a model looks at."""

from collections.abc import Sequence

__all__ = ["both_sides", "window_starts"]


def window_starts(length: int, window: int, step: int) -> list[int]:
    """Where windows begin along a side: every `step`, the last so that it ends with the image."""
    last = max(length - window, 0)
    return [*range(0, last, step), last]


def both_sides(given: Sequence[int]) -> tuple[int, int]:
    """Height and width out of one number for both, or of two."""
    return given[0], given[-1]
