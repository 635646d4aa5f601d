"""The T2T stem of EAMLP, whose unfolded patches are never written."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tokenmix.inference.external import fold_keys, fold_values, linear_map, make_external
from tokenmix.inference.linear import (
    FusedLinear,
    Int8Linear,
    Range,
    check_unfollowed,
    make_linear,
    outside_graphs,
    samples_at_a_time,
)
from tokenmix.inference.operators import Dtype, convolve
from tokenmix.models.eamlp import Split, StemAttention, T2TStem
from tokenmix.models.stems import Stem


class FoldedStemAttention(nn.Module):
    """An unfolding and the external attention after it, of patches x_p with K numbers.

        h_p = (C x_p) / sqrt(var x_p + eps) + c,    C = W diag(g) (I - 1/K),    c = W b_n + b

    This is W norm(x_p) + b, with g and b_n the norm's: centring the rows of W takes the mean of the patch away. So C x
    is a convolution in float32, var x comes from pooled moments, and no patch is written. Then as `StemAttention`, with
    the products of the attention and the MLP in `dtype`.

    Shape:
        a map (B, C, H, W) to tokens (B, N, dim).
    """

    weight: Tensor
    bias: Tensor

    def __init__(self, source: StemAttention, split: Split, dtype: Dtype) -> None:
        super().__init__()
        kernel, _, _ = split
        self.split, self.in_dim, self.dim, self.eps = split, source.in_dim, source.dim, source.norm1.eps
        shape = (source.dim, source.in_dim // kernel**2, kernel, kernel)
        self.register_buffer("weight", torch.zeros(shape))
        self.register_buffer("bias", torch.zeros(source.dim))
        self.attention = make_external(dtype, source.dim, heads=1, num_slots=source.num_slots)
        self.norm2 = source.norm2
        linear = make_linear(dtype)
        self.mlp = nn.Sequential(linear(source.dim, source.dim, act="gelu"), linear(source.dim, source.dim))

    @torch.no_grad()
    def fill(self, source: StemAttention, ranges: Mapping[str, Range]) -> None:
        """Take over a block that met these ranges, as `planning.observe` names them."""
        projection = linear_map(source.query, source.in_dim)
        scaled = projection.weight * source.norm1.weight
        self.weight.copy_((scaled - scaled.mean(1, keepdim=True)).view_as(self.weight))
        self.bias.copy_(projection.bias + projection.weight @ source.norm1.bias.double())
        keys = fold_keys(linear_map(nn.Identity(), source.dim), source.key_memory, None, heads=1)
        values = fold_values(linear_map(source.proj, source.dim), source.value_memory, source.value_bias, heads=1)
        self.attention.fill(keys, values, inputs=ranges["h"], shares=ranges["map"])
        for name, place in (("mlp.0", self.mlp[0]), ("mlp.2", self.mlp[1])):
            linear = linear_map(source.get_submodule(name), source.dim)
            assert isinstance(place, FusedLinear | Int8Linear)
            place.fill(*linear, ranges[f"{name}.x"])

    def forward(self, x: Tensor) -> Tensor:
        """A map (B, C, H, W) to tokens (B, N, dim)."""
        h = self.features(x)
        y = self.attention(h).add_(h)
        return y.add_(self.mlp(self.norm2(y)))

    def features(self, x: Tensor) -> Tensor:
        """h (B, N, dim)."""
        _, stride, padding = self.split
        # With the channels last, a pixel's features are a token without a copy.
        found = convolve(x, self.weight, None, stride, padding)
        return found.permute(0, 2, 3, 1).flatten(1, 2).mul_(_inverse_deviation(x, self.split, self.eps)).add_(self.bias)

    def macs(self, num_tokens: int) -> int:
        """Multiply-adds on one sample."""
        return num_tokens * (self.in_dim * self.dim + 2 * self.dim**2) + self.attention.macs(num_tokens)


class FoldedT2TStem(T2TStem):
    """The T2T stem with products of its tokens in `dtype`, its unfoldings and the last projection as convolutions.

    Shape:
        images (B, C, H, W) to tokens (B, N, D), as `T2TStem`.
    """

    def __init__(self, source: T2TStem, dtype: Dtype) -> None:
        Stem.__init__(self)
        self.dtype: Dtype = dtype
        self.dim, self.in_chans, self.reduction, self.splits = (
            source.dim,
            source.in_chans,
            source.reduction,
            source.splits,
        )
        self.attentions = nn.ModuleList(
            FoldedStemAttention(attention, split, dtype)  # type: ignore[arg-type]
            for attention, split in zip(source.attentions, source.splits, strict=False)
        )
        self.num_slots = max((attention.num_slots for attention in source.attentions), default=0)  # type: ignore[type-var]
        self.project = source.project
        self.set_input_size(source.img_size)

    def fill(self, source: T2TStem, ranges: Mapping[str, Range]) -> None:
        """Take over a stem that met these ranges, named as its parts."""
        for i, (place, attention) in enumerate(zip(self.attentions, source.attentions, strict=True)):
            own = f"attentions.{i}."
            found = {name.removeprefix(own): value for name, value in ranges.items() if name.startswith(own)}
            place.fill(attention, found)  # type: ignore[operator]

    @outside_graphs
    def forward(self, images: Tensor) -> Tensor:
        """Images (B, C, H, W) of the stem's size to tokens (B, N, D)."""
        self.check(images)
        check_unfollowed(self, images)
        height, width = self.grids[0]
        together = samples_at_a_time(height * width * self.num_slots)
        return torch.cat([self._tokens(some) for some in images.split(together)])

    def _tokens(self, x: Tensor) -> Tensor:
        for attention, grid in zip(self.attentions, self.grids, strict=False):
            x = attention(x).transpose(1, 2).unflatten(2, grid)
        kernel, stride, padding = self.splits[-1]
        weight = self.project.weight.unflatten(1, (-1, kernel, kernel))
        return convolve(x, weight, self.project.bias, stride, padding).flatten(2).transpose(1, 2)


def _inverse_deviation(x: Tensor, split: Split, eps: float) -> Tensor:
    """1 / sqrt(var + eps) of the patches of a map (B, C, H, W), with the zeros beyond its border, (B, N, 1)."""
    # In float32 the difference of two squares would drown what a flat patch has left.
    wide = x.double()
    moments = torch.stack([wide.mean(1), wide.square().mean(1)], 1)
    mean, square = F.avg_pool2d(moments, *split).flatten(2).unsqueeze(-1).unbind(1)
    return square.addcmul_(mean, mean, value=-1.0).clamp_min_(0.0).add_(eps).rsqrt_().float()
