"""Every constructor argument does something, and device and dtype are obeyed."""

import inspect
import typing
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from tokenmix.testing.harness import (
    Build,
    Builder,
    NotApplicable,
    PropertyFailure,
    awake,
    call,
    fresh,
    gap,
    to_tokens,
    traits,
)

CHOOSES_A_PATH = frozenset(
    {
        *("backend", "checkpoint", "chunk_size", "device", "dtype"),
        *("flash", "fused", "implementation", "inplace", "mode"),
    }
)
"""Arguments that choose how a result is computed, not which: nothing is to change with them."""


def arguments(build: Build, x: Tensor) -> None:
    """Another value of an argument changes the weights or the output, or is refused."""
    tried = list(alternatives(build))
    if not tried:
        raise NotApplicable("has no argument whose other values could be guessed from its annotation")
    default = _behaviour(build, x)
    ignored = []
    for name, values in tried:
        if all(_is_ignored(build, x, default, name, value) for value in values):
            ignored.append(f"{name}={values[0]!r}")
    if ignored:
        raise PropertyFailure(f"nothing changes with {', '.join(ignored)}")


def _is_ignored(build: Build, x: Tensor, default: dict[str, Tensor], name: str, value: Any) -> bool:
    try:
        changed = _behaviour(build, x, **{name: value})
    except Exception:  # a refusal of the value is an answer as well
        return False
    if changed.keys() != default.keys():
        return False
    pairs = [(a, default[key]) for key, a in changed.items()]
    return all(a.shape == b.shape and a.dtype == b.dtype and gap(a, b) < 1e-6 for a, b in pairs)


def alternatives(build: Build) -> Iterator[tuple[str, list[Any]]]:
    """For each argument of the constructor other values than the one in use, where there are natural ones."""
    if not isinstance(build, Builder):
        return
    constructor = _constructor(build)
    hints = _hints(constructor)
    for name, parameter in inspect.signature(constructor).parameters.items():
        if name in CHOOSES_A_PATH or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        values = _other_values(build.kwargs.get(name, parameter.default), hints.get(name))
        if values:
            yield name, values


def _constructor(build: Builder) -> Any:
    """What has the arguments: the function that builds the layer, or the class if the function passes them on."""
    passes_on = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(build.make).parameters.values())
    return type(fresh(build)) if passes_on or inspect.isclass(build.make) else build.make


def _hints(constructor: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(constructor.__init__ if inspect.isclass(constructor) else constructor)
    except Exception:  # annotations that cannot be resolved are a stranger's own affair
        return {}


def _other_values(current: Any, hint: Any) -> list[Any]:
    """Values that differ from the current one: another choice, the other truth, half the number."""
    kinds = (hint, *typing.get_args(hint))
    choices = [c for kind in kinds if typing.get_origin(kind) is Literal for c in typing.get_args(kind)]
    if choices:
        return [c for c in choices if c != current][:1]
    if isinstance(current, bool):
        return [not current]
    if isinstance(current, int):
        return [current // 2 if current > 1 and current % 2 == 0 else current + 1]
    if isinstance(current, float):
        return [current + 0.25]
    if current is None:
        # None often stands for one of the two truths.
        numbers: dict[Any, list[Any]] = {bool: [True, False], int: [2], float: [0.5]}
        return next((numbers[kind] for kind in kinds if kind in numbers), [])
    return []


@torch.no_grad()
def _behaviour(build: Build, x: Tensor, **changes: Any) -> dict[str, Tensor]:
    """All that can be seen of a layer: its initial state, what it outputs once awake, and its buffers after that."""
    seen = {f"initial {name}": tensor.clone() for name, tensor in fresh(build, **changes).state_dict().items()}
    layer = awake(build, **changes)
    seen["output"] = call(layer, x)
    if traits(layer, build, x).mask:
        mask = torch.ones(to_tokens(x).shape[:2], dtype=torch.bool)
        mask[:, mask.shape[1] // 2 :] = False
        seen["masked output"] = call(layer, x, mask)
    seen["output in training mode"] = call(layer.train(), x)
    return seen | {f"buffer {name}": tensor for name, tensor in layer.named_buffers()}


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
