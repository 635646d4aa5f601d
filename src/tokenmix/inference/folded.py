"""Faster layers for inference: external attention folded into its projections, and EAMLP's T2T stem."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenmix.inference.linear import (
    AnyLinear,
    FusedLinear,
    Int8Linear,
    Range,
    check_unfollowed,
    make_linear,
    outside_graphs,
    samples_at_a_time,
)
from tokenmix.inference.operators import Dtype, convolve
from tokenmix.layers.base import Capabilities, Mixer, check_input, check_mask, zero_masked
from tokenmix.layers.external import ExternalAttention, MultiHeadExternalAttention
from tokenmix.models.eamlp import Split, StemAttention, T2TStem
from tokenmix.models.stems import Stem
from tokenmix.ops.normalize import double_normalize

Folding = ExternalAttention | MultiHeadExternalAttention


GROUP = 2**20
"""Entries processed together, 4 MiB: fewer give small products, more need fresh pages (dev/LOG.md, 2026-11-22)."""


class Map(NamedTuple):
    """A linear map, x W^T + b, in float64."""

    weight: Tensor
    bias: Tensor


class FoldedExternalAttention(Mixer):
    """External attention as two products in float32 or bfloat16, with double normalisation in float32 between them.

        A_h = Norm(x K_h^T + k_h),    K_h = M_k W_q,h     (S, D),    k_h = M_k b_q,h + b_k
        out = sum_h A_h V_h^T + v,    V_h = W_o,h M_v^T   (D, S),    v   = W_o (b_v .. b_v) + b_o

    After training, the constant memories are multiplied into the adjacent projections. The features of the heads, (N, e
    D) numbers, are never computed.

    Shape: x (B, N, dim), mask (B, N) bool to (B, N, dim); map (B, heads, N, num_slots).
    """

    capabilities = Capabilities(linear=True, map="slots")

    def __init__(self, dim: int, *, heads: int, num_slots: int, dtype: Dtype = "float32") -> None:
        super().__init__()
        self.dim, self.heads, self.num_slots = dim, heads, num_slots
        linear = make_linear(dtype)
        self.scores: AnyLinear = linear(dim, heads * num_slots)
        self.values: AnyLinear = linear(heads * num_slots, dim)

    @torch.no_grad()
    def fill(self, keys: Map, values: Map, *, inputs: Range, weights: Range) -> None:
        """Set K, k and V, v; `inputs` and `weights` are the ranges of the layer's inputs and of its map."""
        # PyTorch passes float32 exp to MKL, which takes four times as long as PyTorch's own exp2 on AMD's CPUs.
        power = math.log2(math.e)
        self.scores.fill(keys.weight * power, keys.bias * power, inputs)
        self.values.fill(*values, weights)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        check_input(self, x)
        mask = check_mask(mask, x, x.shape[1])
        if mask is None and x.numel() and not torch.compiler.is_compiling() and not torch.jit.is_tracing():
            out = self._by_sums(x)
            if out is not None:
                return out
        kept = zero_masked(x, mask)
        return zero_masked(self.values(self._map(kept, mask).transpose(1, 2).flatten(2)), mask)

    def attention_map(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        check_input(self, x)
        mask = check_mask(mask, x, x.shape[1])
        return self._map(zero_masked(x, mask), mask)

    def macs(self, num_tokens: int) -> int:
        return 2 * num_tokens * self.dim * self.heads * self.num_slots

    def _map(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return self._normalize(self.scores(x), mask)

    def _normalize(self, powers: Tensor, mask: Tensor | None) -> Tensor:
        """A from logits that are powers of 2, (B, N, H S)."""
        logits = powers.mul_(math.log(2.0))
        return double_normalize(logits.unflatten(-1, (self.heads, -1)).transpose(1, 2), mask=mask)

    def _by_sums(self, x: Tensor) -> Tensor | None:
        """The output without shifted logits; None if a sum is near the limits of the number range."""
        out = torch.empty_like(x)
        together = samples_at_a_time(x.shape[1] * self.heads * self.num_slots, GROUP)
        for some, made in zip(x.split(together), out.split(together)):
            weights = self.scores(some).exp2_()
            columns = weights.sum(1, keepdim=True)
            weights /= columns
            heads = weights.unflatten(-1, (self.heads, -1))
            rows = heads.sum(-1, keepdim=True)
            heads /= rows
            if not (_in_range(columns, 0.5) & _in_range(rows, 0.25)).all():
                return None
            made.copy_(self.values(weights))
        return out


class Int8ExternalAttention(FoldedExternalAttention):
    """`FoldedExternalAttention` with both products in int8; the map is rounded to 8 bits of its calibration range.

    Shape: x (B, N, dim), mask (B, N) bool to (B, N, dim); map (B, heads, N, num_slots).
    """

    scores: Int8Linear  # pyrefly: ignore[bad-override-mutable-attribute]
    values: Int8Linear  # pyrefly: ignore[bad-override-mutable-attribute]

    def __init__(self, dim: int, *, heads: int, num_slots: int) -> None:
        super().__init__(dim, heads=heads, num_slots=num_slots, dtype="int8")

    @outside_graphs
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        check_input(self, x)
        mask = check_mask(mask, x, x.shape[1])
        if x.numel() == 0:
            return torch.zeros_like(x)
        kept = zero_masked(x, mask)
        inputs = self.scores.quantize(kept)
        if mask is None and not torch.compiler.is_compiling():
            weights, fits = self._weights(inputs)
            # Per sample, because the two methods round differently and samples must not affect each other.
            if not fits.all():
                weights[~fits] = self._shifted_weights(inputs[~fits], None)
        else:
            weights = self._shifted_weights(inputs, mask)
        return zero_masked(_not_a_number_where(kept, self.values.multiply(weights)), mask)

    def _shifted_weights(self, inputs: Tensor, mask: Tensor | None) -> Tensor:
        """The map in 8 bits, (B, N, heads S), for logits of any size."""
        found = self._normalize(self.scores.multiply(inputs), mask)
        return self.values.quantize(found.transpose(1, 2).flatten(2))

    def _weights(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """The map in 8 bits, (B, N, heads S), without shifts, and the samples (B) with sums in float32's range."""
        wide = self.heads * self.num_slots
        made = torch.empty(*inputs.shape[:-1], wide, dtype=torch.uint8)
        columns, rows = torch.empty(inputs.shape[0], 1, wide), torch.empty(*inputs.shape[:-1], self.heads)
        together = samples_at_a_time(inputs.shape[1] * wide)
        for some, column, row, into in zip(*(each.split(together) for each in (inputs, columns, rows, made))):
            weights = self.scores.multiply(some).exp2_()
            torch.sum(weights, 1, keepdim=True, out=column)
            weights /= column
            heads = weights.unflatten(-1, (self.heads, -1))
            torch.sum(heads, -1, out=row)
            heads *= (1.0 / self.values.step / row).unsqueeze(-1)
            into.copy_(weights.add_(0.5).clamp_max_(255.0).to(torch.int16))
        return made, _in_range(columns, 0.5) & _in_range(rows, 0.25)


def make_external(dtype: Dtype, dim: int, *, heads: int, num_slots: int) -> FoldedExternalAttention:
    """An empty layer; `fill` copies a layer into it."""
    if dtype == "int8":
        return Int8ExternalAttention(dim, heads=heads, num_slots=num_slots)
    return FoldedExternalAttention(dim, heads=heads, num_slots=num_slots, dtype=dtype)


def folds(layer: nn.Module) -> bool:
    """Whether a layer has the published normalisation, no explicit backend or chunks, and few slots for its width."""
    if type(layer) not in (ExternalAttention, MultiHeadExternalAttention):
        return False
    assert isinstance(layer, Folding)
    memory = layer.memory
    slots, width = memory.key_memory.shape
    usual = {"normalization": "double", "num_steps": 1, "chunk_size": None, "backend": None}
    return memory.options == usual and slots <= 2 * width


def folded(layer: Folding) -> tuple[Map, Map]:
    heads, memory = num_heads(layer), layer.memory
    values = memory.key_memory if memory.value_memory is None else memory.value_memory
    keys = fold_keys(linear_map(layer.query, layer.dim), memory.key_memory, memory.key_bias, heads)
    return keys, fold_values(linear_map(layer.proj, layer.dim), values, memory.value_bias, heads)


def num_heads(layer: Folding) -> int:
    return layer.num_heads * layer.expansion if isinstance(layer, MultiHeadExternalAttention) else 1


def linear_map(layer: nn.Module, dim: int) -> Map:
    """The map of a linear layer, or of an identity with `dim` features."""
    if isinstance(layer, nn.Identity):
        return Map(torch.eye(dim, dtype=torch.float64), torch.zeros(dim, dtype=torch.float64))
    assert isinstance(layer, nn.Linear)
    weight = layer.weight.detach().double()
    return Map(weight, weight.new_zeros(weight.shape[0]) if layer.bias is None else layer.bias.detach().double())


def fold_keys(query: Map, memory: Tensor, bias: Tensor | None, heads: int) -> Map:
    """K (H S, D) and k (H S) from a projection, M_k (S, d) and b_k (S)."""
    memory = memory.detach().double()
    weight = memory @ query.weight.unflatten(0, (heads, -1))
    offset = query.bias.unflatten(0, (heads, -1)) @ memory.mT
    return Map(weight.flatten(0, 1), (offset if bias is None else offset + bias.detach()).flatten())


def fold_values(out: Map, memory: Tensor, bias: Tensor | None, heads: int) -> Map:
    """V (D, H S) and v (D) from M_v (S, d), b_v (d) and a projection."""
    weight = out.weight.unflatten(1, (heads, -1)) @ memory.detach().double().mT
    offset = out.bias if bias is None else out.bias + out.weight @ bias.detach().double().repeat(heads)
    return Map(weight.flatten(1), offset)


def _not_a_number_where(x: Tensor, out: Tensor) -> Tensor:
    """Set samples of out to NaN where x has non-finite values; sums over tokens spread them, and 8 bits hide them."""
    # A finite sum proves that all values are finite. A non-finite sum may also come from large values.
    if torch.compiler.is_compiling() or not x.flatten(1).sum(1).isfinite().all():
        out.masked_fill_(~x.flatten(1).isfinite().all(1)[:, None, None], torch.nan)
    return out


def _in_range(sums: Tensor, power: float) -> Tensor:
    """Whether all sums of exponentials of a sample are far from the limits of the number range, (B)."""
    low, high = torch.aminmax(sums.flatten(1), dim=1)
    return (low > torch.finfo(sums.dtype).tiny ** power) & high.isfinite()


class FoldedStemAttention(nn.Module):
    """An unfold operation and the external attention after it, for patches x_p with K numbers.

        h_p = (C x_p) / sqrt(var x_p + eps) + c,    C = W diag(g) (I - 1/K),    c = W b_n + b

    This equals W norm(x_p) + b, with the norm's g and b_n, because centring the rows of W removes the mean of the
    patch. C x is a convolution in float32, and var x comes from pooled moments, so no patch is stored. The rest is
    `StemAttention`, with the products of attention and MLP in `dtype`.

    Shape: a map (B, C, H, W) to tokens (B, N, dim).
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
        """Copy a block with these input ranges, named as in `optimizing.observe`."""
        projection = linear_map(source.query, source.in_dim)
        scaled = projection.weight * source.norm1.weight
        self.weight.copy_((scaled - scaled.mean(1, keepdim=True)).view_as(self.weight))
        self.bias.copy_(projection.bias + projection.weight @ source.norm1.bias.double())
        keys = fold_keys(linear_map(nn.Identity(), source.dim), source.key_memory, None, heads=1)
        values = fold_values(linear_map(source.proj, source.dim), source.value_memory, source.value_bias, heads=1)
        self.attention.fill(keys, values, inputs=ranges["h"], weights=ranges["map"])
        for name, place in (("mlp.0", self.mlp[0]), ("mlp.2", self.mlp[1])):
            linear = linear_map(source.get_submodule(name), source.dim)
            assert isinstance(place, FusedLinear | Int8Linear)
            place.fill(*linear, ranges[f"{name}.x"])

    def forward(self, x: Tensor) -> Tensor:
        h = self.features(x)
        y = self.attention(h).add_(h)
        return y.add_(self.mlp(self.norm2(y)))

    def features(self, x: Tensor) -> Tensor:
        _, stride, padding = self.split
        # In channels-last layout, a pixel's features are a token without a copy.
        found = convolve(x, self.weight, None, stride, padding)
        return found.permute(0, 2, 3, 1).flatten(1, 2).mul_(_inverse_deviation(x, self.split, self.eps)).add_(self.bias)

    def macs(self, num_tokens: int) -> int:
        return num_tokens * (self.in_dim * self.dim + 2 * self.dim**2) + self.attention.macs(num_tokens)


class FoldedT2TStem(T2TStem):
    """The T2T stem with token products in `dtype`; unfold operations and the last projection are convolutions.

    Shape: images (B, C, H, W) to tokens (B, N, D), as `T2TStem`.
    """

    def __init__(self, source: T2TStem, dtype: Dtype) -> None:
        Stem.__init__(self)
        self.dtype: Dtype = dtype
        self.dim, self.in_chans = source.dim, source.in_chans
        self.reduction, self.splits = source.reduction, source.splits
        self.attentions = nn.ModuleList(
            FoldedStemAttention(attention, split, dtype)  # type: ignore[arg-type]
            for attention, split in zip(source.attentions, source.splits, strict=False)
        )
        self.num_slots = max((attention.num_slots for attention in source.attentions), default=0)  # type: ignore[type-var]
        self.project = source.project
        self.set_input_size(source.img_size)

    def fill(self, source: T2TStem, ranges: Mapping[str, Range]) -> None:
        """Copy a stem with these input ranges, named by its parts."""
        for i, (place, attention) in enumerate(zip(self.attentions, source.attentions, strict=True)):
            own = f"attentions.{i}."
            found = {name.removeprefix(own): value for name, value in ranges.items() if name.startswith(own)}
            place.fill(attention, found)  # type: ignore[operator]

    @outside_graphs
    def forward(self, images: Tensor) -> Tensor:
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
    """1 / sqrt(var + eps) of the patches of a zero-padded map (B, C, H, W), as (B, N, 1)."""
    # In float32, cancellation would destroy the variance of a flat patch.
    wide = x.double()
    moments = torch.stack([wide.mean(1), wide.square().mean(1)], 1)
    mean, square = F.avg_pool2d(moments, *split).flatten(2).unsqueeze(-1).unbind(1)
    return square.addcmul_(mean, mean, value=-1.0).clamp_min_(0.0).add_(eps).rsqrt_().float()
