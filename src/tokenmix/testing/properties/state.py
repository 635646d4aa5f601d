"""Parameters, buffers and what happens to them: registration, gradients, copies, repeated calls."""

import copy
import io

import torch
from torch import Tensor, nn

from tokenmix.testing.harness import (
    Build,
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
)


def registered(build: Build, x: Tensor) -> None:
    """Every weight is a registered parameter, every constant a buffer, every sub-module known to the layer."""
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
    """Every parameter, and the input, gets a finite gradient from a training step."""
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


def eval_stable(build: Build, x: Tensor) -> None:
    """In eval mode a second call gives the same output, without gradients too, and leaves the state as it was."""
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
    """Forward and backward leave the input tensor as it was."""
    for training in (False, True):
        layer, given = awake(build).train(training), x.clone()
        with torch.no_grad():
            call(layer, given)
        if not torch.equal(given, x):
            raise PropertyFailure(f"forward writes into its input, in {'training' if training else 'eval'} mode")


def non_contiguous(build: Build, x: Tensor) -> None:
    """A strided view of the same numbers gives the same output."""
    layer, x, tolerance = exact(build, x)
    strided = x.transpose(-1, -2).contiguous().transpose(-1, -2)
    sliced = torch.stack((x, -x), dim=-1)[..., 0]
    expected = call(layer, x)
    for view in (strided, sliced):
        assert_close(call(layer, view), expected, tolerance, "a non-contiguous input gives another output")


def _trained(layer: nn.Module, x: Tensor) -> Tensor:
    """The output in eval mode after one step of gradient descent."""
    layer.zero_grad()
    out = call(layer.train(), x)
    if out.requires_grad:
        out.square().mean().backward()
    with torch.no_grad():
        for weight in layer.parameters():
            if weight.grad is not None:
                weight -= 0.1 * weight.grad
        return call(layer.eval(), x)


def _reloaded(layer: nn.Module, build: Build) -> nn.Module:
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other = fresh(build, seed=5)
    other.load_state_dict(torch.load(file, weights_only=True))
    return other.eval()


def copies(build: Build, x: Tensor) -> None:
    """A deep copy, a saved and loaded layer, and one in float64 give the same output and take the same step."""
    original = awake(build)
    _no_shared_storage(original)
    twins = {
        "a deep copy": copy.deepcopy(original),
        "a saved and loaded layer": _reloaded(original, build),
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


def _no_shared_storage(layer: nn.Module) -> None:
    owners: dict[int, str] = {}
    for name, weight in layer.named_parameters():
        place = weight.untyped_storage().data_ptr()
        if place and place in owners:
            raise PropertyFailure(f"{owners[place]} and {name} share storage; a copy or a move unties them")
        owners[place] = name


def seeds(build: Build, x: Tensor) -> None:
    """The same seed gives the same weights and the same output in training mode."""
    one, two = fresh(build), fresh(build)
    for (name, a), b in zip(one.state_dict().items(), two.state_dict().values(), strict=True):
        if not torch.equal(a, b):
            raise PropertyFailure(f"{name} starts differently under the same seed")
    if not torch.equal(call(one.train(), x), call(two.train(), x)):
        raise PropertyFailure("two equal layers give different outputs under the same seed")
