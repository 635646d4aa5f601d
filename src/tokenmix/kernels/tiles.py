"""Sizes of the tiles that a kernel works on: equal shapes get equal sizes, so equal bits."""

from dataclasses import dataclass, replace

MAX_SLOTS = 256


@dataclass(frozen=True)
class Tiles:
    """A tile's tokens and its largest block of columns (powers of two), and how the hardware works on it."""

    tokens: int
    columns: int
    warps: int
    stages: int
    programs: int
    """How many programs a multiprocessor holds at once."""


# By slots up to and bytes of a number, so that a tile fits in registers: up to 64 columns in half precision no kernel
# spills, compiled for sm_90 with any number of slots and for sm_80 with 64. Shared memory stays under the 163 KiB of
# sm_80 everywhere. Programs are those that fit the registers and shared memory of sm_90.
_FORWARD = {
    (64, 2): Tiles(tokens=64, columns=64, warps=4, stages=3, programs=4),
    (128, 2): Tiles(tokens=64, columns=64, warps=8, stages=2, programs=2),
    (256, 2): Tiles(tokens=64, columns=64, warps=8, stages=2, programs=1),
    (64, 4): Tiles(tokens=32, columns=32, warps=8, stages=1, programs=1),
    (128, 4): Tiles(tokens=16, columns=32, warps=8, stages=1, programs=1),
    (256, 4): Tiles(tokens=16, columns=16, warps=8, stages=1, programs=1),
}
_BACKWARD = _FORWARD | {
    (64, 2): Tiles(tokens=64, columns=64, warps=4, stages=2, programs=2),
    (128, 2): Tiles(tokens=32, columns=64, warps=4, stages=2, programs=2),
    (256, 2): Tiles(tokens=32, columns=64, warps=8, stages=1, programs=1),
}
# 256 slots backward take 116 KiB; sm_86, sm_89 and sm_120 have 99. This spills.
_BACKWARD_SMALL = _BACKWARD | {(256, 2): Tiles(tokens=32, columns=32, warps=8, stages=1, programs=1)}


def padded_size(size: int, largest: int) -> int:
    """The power of two that holds `size`, between the 16 that a tensor core multiplies and `largest`."""
    return min(max(16, 1 << (size - 1).bit_length()), largest)


def forward_tiles(width: int, slots: int, itemsize: int) -> Tiles:
    """For the passes that keep nothing but a tile's logits in registers."""
    return _choose(_FORWARD, width, slots, itemsize)


def backward_tiles(width: int, slots: int, itemsize: int, shared: int | None = None) -> Tiles:
    """For the passes that also hold a memory's gradient, slots x columns in float32, in so much `shared` memory."""
    small = shared is not None and shared < 116 * 1024
    return _choose(_BACKWARD_SMALL if small else _BACKWARD, width, slots, itemsize)


def _choose(table: dict[tuple[int, int], Tiles], width: int, slots: int, itemsize: int) -> Tiles:
    tiles = table[max(64, padded_size(slots, MAX_SLOTS)), itemsize]
    # Further blocks of columns would be loaded ahead as well.
    return tiles if width <= tiles.columns else replace(tiles, stages=1)
