"""Sizes of the tiles that a kernel works on: equal shapes get equal sizes, so equal bits."""

from dataclasses import dataclass

__all__ = ["MAX_SLOTS", "Tiles", "backward_tiles", "forward_tiles", "padded"]

MAX_SLOTS = 256


@dataclass(frozen=True)
class Tiles:
    """A tile's tokens and its largest block of columns (powers of two), and how the hardware works on it."""

    tokens: int
    columns: int
    warps: int
    stages: int


# By slots up to and bytes of a number, so that a tile fits the registers: compiled for sm_80 and sm_90, no kernel
# spills at 64 slots and 64 columns in half types, and shared memory stays under the 163 KiB of sm_80 everywhere.
_FORWARD = {
    (64, 2): Tiles(tokens=128, columns=64, warps=4, stages=3),
    (128, 2): Tiles(tokens=64, columns=64, warps=8, stages=2),
    (256, 2): Tiles(tokens=64, columns=64, warps=8, stages=2),
    (64, 4): Tiles(tokens=32, columns=32, warps=8, stages=1),
    (128, 4): Tiles(tokens=16, columns=32, warps=8, stages=1),
    (256, 4): Tiles(tokens=16, columns=16, warps=8, stages=1),
}
_BACKWARD = {
    (64, 2): Tiles(tokens=64, columns=64, warps=4, stages=2),
    (128, 2): Tiles(tokens=64, columns=64, warps=8, stages=1),
    (256, 2): Tiles(tokens=32, columns=32, warps=8, stages=1),
    (64, 4): Tiles(tokens=32, columns=32, warps=8, stages=1),
    (128, 4): Tiles(tokens=16, columns=32, warps=8, stages=1),
    (256, 4): Tiles(tokens=16, columns=16, warps=8, stages=1),
}


def padded(size: int, largest: int) -> int:
    """The power of two that holds `size`, between the 16 that a tensor core multiplies and `largest`."""
    return min(max(16, 1 << (size - 1).bit_length()), largest)


def forward_tiles(width: int, slots: int, itemsize: int) -> Tiles:
    """For the passes that keep nothing but a tile's logits in registers."""
    return _choose(_FORWARD, width, slots, itemsize)


def backward_tiles(width: int, slots: int, itemsize: int) -> Tiles:
    """For the passes that also hold a memory's gradient, slots x columns in float32."""
    return _choose(_BACKWARD, width, slots, itemsize)


def _choose(table: dict[tuple[int, int], Tiles], width: int, slots: int, itemsize: int) -> Tiles:
    tiles = table[max(64, padded(slots, MAX_SLOTS)), itemsize]
    # Further blocks of columns would be loaded ahead as well.
    stages = tiles.stages if width <= tiles.columns else 1
    return Tiles(tiles.tokens, tiles.columns, tiles.warps, stages)
