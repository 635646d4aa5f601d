"""The subject of a table of costs: a mixer at some number of tokens, or a model at some image size."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from tokenmix.errors import MissingExtra, UserError, needs, unknown_name
from tokenmix.layers.base import Mixer, near_square
from tokenmix.layers.table import (
    build_mixer,
    checked_own_mixers,
    create_mixer,
    get_spec,
    is_mixer,
    list_mixers,
    own_mixers,
)
from tokenmix.profiling.estimate import Pass
from tokenmix.profiling.measured import Measured

Build = Callable[[], Callable[[], object]]


class BenchmarkTarget(Protocol):
    """Something that can be built at several sizes."""

    @property
    def name(self) -> str: ...

    def default_sizes(self) -> Sequence[int]: ...
    def outline(self, size: int) -> Measured: ...
    def build(self, size: int) -> Measured: ...
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

    def outline(self, size: int) -> Measured:
        """The layer and its input with shapes only, to be counted."""
        built = mixer_with_input(self.name, self.dim, size, device="meta", dtype=self.dtype, **self.kwargs)
        if own_mixers(built.module):
            with checked_own_mixers(built.module):
                built.forward()
        return built

    def build(self, size: int) -> Measured:
        """The layer with one sample of that many tokens."""
        return mixer_with_input(self.name, self.dim, size, device=self.device, dtype=self.dtype, **self.kwargs)

    def dry_run(self, size: int, which: Pass) -> Build:
        """One pass, for a run with shapes only."""
        return lambda: getattr(self.build(size), which)


def layer_for(name: str, dim: int, num_tokens: int, **kwargs: Any) -> Mixer:
    """The mixer as it is used inside a stack; `kwargs` go to the layers that have such arguments."""
    spec = get_spec(name)
    known = {**_known(spec.layer, kwargs), **spec.later}
    return create_mixer(name, dim, num_tokens=num_tokens, **known)


def mixer_with_input(
    name: str,
    dim: int,
    num_tokens: int,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **kwargs: Any,
) -> Measured:
    """Build a mixer and random input for it. In a stack whose layers pass scores on, the layer before is run once."""
    kwargs = {**kwargs, "device": device, "dtype": dtype}
    spec = get_spec(name)
    # For a mixer of the user's that is built without device and type.
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        with torch.device(device or "cpu"):
            layer = layer_for(name, dim, num_tokens, **kwargs)
    finally:
        torch.set_default_dtype(before)
    x = torch.randn(1, num_tokens, dim, device=device, dtype=dtype)
    if layer.capabilities.layout == "2d":
        x = x.transpose(1, 2).unflatten(2, near_square(num_tokens)).contiguous()
    carry = None
    if spec.leader is not None:
        leader = build_mixer(spec.leader, f"the leader of {name!r}", dim, num_tokens, _known(spec.leader, kwargs))
        with torch.no_grad():
            carry = leader.mix(x)[1]
    return Measured(layer, x, carry)


def _known(layer: type[Mixer], offered: Mapping[str, Any]) -> dict[str, Any]:
    accepted = inspect.signature(layer).parameters
    return {name: value for name, value in offered.items() if name in accepted and value is not None}


_OF_THE_TABLE = {"dim", "num_tokens", "device", "dtype"}


def targets_for(
    names: Sequence[str], *, dim: int, device: torch.device, dtype: torch.dtype, kwargs: Mapping[str, Any]
) -> Sequence[BenchmarkTarget]:
    """Mixers, self-attention first, or models in the order given.

    Raises:
        UserError: a name that is neither, mixers and models together, or an argument that none of the mixers has.
    """
    if are_mixers(names):
        mixers = list(dict.fromkeys(["self", *names]))
        accepted = {key for name in mixers for key in inspect.signature(get_spec(name).layer).parameters}
        if unknown := sorted(set(kwargs) - accepted):
            known = ", ".join(sorted(accepted - _OF_THE_TABLE))
            raise UserError(f"none of {', '.join(mixers)} has an argument {unknown[0]!r}; they take {known}")
        return [MixerTarget(name, dim, device, dtype, kwargs) for name in mixers]
    from tokenmix.profiling.model_target import ModelTarget

    return [ModelTarget(name, device, dtype) for name in dict.fromkeys(names)]


def are_mixers(names: Sequence[str]) -> bool:
    """Whether the names are mixers, or else models; `UserError` for a name that is neither, and for both together."""
    others = [name for name in names if not is_mixer(name)]
    if not others:
        return True
    try:
        with needs("the cost of a model"):
            from tokenmix.profiling.model_target import check_is_model
    except MissingExtra as missing:
        raise MissingExtra(f"{unknown_name('mixer', others[0], list_mixers())}; if it is a model: {missing}") from None
    for name in others:
        check_is_model(name)
    if len(others) < len(names):
        mixer = next(name for name in names if is_mixer(name))
        raise UserError(f"{mixer!r} is a mixer and {others[0]!r} a model; measure them in separate commands")
    return False
