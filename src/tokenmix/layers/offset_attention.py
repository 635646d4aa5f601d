"""Offset attention of the point cloud transformer; `Offset` works with any mixer."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenmix.errors import UserError
from tokenmix.layers.base import Capabilities, Device, Mixer, zero_masked
from tokenmix.ops.attention import attention, attention_probabilities, double_attention
from tokenmix.ops.checks import check_chunk_size, check_whole
from tokenmix.ops.normalize import widen


class MaskedBatchNorm(nn.BatchNorm1d):
    """`torch.nn.BatchNorm1d` for tokens (B, N, C) with statistics over unmasked positions.

        y = (x - mean) / sqrt(var + eps) * weight + bias,   mean and var over the unmasked tokens

    `eval()` uses the running statistics, so a padded sample gives the output of the unpadded sample. In training, the
    samples of a batch affect each other, but padding has no effect.

    Shape: x (B, N, C), mask (B, N) bool, to (B, N, C); masked positions may hold any finite values.
    """

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None or not self.training:
            return super().forward(input.flatten(0, -2)).view_as(input)
        left_out = ~mask.unsqueeze(-1)
        wide = widen(input).masked_fill(left_out, 0.0)
        count = mask.sum().clamp(min=1)
        mean = wide.sum((0, 1)) / count
        centred = (wide - mean).masked_fill(left_out, 0.0)
        variance = centred.square().sum((0, 1)) / count
        with torch.no_grad():  # Update the running statistics, unless all tokens are masked.
            some = mask.any()
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(some.to(self.num_batches_tracked.dtype))
            # Without a momentum the running statistics are the mean of all batches.
            share = 1 / self.num_batches_tracked.clamp(min=1) if self.momentum is None else self.momentum
            unbiased = variance * count / (count - 1).clamp(min=1)
            for running, now in ((self.running_mean, mean), (self.running_var, unbiased)):
                assert running is not None
                running.add_((now.to(running) - running) * (share * some))
        out = torch.addcmul(self.bias.to(wide), centred * torch.rsqrt(variance + self.eps), self.weight.to(wide))
        return out.to(input.dtype)


def batch_norm(norm: nn.Module, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """A `MaskedBatchNorm`, or the `nn.SyncBatchNorm` that PyTorch's conversion puts in its place."""
    if isinstance(norm, MaskedBatchNorm):
        return norm(x, mask)
    if mask is None:
        return norm(x.flatten(0, -2)).view_as(x)
    return torch.zeros_like(x).masked_scatter(mask.unsqueeze(-1), norm(x[mask]))


class Offset(nn.Module):
    """Residual branch on the difference between the tokens and a mixer's output.

        out = X + relu(BN((X - Y) W + b))

    Shape: x and mixed (B, N, D), mask (B, N) bool, to (B, N, D); masked tokens are 0 in the output.

    Reference: Guo et al., PCT: Point Cloud Transformer, arXiv 2012.09688, equation 11.
    """

    def __init__(self, dim: int, *, device: Device = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim, device=device, dtype=dtype)
        self.norm = MaskedBatchNorm(dim, device=device, dtype=dtype)

    def forward(self, x: Tensor, mixed: Tensor, mask: Tensor | None = None) -> Tensor:
        x = zero_masked(x, mask)
        return zero_masked(x + F.relu(batch_norm(self.norm, self.linear(x - mixed), mask)), mask)


class OffsetAttention(Mixer):
    """Offset attention of point clouds; residual and ReLU are inside the layer.

        A   = Norm(Q Q^T),   Q = X W_q,   V = X W_v + b_v
        out = X + relu(BN((X - A V) W + b))

    Norm is double normalisation: softmax over the tokens, then L1 over the keys. Queries and keys share their weights
    and have a quarter of the tokens' width.

    As in the released code, there is no factor 1/sqrt(d). The released code divides by the sum + 1e-9; here the two
    divisions are one softmax without an epsilon.

    In training, BatchNorm sees all unmasked tokens of the batch, so samples affect each other
    (`capabilities.independent` is False).

    Args:
        dim: width D.
        reduction: D over the width of q and k.
        chunk_size: keys per chunk. With chunks, the N x N map is never materialized and the logits are computed twice.
            None materializes the map.

    Shape: x (B, N, D) to (B, N, D), any N; `attention_map` (B, 1, N, N).

    Reference: Guo et al., PCT: Point Cloud Transformer, arXiv 2012.09688, section 3.3, and the released code.
    """

    capabilities = Capabilities(map="tokens", independent=False)

    def __init__(
        self,
        dim: int,
        *,
        reduction: int = 4,
        chunk_size: int | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_whole(dim=dim, reduction=reduction)
        if dim % reduction:
            raise UserError(f"reduction must divide dim {dim}, got {reduction}; the paper has 4, and 1 always does")
        check_chunk_size(chunk_size)
        self.dim, self.chunk_size = dim, chunk_size
        self.query = nn.Linear(dim, dim // reduction, bias=False, device=device, dtype=dtype)
        self.value = nn.Linear(dim, dim, device=device, dtype=dtype)
        self.offset = Offset(dim, device=device, dtype=dtype)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x, mask = self.checked(x, mask)
        query, value = self.query(x).unsqueeze(1), self.value(x).unsqueeze(1)
        if self.chunk_size is None:
            mixed = attention(query, query, value, mask=mask, normalization="double", scale=1.0)
        else:
            mixed = double_attention(query, query, value, mask=mask, chunk_size=self.chunk_size)
        return self.offset(x, mixed.squeeze(1), mask)

    def attention_map(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x, mask = self.checked(x, mask)
        query = self.query(x).unsqueeze(1)
        return attention_probabilities(query, query, mask=mask, normalization="double", scale=1.0)

    def macs(self, num_tokens: int) -> int:
        """N (2 D^2 + D d) + N^2 (D + d) with d = D / reduction; logits that chunks compute again are not counted."""
        check_whole(num_tokens=num_tokens)
        width = self.query.out_features
        return num_tokens * self.dim * (2 * self.dim + width) + num_tokens**2 * (self.dim + width)
