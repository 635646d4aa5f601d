"""BatchNorm over the tokens that take part."""

import torch
from torch import Tensor, nn


class MaskedBatchNorm(nn.BatchNorm1d):
    """`torch.nn.BatchNorm1d` for tokens (B, N, C) whose statistics leave out masked positions.

        y = (x - mean) / sqrt(var + eps) * weight + bias,   mean and var over the tokens that take part

    In `eval()` it uses the running statistics, so a padded sample has the output of the unpadded sample. In training
    the samples of a batch depend on each other, padding changes nothing.

    Shape:
        x (B, N, C), mask (B, N) bool, to (B, N, C); masked positions may hold arbitrary finite values.
    """

    def __init__(self, dim: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__(dim, device=device, dtype=dtype)

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:
        """Normalise the features of input (B, N, C)."""
        if mask is None or not self.training:
            return super().forward(input.flatten(0, -2)).view_as(input)
        return self._masked(input, mask.unsqueeze(-1)).to(input.dtype)

    def _masked(self, input: Tensor, mask: Tensor) -> Tensor:
        wide = input if input.dtype == torch.float64 else input.float()
        wide = wide.masked_fill(~mask, 0.0)
        count = mask.sum().clamp(min=1)
        mean = wide.sum((0, 1)) / count
        centred = (wide - mean).masked_fill(~mask, 0.0)
        variance = centred.square().sum((0, 1)) / count
        self._follow(mean.detach(), variance.detach() * count / (count - 1).clamp(min=1), mask.any())
        return torch.addcmul(self.bias.to(wide), centred * torch.rsqrt(variance + self.eps), self.weight.to(wide))

    @torch.no_grad()
    def _follow(self, mean: Tensor, variance: Tensor, some: Tensor) -> None:
        """Move the running statistics, unless no token took part."""
        assert self.momentum is not None
        assert self.num_batches_tracked is not None
        weight = self.momentum * some
        self.num_batches_tracked.add_(some.to(self.num_batches_tracked.dtype))
        for running, now in ((self.running_mean, mean), (self.running_var, variance)):
            assert running is not None
            running.add_((now.to(running) - running) * weight)
