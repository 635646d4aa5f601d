"""Finite where numbers are large, small or half as long; and the cost that a layer states."""

import torch
from torch import Tensor

from tokenmix.layers.base import count_macs
from tokenmix.testing.harness import (
    Build,
    NotApplicable,
    PropertyFailure,
    assert_close,
    assert_finite_gradients,
    awake,
    call,
    to_tokens,
)


def finite(build: Build, x: Tensor) -> None:
    """Outputs and gradients are finite for inputs from 0 and a thousandth to a thousand times the natural size."""
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
    """In bfloat16 and float16 the output is near the float32 one, and finite for larger inputs too."""
    layer = awake(build)
    with torch.no_grad():
        expected = call(layer, x)
        for dtype in (torch.bfloat16, torch.float16):
            half = awake(build).to(dtype)
            out = call(half, x.to(dtype))
            if out.dtype != dtype:
                raise PropertyFailure(f"the output for {dtype} input is {out.dtype}")
            # Several roundings in a row; a wrong axis or a lost term is far outside.
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
    """The multiply-adds that the layer states are those that an unfused run does, within 1 %."""
    layer = awake(build)
    state = getattr(layer, "macs", None)
    if not callable(state):
        raise NotApplicable("has no macs(num_tokens)")
    tokens = to_tokens(x).shape[1]
    stated = int(state(tokens))
    _, counted = count_macs(call, layer, x[:1])
    if abs(stated - counted) > 0.01 * counted:
        raise PropertyFailure(f"macs({tokens}) returns {stated}, counted in a run: {counted}")
