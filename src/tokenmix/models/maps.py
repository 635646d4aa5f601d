"""What networks with feature maps share: the sizes of their maps, and the rows of a cost table."""

from typing import Any, NamedTuple

from torch import Tensor, empty


class PartCost(NamedTuple):
    """Parameters and multiply-adds of one part of a network."""

    part: str
    parameters: int
    macs: int


class OnMaps:
    """A network with maps that `feature_info` tells of, finest first, counted for images of `img_size`."""

    img_size: tuple[int, int]
    feature_info: Any

    def meta_maps(self) -> list[Tensor]:
        """Maps of these sizes, shapes alone."""
        return [empty(1, entry["num_chs"], *self._grid(entry), device="meta") for entry in self.feature_info]

    def _grid(self, entry: Any) -> tuple[int, int]:
        return -(-self.img_size[0] // entry["reduction"]), -(-self.img_size[1] // entry["reduction"])

    @property
    def grid_size(self) -> tuple[int, int]:
        """(height, width) of the last map."""
        return self._grid(self.feature_info[-1])

    @property
    def num_tokens(self) -> int:
        """N, places of that map."""
        return self.grid_size[0] * self.grid_size[1]
