"""The rows of an image that one process holds, and what it exchanges with those that hold the others."""

from collections.abc import Sequence
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from tokenmix.errors import UserError


class TokenShard:
    """One process's part of an image whose rows, and so its tokens, are split over the processes of a group in order.

    All processes of the group must call `sum`, `gather` and `with_edges` together. Gradients are those of the sum of
    the processes' losses: the mean of the parameters' gradients over all processes, which DistributedDataParallel and
    FSDP2 take, is the gradient of the mean of the losses.

    Args:
        group: the processes that share an image.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Itself: the copy of a module exchanges with the same processes."""
        return self

    def rows(self, total: int, unit: int = 1) -> slice:
        """This process's of `total` rows, see `rows_of`."""
        return rows_of(self.rank, self.size, unit, total)

    def sum(self, x: Tensor) -> Tensor:
        """The sum over the processes."""
        return cast(Tensor, _Sum.apply(x, self.group))

    def gather(self, x: Tensor, dim: int) -> tuple[Tensor, slice]:
        """The parts of all processes joined along `dim`, of any lengths, and where this process's own is."""
        lengths = [torch.zeros(1, dtype=torch.long, device=x.device) for _ in range(self.size)]
        dist.all_gather(lengths, torch.full_like(lengths[0], x.shape[dim]), group=self.group)
        counts = [int(length) for length in lengths]
        first = x.movedim(dim, 0)
        sent = first.expand(self.size, *first.shape).flatten(0, 1)
        whole = _exchange(sent, [len(first)] * self.size, counts, self.group).movedim(0, dim)
        start = sum(counts[: self.rank])
        return whole, slice(start, start + counts[self.rank])

    def edges(self, x: Tensor, above: int, below: int) -> tuple[Tensor, Tensor]:
        """The `above` rows before those of a map x (B, C, H_r, W) and the `below` rows after them; none at a border.

        Both results must be used, empty ones too, or processes would wait for each other in the backward pass.

        Raises:
            UserError: this process has fewer rows than its neighbours need.
        """
        height, here, last = x.shape[2], self.rank, self.size - 1
        if height < max(above, below):
            raise UserError(
                f"a process has {height} rows of a map of which its neighbours need {max(above, below)}; "
                "give larger images, or a smaller token_parallel"
            )
        sent, received = [0] * self.size, [0] * self.size
        if here > 0:
            sent[here - 1], received[here - 1] = below, above
        if here < last:
            sent[here + 1], received[here + 1] = above, below
        first = x.movedim(2, 0)
        parts = torch.cat([first[: below if here > 0 else 0], first[height - (above if here < last else 0) :]])
        found = _exchange(parts, sent, received, self.group).movedim(0, 2)
        upper, lower = found.tensor_split((above if here > 0 else 0,), dim=2)
        return upper, lower

    def with_edges(self, x: Tensor, above: int, below: int, fill: float = 0.0) -> Tensor:
        """A map (B, C, above + H_r + below, W) with its neighbours' rows, or rows of `fill` at the image's borders."""
        upper, lower = self.edges(x, above, below)
        upper = F.pad(upper, (0, 0, above - upper.shape[2], 0), value=fill)
        lower = F.pad(lower, (0, 0, 0, below - lower.shape[2]), value=fill)
        return torch.cat([upper, x, lower], 2)


def rows_of(rank: int, size: int, unit: int, total: int) -> slice:
    """Which of `total` rows process `rank` of `size` has, cut at multiples of `unit`; parts differ by one unit at most.

    Raises:
        UserError: see `check_rows`.
    """
    check_rows(total, unit, size)
    units = total // unit
    return slice(unit * (units * rank // size), unit * (units * (rank + 1) // size))


def check_rows(total: int, unit: int, size: int) -> None:
    """Raise `UserError` unless each of `size` processes can have a multiple of `unit` of `total` rows."""
    if total % unit or total < unit * size:
        raise UserError(
            f"images of {total} rows cannot be split over {size} processes by multiples of {unit} rows; "
            f"give images of a multiple of {unit} rows and at least {unit * size}, or a smaller token_parallel"
        )


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyrefly: ignore[bad-override]
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Exchange(torch.autograd.Function):
    """all_to_all_single; torch.distributed.nn.functional, which has its gradient, is deprecated in torch 2.14."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _all_to_all(x, sent, received, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # pyrefly: ignore[bad-override]
        return _all_to_all(grad, ctx.received, ctx.sent, ctx.group), None, None, None


def _exchange(x: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Rows of x, `sent[r]` to process r in order, to the `received[r]` rows of process r in order."""
    return cast(Tensor, _Exchange.apply(x, sent, received, group))


def _all_to_all(x: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), list(received), list(sent), group=group)
    return out
