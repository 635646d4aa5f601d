"""The problems that kernels are given, and the equation in float64 that they are held to."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

__all__ = ["Inputs", "assert_as_good_as", "external_inputs", "gate_inputs", "outputs", "poisoned"]

Inputs = dict[str, Tensor]


def _draw(seed: int, dtype: torch.dtype, device: str, **shapes: tuple[int, ...]) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()
        for name, shape in shapes.items()
    }


def external_inputs(
    size: int, heads: int, n: int, d: int, width: int, slots: int, *, dtype: torch.dtype, device: str = "cpu"
) -> Inputs:
    """A query with heads inside tokens, as a projection leaves it, memories and biases, all wanting gradients."""
    drawn = _draw(
        n + slots,
        dtype,
        device,
        query=(size, n, heads, d),
        key_memory=(slots, d),
        value_memory=(slots, width),
        key_bias=(slots,),
        value_bias=(width,),
    )
    drawn["query"] = drawn["query"].detach().transpose(1, 2).requires_grad_()
    return drawn


def gate_inputs(size: int, n: int, channels: int, *, dtype: torch.dtype, device: str = "cpu") -> Inputs:
    """Two halves of one tensor in `z`, the gate's weights and an addend."""
    shapes = {"z": (size, n, 2 * channels), "weight": (n, n), "bias": (n,), "addend": (size, n, channels)}
    return _draw(n + channels, dtype, device, **shapes)


def outputs(function: Callable[..., Tensor], inputs: Inputs, **options: Any) -> Inputs:
    """The result under `"out"` and the gradient of each input under its name, for one drawn gradient of the result."""
    out = function(**inputs, **options)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.device, out.dtype)
    names = list(inputs)
    return {"out": out, **dict(zip(names, torch.autograd.grad(out, [inputs[name] for name in names], grad)))}


def exact(inputs: Inputs) -> Inputs:
    """The same numbers in float64."""
    return {name: tensor.detach().double().requires_grad_() for name, tensor in inputs.items()}


def assert_as_good_as(
    kernel: Callable[..., Tensor], equation: Callable[..., Tensor], inputs: Inputs, **options: Any
) -> None:
    """The kernel errs no more than a few times what the equation errs in the same type, both against float64."""
    reference = outputs(equation, exact(inputs), **options)
    theirs = outputs(equation, inputs, **options)
    for name, ours in outputs(kernel, inputs, **options).items():
        assert ours.dtype == theirs[name].dtype
        # The gradient of key_bias is 0 in exact arithmetic, where only its parts have a size.
        size = reference[name].abs().max() + (4.0 if name == "key_bias" else 0.0)
        allowed = 4 * (theirs[name] - reference[name]).abs().max() + 4 * torch.finfo(ours.dtype).eps * size
        error = (ours - reference[name]).abs().max()
        assert error <= allowed, f"{name}: {error:.3g} of {size:.3g}, {allowed:.3g} allowed"


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory that nobody wrote holds NaN: an element that a kernel forgets shows."""

    def fill(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args, **options: make(*args, **options).fill_(torch.nan)

    with (
        mock.patch.object(torch, "empty", fill(torch.empty)),
        mock.patch.object(torch, "empty_permuted", fill(torch.empty_permuted)),
        mock.patch.object(Tensor, "new_empty", fill(Tensor.new_empty)),
    ):
        yield
