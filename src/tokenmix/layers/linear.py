"""A linear layer of the features that takes the faster library on a CPU, and what stands in where there is none."""

from torch import Tensor, nn

from tokenmix.ops.linear import linear

__all__ = ["Fresh", "Linear"]


class Linear(nn.Linear):
    """`torch.nn.Linear` in everything but the kernel that it runs on a CPU, see `tokenmix.ops.linear`.

        y = x W^T + b

    Attributes:
        init_std: standard deviation of W at the start, b = 0, for networks that draw the weights of all linear layers;
            None for the network's own.

    Shape:
        (..., D) to (..., E).
    """

    init_std: float | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Map the features of input (..., D)."""
        return linear(input, self.weight, self.bias)


class Fresh(nn.Identity):
    """The identity at the end of a layer that has no projection there: its output is a tensor of its own, not a view.

    Writing into a view would drop the hook by which FSDP2 fetches the weights for the backward pass; writing into what
    an operator has kept for its own backward pass is an error.
    """

    def forward(self, input: Tensor) -> Tensor:
        """A copy if a gradient comes back through it."""
        return input.clone() if input.requires_grad else input
