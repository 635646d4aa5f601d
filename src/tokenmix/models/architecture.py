"""A network's own numbers as one frozen dataclass, and the flat keyword arguments by which a network is asked for."""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, NamedTuple

from torch import Tensor, empty


class Architecture:
    """Base of the frozen, keyword-only dataclasses that a network is made from.

    A constructor, or a builder, has such a class as the annotation of a parameter. The fields are then keyword
    arguments of `create_model`, next to the constructor's other parameters: `create_model("gmlp_tiny", depth=4,
    num_classes=10)` is `GMLP(GMLPArchitecture(embed_dim=128, depth=4), num_classes=10)`.
    """


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


def _groups(build: Callable[..., Any]) -> dict[str, type[Any]]:
    """The parameters that are an `Architecture`, with its class."""
    kinds = {name: p.annotation for name, p in inspect.signature(build).parameters.items()}
    return {name: kind for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, Architecture)}


def flat_arguments(build: Callable[..., Any]) -> dict[str, Any]:
    """The keyword arguments of a network with their defaults, `dataclasses.MISSING` where there is none."""
    groups = _groups(build)
    own = {f.name: f.default for kind in groups.values() for f in fields(kind)}
    parameters = inspect.signature(build).parameters
    rest = {name: MISSING if p.default is p.empty else p.default for name, p in parameters.items()}
    return own | {name: default for name, default in rest.items() if name not in groups}


def takes_any(build: Callable[..., Any]) -> bool:
    """Whether a builder has `**kwargs`, and so checks the arguments itself."""
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(build).parameters.values())


def make_network(build: Callable[..., Any], /, **arguments: Any) -> Any:
    """The network of these flat arguments; `TypeError` for one that is neither a field nor a parameter."""
    made = {}
    for name, kind in _groups(build).items():
        own = {f.name: arguments.pop(f.name) for f in fields(kind) if f.name in arguments}
        made[name] = kind(**own)
    return build(**made, **arguments)
