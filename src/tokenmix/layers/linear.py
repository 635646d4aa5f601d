"""A linear layer of the features that takes the faster library on a CPU."""

from torch import Tensor, nn

from tokenmix.ops.linear import linear

__all__ = ["Linear"]


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
