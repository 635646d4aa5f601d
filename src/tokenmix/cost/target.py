"""The subject of a table of costs: a mixer at some number of tokens, or a model at some image size."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from tokenmix.cost.estimate import Pass
from tokenmix.cost.random_input import mixer_with_input
from tokenmix.errors import MissingExtra, UserError, needs, unknown_name
from tokenmix.layers.table import is_mixer, list_mixers

Build = Callable[[], Callable[[], object]]


class Measurable(Protocol):
    """Something built, with its input."""

    def forward(self) -> Tensor: ...
    def step(self) -> None: ...
    def parameters(self) -> int: ...
    def macs(self) -> int: ...
    def traffic(self) -> int: ...


class BenchmarkTarget(Protocol):
    """Something that can be built at several sizes."""

    @property
    def name(self) -> str: ...

    def default_sizes(self) -> Sequence[int]: ...
    def outline(self, size: int) -> Measurable: ...
    def build(self, size: int) -> Measurable: ...
    def dry_run(self, size: int, which: Pass) -> Build: ...


@dataclass(frozen=True)
class MixerTarget:
    """A mixer of the table; sizes are numbers of tokens."""

    name: str
    dim: int
    device: torch.device
    dtype: torch.dtype
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def default_sizes(self) -> Sequence[int]:
        """Numbers of tokens of images of 224, 512 and 1,024 px in patches of 16."""
        return 196, 1024, 4096

    def outline(self, size: int) -> Measurable:
        """The layer and its input with shapes only, to be counted."""
        return mixer_with_input(self.name, self.dim, size, device="meta", dtype=self.dtype, **self.kwargs)

    def build(self, size: int) -> Measurable:
        """The layer with one sample of that many tokens."""
        return mixer_with_input(self.name, self.dim, size, device=self.device, dtype=self.dtype, **self.kwargs)

    def dry_run(self, size: int, which: Pass) -> Build:
        """One pass, for a run with shapes only."""
        return lambda: getattr(self.build(size), which)


def targets_for(
    names: Sequence[str], *, dim: int, device: torch.device, dtype: torch.dtype, kwargs: Mapping[str, Any]
) -> Sequence[BenchmarkTarget]:
    """Mixers, self-attention first, or models in the order given.

    Raises:
        UserError: a name that is neither, or mixers and models together.
    """
    if are_mixers(names):
        return [MixerTarget(name, dim, device, dtype, kwargs) for name in dict.fromkeys(["self", *names])]
    from tokenmix.cost.model_target import ModelTarget

    return [ModelTarget(name, device, dtype) for name in dict.fromkeys(names)]


def are_mixers(names: Sequence[str]) -> bool:
    """Whether the names are mixers, or else models; `UserError` for a name that is neither, and for both together."""
    others = [name for name in names if not is_mixer(name)]
    if others:
        _check_are_models(others)
    if others and len(others) < len(names):
        mixer = next(name for name in names if is_mixer(name))
        raise UserError(f"{mixer!r} is a mixer and {others[0]!r} a model; measure them in separate commands")
    return not others


def _check_are_models(names: Sequence[str]) -> None:
    try:
        with needs("the cost of a model"):
            from tokenmix.cost.model_target import check_is_model
    except MissingExtra as missing:
        raise MissingExtra(f"{unknown_name('mixer', names[0], list_mixers())}; if it is a model: {missing}") from None
    for name in names:
        check_is_model(name)
