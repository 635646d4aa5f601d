"""Inspect a model's mixers: maps, gates and saturation, as numbers and figures."""

from tokenmix.lab.inspect.maps import MapNumbers, Tile, attention_maps, map_numbers, tiles_of

__all__ = ["MapNumbers", "Tile", "attention_maps", "map_numbers", "tiles_of"]
