"""A sample's output does not depend on the other samples of its batch."""

import copy

from torch import Tensor

from tokenmix.testing.harness import Build, NotApplicable, assert_close, call, exact, noise, traits

__all__ = ["batch_independence", "batch_independence_training"]


def _other_mates(x: Tensor) -> Tensor:
    changed = x.clone()
    changed[1:] = 3 * noise(*x[1:].shape, seed=2).to(x)
    return changed


def batch_independence(build: Build, x: Tensor) -> None:
    """In eval mode the answer for a sample does not change with its batch mates, nor when it is alone."""
    layer, x, tolerance = exact(build, x)
    expected = call(layer, x)[:1]
    assert_close(call(layer, _other_mates(x))[:1], expected, tolerance, "sample 0 changes with its batch mates")
    assert_close(call(layer, x[:1]), expected, tolerance, "sample 0 changes when it is alone in its batch")


def batch_independence_training(build: Build, x: Tensor) -> None:
    """The same in training mode, for a layer without BatchNorm."""
    layer, x, tolerance = exact(build, x)
    if not traits(layer, build, x).independent:
        raise NotApplicable("normalises over the batch while training, by declaration")
    # A layer may take a step while training, as spectral norm does: both answers come from a layer at its first.
    twin = copy.deepcopy(layer).train()
    expected = call(layer.train(), x)[:1]
    assert_close(call(twin, _other_mates(x))[:1], expected, tolerance, "sample 0 changes with its batch mates")
