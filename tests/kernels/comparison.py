"""The problems that kernels are given, and the equation in float64 that they are held to."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

__all__ = ["Inputs", "assert_as_good_as", "external_inputs", "outputs", "poisoned"]

Inputs = dict[str, Tensor]


def external_inputs(
    size: int, heads: int, n: int, d: int, width: int, slots: int, *, dtype: torch.dtype, device: str = "cpu"
) -> Inputs:
    """A query with heads inside tokens, as a projection leaves it, memories and biases, all wanting gradients."""
    generator = torch.Generator().manual_seed(n + slots)
    shapes = {
        "query": (size, n, heads, d),
        "key_memory": (slots, d),
        "value_memory": (slots, width),
        "key_bias": (slots,),
        "value_bias": (width,),
    }
    drawn = {name: torch.randn(shape, generator=generator).to(device, dtype) for name, shape in shapes.items()}
    drawn["query"] = drawn["query"].transpose(1, 2)
    return {name: tensor.requires_grad_() for name, tensor in drawn.items()}


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
