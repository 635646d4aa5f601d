"""Inspect a model's mixers: maps, gates and saturation, as numbers and figures."""

from typing import TYPE_CHECKING

from tokenmix.lab.inspect.maps import MapNumbers, Tile, attention_maps, map_numbers, tiles_of

if TYPE_CHECKING:
    from tokenmix.lab.inspect.run import inspect_run

__all__ = ["MapNumbers", "Tile", "attention_maps", "inspect_run", "map_numbers", "tiles_of"]


def __getattr__(name: str) -> object:
    # The rest needs the trainer's run folders and matplotlib, which reading a map does not.
    if name != "inspect_run":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tokenmix.lab.inspect.run import inspect_run

    return inspect_run
