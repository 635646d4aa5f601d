"""Properties of a layer's state, arguments, finite values, half precision and stated cost."""

import copy
import inspect
import io
import itertools
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from tokenmix.layers.base import count_macs
from tokenmix.testing.harness import (
    Advice,
    Build,
    Builder,
    NotApplicable,
    PropertyFailure,
    assert_close,
    assert_finite_gradients,
    awake,
    call,
    contents,
    exact,
    fresh,
    gap,
    noise,
    to_tokens,
    traits,
)


def registered(build: Build, x: Tensor) -> None:
    """Every weight is a registered parameter, every constant a buffer, and every submodule is registered."""
    layer = awake(build)
    known = {id(t) for t in (*layer.parameters(), *layer.buffers(), *layer.modules())}
    for name, module in layer.named_modules():
        for attribute, value in vars(module).items():
            if attribute in ("_parameters", "_buffers", "_modules"):
                continue
            for hidden in contents(value):
                if id(hidden) not in known:
                    path = f"{name}.{attribute}".lstrip(".")
                    raise PropertyFailure(f"{path} holds a {type(hidden).__name__} that the layer has not registered")


def gradients(build: Build, x: Tensor) -> None:
    """Every parameter and the input get a finite gradient in a training step."""
    layer = awake(build).train()
    x = x.clone().requires_grad_()
    out = call(layer, x)
    if not out.requires_grad:
        raise PropertyFailure("the output has no gradient at all")
    (out * noise(*out.shape, seed=3).to(out)).sum().backward()
    for name, weight in (*layer.named_parameters(), ("the input", x)):
        if weight.requires_grad and weight.grad is None:
            raise PropertyFailure(f"{name} gets no gradient")
    assert_finite_gradients(layer, x, "{} gets a gradient that is not finite")


def slopes(build: Build, x: Tensor) -> None:
    """The gradients of the input and of the weights are the slopes of the output."""
    layer, x, _ = exact(build, x)
    if x.dtype != torch.float64:
        raise NotApplicable("does not compute in float64, and differences of float32 outputs are too coarse")
    x.requires_grad_()
    moved = {"the input": x, **{n: p for n, p in layer.named_parameters() if p.requires_grad and not p.is_complex()}}
    weights = noise(*call(layer, x).shape, seed=3).to(x)

    def value() -> Tensor:
        return (call(layer, x) * weights).sum()

    if not (out := value()).requires_grad:
        raise NotApplicable("the output has no gradient at all")
    found = torch.autograd.grad(out, list(moved.values()), allow_unused=True)
    for i, ((name, tensor), gradient) in enumerate(zip(moved.items(), found, strict=True)):
        if gradient is None:  # `gradients` reports it
            continue
        way = noise(*tensor.shape, seed=5 + i).to(tensor)
        told = float((gradient * way).sum())
        long, short = (_slope(value, tensor, step * way) / step for step in (1e-5, 1e-6))
        scale = max(abs(told), abs(long), abs(short), 1e-3)
        # A step over a kink, as of ReLU or max, has another slope than one of another length. Rounding has none.
        if short and abs(long - short) < 1e-2 * scale and abs(short - told) > 3e-2 * scale:
            raise Advice(f"the gradient of {name} along a line is {told:.3g}, the output's slope {short:.3g}")


@torch.no_grad()
def _slope(value: Callable[[], Tensor], tensor: Tensor, step: Tensor) -> float:
    """Half the difference of a value at a tensor plus and minus a step; the tensor keeps its numbers."""
    start, ends = tensor.clone(), list[float]()
    for moved in (start + step, start - step):
        tensor.copy_(moved)
        ends.append(float(value()))
    tensor.copy_(start)
    return (ends[0] - ends[1]) / 2


def eval_stable(build: Build, x: Tensor) -> None:
    """In eval mode a second call gives the same output, also without gradients, and does not change the state."""
    layer = awake(build)
    before, identities = copy.deepcopy(layer.state_dict()), {name: id(p) for name, p in layer.named_parameters()}
    with torch.no_grad():
        first, second = call(layer, x), call(layer, x, seed=7)
    if not torch.equal(first, second):
        raise PropertyFailure(f"a second call in eval mode differs from the first by {gap(second, first):.1e}")
    assert_close(call(layer, x), first, 1e-5, "with gradients enabled the output differs")
    if identities != {name: id(p) for name, p in layer.named_parameters()}:
        raise PropertyFailure("forward replaces a parameter; the optimiser keeps the old one")
    after = layer.state_dict()
    if after.keys() != before.keys():
        raise PropertyFailure(f"a call in eval mode changes the state: {sorted(after.keys() ^ before.keys())[0]}")
    for name, tensor in before.items():
        if not torch.equal(after[name], tensor):
            raise PropertyFailure(f"a call in eval mode changes {name}")


def input_kept(build: Build, x: Tensor) -> None:
    """Forward and backward do not change the input tensor and the mask."""
    padded = torch.ones(to_tokens(x).shape[:2], dtype=torch.bool)
    padded[:, -1] = False
    masks = (None, padded) if traits(awake(build), build).mask else (None,)
    for training, mask in itertools.product((False, True), masks):
        layer, given = awake(build).train(training), x.clone()
        seen = None if mask is None else mask.clone()
        where = f"{'with a mask, ' * (mask is not None)}in {'training' if training else 'eval'} mode"
        with torch.no_grad():
            call(layer, given, seen)
        if not torch.equal(given, x):
            raise PropertyFailure(f"forward writes into its input, {where}")
        if seen is not None and mask is not None and not torch.equal(seen, mask):
            raise PropertyFailure(f"forward writes into its mask, {where}")
        out = call(layer, given.requires_grad_(), seen)
        if out.requires_grad:
            out.square().sum().backward()
        if not torch.equal(given, x):
            raise PropertyFailure(f"backward writes into the input, {where}")


def non_contiguous(build: Build, x: Tensor) -> None:
    """A strided view of the same numbers gives the same output."""
    layer, x, tolerance = exact(build, x)
    strided = x.transpose(-1, -2).contiguous().transpose(-1, -2)
    sliced = torch.stack((x, -x), dim=-1)[..., 0]
    expected = call(layer, x)
    for view in (strided, sliced):
        assert_close(call(layer, view), expected, tolerance, "a non-contiguous input gives another output")


def _trained(layer: nn.Module, x: Tensor) -> Tensor:
    layer.zero_grad()
    out = call(layer.train(), x)
    if out.requires_grad:
        out.square().mean().backward()
    with torch.no_grad():
        for weight in layer.parameters():
            if weight.grad is not None:
                weight -= 0.1 * weight.grad
        return call(layer.eval(), x)


def copies(build: Build, x: Tensor) -> None:
    """A deep copy, a reloaded layer and a float64 copy give the same output and take the same training step."""
    original, loaded = awake(build), fresh(build, 5)
    owners: dict[int, str] = {}
    for name, weight in original.named_parameters():
        place = weight.untyped_storage().data_ptr()
        if place and place in owners:
            raise PropertyFailure(f"{owners[place]} and {name} share storage; a copy or a move unties them")
        owners[place] = name
    file = io.BytesIO()
    torch.save(original.state_dict(), file)
    file.seek(0)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    twins = {
        "a deep copy": copy.deepcopy(original),
        "a saved and loaded layer": loaded.eval(),
        "the layer in float64": copy.deepcopy(original).double(),
    }
    with torch.no_grad():
        expected = call(original, x)
    trained = _trained(original, x)
    for name, twin in twins.items():
        own = x.to(next((p.dtype for p in twin.parameters()), x.dtype))
        with torch.no_grad():
            assert_close(call(twin, own).to(x.dtype), expected, 1e-4, f"{name} gives another output")
        assert_close(_trained(twin, own).to(x.dtype), trained, 1e-3, f"{name} trains differently")
        for (key, a), b in zip(twin.named_parameters(), original.parameters(), strict=True):
            assert_close(a.to(b.dtype), b, 1e-4, f"{name} trains {key} differently")


def seeds(build: Build, x: Tensor) -> None:
    """The same seed gives the same weights and the same output in training mode."""
    one, two = fresh(build), fresh(build)
    for (name, a), b in zip(one.state_dict().items(), two.state_dict().values(), strict=True):
        if not torch.equal(a, b):
            raise PropertyFailure(f"{name} starts differently under the same seed")
    if not torch.equal(call(one.train(), x), call(two.train(), x)):
        raise PropertyFailure("two equal layers give different outputs under the same seed")


CHOOSES_A_PATH = frozenset(
    {
        *("backend", "checkpoint", "chunk_size", "device", "dtype"),
        *("flash", "fused", "implementation", "inplace", "mode"),
    }
)
"""Arguments that select an implementation and must not change the result."""


def arguments(build: Build, x: Tensor) -> None:
    """Another value of an argument changes the weights or the output, or is refused."""
    tried = list(alternatives(build))
    if not tried:
        raise NotApplicable("has no argument whose other values could be guessed from its annotation")
    default = _behaviour(build, x)
    ignored = []
    for name, values in tried:
        any_width = name == "dim" and next(awake(build).parameters(), None) is None
        if not any_width and all(_is_ignored(build, x, default, name, value) for value in values):
            ignored.append(f"{name}={values[0]!r}")
    if ignored:
        raise PropertyFailure(f"nothing changes with {', '.join(ignored)}")


def _is_ignored(build: Build, x: Tensor, default: dict[str, Tensor], name: str, value: object) -> bool:
    try:
        changed = _behaviour(build, x, **{name: value})
    except Exception:  # refusing the value is also correct
        return False
    if changed.keys() != default.keys():
        return False
    pairs = [(a, default[key]) for key, a in changed.items()]
    return all(a.shape == b.shape and a.dtype == b.dtype and gap(a, b) < 1e-6 for a, b in pairs)


def alternatives(build: Build) -> Iterator[tuple[str, Sequence[object]]]:
    """Other natural values for each constructor argument."""
    if not isinstance(build, Builder):
        return
    constructor = _constructor(build)
    try:
        hints = typing.get_type_hints(constructor.__init__ if inspect.isclass(constructor) else constructor)
    except Exception:  # a user's annotations may not resolve
        hints = {}
    for name, parameter in inspect.signature(constructor).parameters.items():
        if name in CHOOSES_A_PATH or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        values = _other_values(build.kwargs.get(name, parameter.default), hints.get(name))
        if values:
            yield name, values


def _constructor(build: Builder) -> Build:
    """The callable with the arguments: the function that builds the layer, or the class if it forwards them."""
    passes_on = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(build.make).parameters.values())
    return type(fresh(build)) if passes_on and not inspect.isclass(build.make) else build.make


def _other_values(current: object, hint: object) -> Sequence[object]:
    """Values that differ from the current one: another choice, the other boolean, half the number."""
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
        # None often stands for one of the booleans.
        numbers: dict[object, Sequence[object]] = {bool: [True, False], int: [2], float: [0.5]}
        return next((numbers[kind] for kind in kinds if kind in numbers), [])
    return []


@torch.no_grad()
def _behaviour(build: Build, x: Tensor, **changes: object) -> dict[str, Tensor]:
    """Observable behaviour of a layer: initial state, output when awake, and buffers afterwards."""
    seen = {f"initial {name}": tensor.clone() for name, tensor in fresh(build, **changes).state_dict().items()}
    layer = awake(build, **changes)
    seen["output"] = call(layer, x)
    if traits(layer, build).mask:
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


def finite(build: Build, x: Tensor) -> None:
    """Outputs and gradients are finite for inputs of 0 and of 0.001 to 1,000 times the natural size."""
    for scale in (0.0, 1e-3, 1.0, 1e3):
        for training in (False, True):
            layer = awake(build).train(training)
            given = (x * scale).requires_grad_()
            out = call(layer, given)
            if not torch.isfinite(out).all():
                raise PropertyFailure(f"the output for input times {scale:g} is not finite")
            out.sum().backward()
            assert_finite_gradients(layer, given, f"the gradient of {{}} at input times {scale:g} is not finite")


def half_precision(build: Build, x: Tensor) -> None:
    """In bfloat16 and float16 the output is near the float32 output, and finite for larger inputs."""
    layer = awake(build)
    with torch.no_grad():
        expected = call(layer, x)
        for dtype in (torch.bfloat16, torch.float16):
            half = awake(build).to(dtype)
            out = call(half, x.to(dtype))
            if out.dtype != dtype:
                raise PropertyFailure(f"the output for {dtype} input is {out.dtype}")
            # Allows several roundings; a wrong axis or a lost term exceeds this by far.
            assert_close(out, expected, 16 * torch.finfo(dtype).eps, f"in {dtype} the output differs")
            if not torch.isfinite(call(half, (x * 30).to(dtype))).all():
                raise PropertyFailure(f"the output for input times 30 is not finite in {dtype}")


def autocast(build: Build, x: Tensor) -> None:
    """Under autocast to bfloat16 a training step works, near the float32 output."""
    layer = awake(build).train()
    expected = call(awake(build).train(), x).detach()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = call(layer, given := x.clone().requires_grad_())
    assert_close(out, expected, 16 * torch.finfo(torch.bfloat16).eps, "under autocast the output differs")
    out.float().square().mean().backward()
    assert_finite_gradients(layer, given, "under autocast the gradient of {} is not finite")


def macs(build: Build, x: Tensor) -> None:
    """The stated multiply-adds equal those of an unfused run within 1 %."""
    layer = awake(build)
    state = getattr(layer, "macs", None)
    if not callable(state):
        raise NotApplicable("has no macs(num_tokens)")
    tokens = to_tokens(x).shape[1]
    stated = int(state(tokens))
    _, counted = count_macs(call, layer, x[:1])
    if abs(stated - counted) > 0.01 * counted:
        raise PropertyFailure(f"macs({tokens}) returns {stated}, counted in a run: {counted}")
