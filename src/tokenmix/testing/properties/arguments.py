"""Every constructor argument does something, and device and dtype are obeyed."""

import inspect
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tokenmix.testing.harness import (
    Build,
    Builder,
    NotApplicable,
    PropertyFailure,
    awake,
    call,
    fresh,
    gap,
    traits,
)

__all__ = ["alternatives", "arguments", "device_and_dtype"]

CHOOSES_A_PATH = frozenset({"backend", "checkpoint", "device", "dtype", "flash", "fused", "inplace"})
"""Arguments that strangers use to choose how a result is computed, not which."""


def arguments(build: Build, x: Tensor) -> None:
    """Another value of an argument changes the weights or the answer, or is refused."""
    tried = list(alternatives(build))
    if not tried:
        raise NotApplicable("has no argument whose other values could be told from its annotation")
    default = _Behaviour.of(build, x)
    ignored = []
    for name, value in tried:
        try:
            changed = _Behaviour.of(build, x, **{name: value})
        except Exception:  # a refusal of the value is an answer as well
            continue
        if changed.equals(default):
            ignored.append(f"{name}={value!r}")
    if ignored:
        raise PropertyFailure(f"nothing changes with {', '.join(ignored)}")


def alternatives(build: Build) -> Iterator[tuple[str, Any]]:
    """For each argument of the constructor another value than the one in use, where there is a natural one."""
    if not isinstance(build, Builder):
        return
    constructor = _constructor(build)
    hints = _hints(constructor)
    for name, parameter in inspect.signature(constructor).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if name in build.alternatives:
            yield name, build.alternatives[name]
        elif name not in CHOOSES_A_PATH | build.unseen:
            current = build.kwargs.get(name, parameter.default)
            other = _other_value(current, hints.get(name))
            if other is not None:
                yield name, other


def _constructor(build: Builder) -> Any:
    """What has the arguments: the function that builds the layer, or the class if the function passes them on."""
    passes_on = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(build.make).parameters.values())
    return type(fresh(build)) if passes_on or inspect.isclass(build.make) else build.make


def _hints(constructor: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(constructor.__init__ if inspect.isclass(constructor) else constructor)
    except Exception:  # annotations that cannot be resolved are a stranger's own affair
        return {}


def _other_value(current: Any, hint: Any) -> Any:
    """A value that differs from the current one: another choice, the other truth, half the number."""
    choices = [c for h in (hint, *typing.get_args(hint)) if typing.get_origin(h) is Literal for c in typing.get_args(h)]
    others = [c for c in choices if c != current]
    if others:
        return others[0]
    if isinstance(current, bool):
        return not current
    if isinstance(current, int):
        return current // 2 if current > 1 and current % 2 == 0 else current + 1
    if isinstance(current, float):
        return current + 0.25
    if current is None:
        numbers = {bool: True, int: 2, float: 0.5}
        return next((numbers[h] for h in (hint, *typing.get_args(hint)) if h in numbers), None)
    return None


@dataclass(frozen=True)
class _Behaviour:
    """All that can be seen of a layer: its initial state, and what it answers once awake."""

    state: dict[str, Tensor]
    answers: tuple[Tensor, ...]

    @classmethod
    def of(cls, build: Build, x: Tensor, **changes: Any) -> "_Behaviour":
        state = {k: v.clone() for k, v in fresh(build, **changes).state_dict().items()}
        return cls(state, tuple(_answers(awake(build, **changes), build, x)))

    def equals(self, other: "_Behaviour") -> bool:
        if self.state.keys() != other.state.keys():
            return False
        pairs = [(v, other.state[k]) for k, v in self.state.items()] + list(zip(self.answers, other.answers))
        return all(a.shape == b.shape and a.dtype == b.dtype and gap(a, b) < 1e-6 for a, b in pairs)


@torch.no_grad()
def _answers(layer: nn.Module, build: Build, x: Tensor) -> Iterator[Tensor]:
    yield call(layer, x)
    if traits(layer, build, x).mask:
        places = x[0, 0].numel() if x.dim() == 4 else x.shape[1]
        mask = torch.ones(x.shape[0], places, dtype=torch.bool)
        mask[:, places // 2 :] = False
        yield call(layer, x, mask)
    yield call(layer.train(), x)
    yield from layer.buffers()


def device_and_dtype(build: Build, x: Tensor) -> None:
    """`device` and `dtype` of the constructor reach every parameter."""
    if not isinstance(build, Builder) or not {"device", "dtype"} <= set(
        inspect.signature(_constructor(build)).parameters
    ):
        raise NotApplicable("takes no device and dtype")
    for name, weight in fresh(build, dtype=torch.float64).named_parameters():
        if weight.dtype != torch.float64:
            raise PropertyFailure(f"{name} is {weight.dtype} in a layer built with dtype=torch.float64")
    for name, weight in fresh(build, device="meta").named_parameters():
        if weight.device.type != "meta":
            raise PropertyFailure(f"{name} is on {weight.device} in a layer built on another device")
