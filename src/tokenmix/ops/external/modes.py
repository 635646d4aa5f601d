"""What the hand-written forms of external attention share: derivatives of other modes, by the reference."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tokenmix.ops.external.reference import reference


class AnyMode:
    """Forward mode and vmap for an `autograd.Function` whose first arguments are the query, both memories, both biases
    and the mask; put it before the function's class."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor, None]:
        """The reference's, as the transpose of the transpose: a rule of forward mode has no second level of it."""
        tensors = ctx.saved_tensors
        run, there = _written(tensors, ctx.num_steps)
        directions = [
            torch.zeros_like(tensor) if tangent is None else tangent
            for tensor, tangent in zip(tensors[:5], tangents[:5], strict=True)
            if tensor is not None
        ]
        out, pull = torch.func.vjp(run, *there)[:2]
        return torch.func.vjp(pull, torch.zeros_like(out))[1](tuple(directions))[0], None

    @classmethod
    def one_by_one(cls, info: Any, in_dims: tuple[int | None, ...], args: tuple[Any, ...]) -> Any:
        """The calls of a vmap one after the other, each with its memories and its mask."""
        calls = [
            cls.apply(*(arg if dim is None else arg.select(dim, i) for arg, dim in zip(args, in_dims, strict=True)))  # type: ignore[attr-defined]
            for i in range(info.batch_size)
        ]
        out, offsets = (torch.stack(each) for each in zip(*calls, strict=True))
        return (out, offsets), (0, 0)


def of_any_mode(form: Any) -> Any:
    """An `autograd.Function` with the rules of forward mode and vmap too, which `torch.compile` does not take."""

    class Form(AnyMode, form):  # type: ignore[misc]
        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
            form.setup_context(ctx, inputs, output)
            ctx.save_for_forward(*inputs[:6])

        @staticmethod
        def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
            return Form.one_by_one(info, in_dims, args)

    return Form


def written_gradients(grad: Tensor, tensors: Sequence[Any], num_steps: int) -> list[Tensor | None]:
    """The gradients of the five factors as expressions of the reference, for who differentiates once more."""
    run, there = _written(tensors, num_steps)
    found = iter(torch.func.vjp(run, *there)[1](grad))
    return [None if tensor is None else next(found) for tensor in tensors[:5]]


def empty_like_heads(query: Tensor, width: int) -> Tensor:
    """An unwritten (..., N, width), heads inside tokens where a query (B, H, N, d) has them so."""
    shape = *query.shape[:-1], width
    if query.dim() == 4 and query.stride(1) < query.stride(2):
        return torch.empty_permuted(shape, (0, 2, 1, 3), dtype=query.dtype, device=query.device)
    return query.new_empty(shape)


def _written(tensors: Sequence[Any], num_steps: int) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """The reference as a function of those of its five factors that are there, and these."""

    def run(*there: Tensor) -> Tensor:
        found = iter(there)
        factors: list[Any] = [next(found) if tensor is not None else None for tensor in tensors[:5]]
        query, key_memory, value_memory, key_bias, value_bias = factors
        return reference(
            query,
            key_memory,
            value_memory,
            key_bias=key_bias,
            value_bias=value_bias,
            mask=tensors[5],
            normalization="double" if num_steps else "softmax",
            num_steps=max(1, num_steps),
        )

    return run, [tensor for tensor in tensors[:5] if tensor is not None]
