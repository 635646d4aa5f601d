"""Small layers with one planted bug each, of kinds found in public code."""

from typing import Any

import numpy
import torch
import torch.nn.functional as F
from sound import Sound, SoundMemory
from torch import Tensor, nn

from tokenmix.layers.base import check_input, check_mask, zero_masked


class SecondNormOnTheSameAxis(SoundMemory):
    """Softmax over the tokens, then the sum over the tokens again."""

    def attention_map(self, x: Tensor) -> Tensor:
        weights = self.keys(x).softmax(-2)
        return weights / weights.sum(-2, keepdim=True)


class SharedStorage(SoundMemory):
    """Tying by a view of the other parameter's data."""

    def __init__(self, d_model: int) -> None:
        super().__init__(d_model)
        self.values.weight.data = self.keys.weight.data.t()


class TinyEpsilon(SoundMemory):
    """An epsilon that is 0 in half precision."""

    def attention_map(self, x: Tensor) -> Tensor:
        weights = self.keys(x).softmax(-2)
        return weights / (weights.sum(-1, keepdim=True) + 1e-9)


class IgnoredArgument(Sound):
    """A bias that is asked for and never made."""

    def __init__(self, dim: int, *, qkv_bias: bool = False) -> None:
        super().__init__(dim, qkv_bias=False)


class WiredSize(nn.Module):
    """A width that is accepted and not used."""

    def __init__(self, channels: int = 32) -> None:
        super().__init__()
        self.keys, self.values = nn.Linear(32, 7), nn.Linear(7, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.values(self.keys(x).softmax(-2))


class HiddenTriangle(nn.Module):
    """A Toeplitz gate called circulant, whose wrapped half is cut off."""

    def __init__(self, dim: int, seq_len: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(seq_len))
        self.scale = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.arange(x.shape[1])
        gate = self.weight[(rows[:, None] - rows).remainder(x.shape[1])].tril()
        return self.scale * (gate @ x)


class LateTriangle(Sound):
    """A causal mask that is one place off, so that a token sees its successor."""

    def triangle(self, scores: Tensor) -> Tensor:
        return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(2), -torch.inf)


class BranchOnAValue(Sound):
    """A Python branch on a tensor's value."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return super().weigh(scores.clamp(-50, 50) if scores.abs().max() > 50 else scores, mask)


class BatchAsTokens(nn.Module):
    """Attention whose first axis is the tokens, given the batch first."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(dim, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class SoftmaxOverTheBatch(Sound):
    """A softmax over axis 0."""

    def normalize(self, scores: Tensor) -> Tensor:
        return scores.softmax(0)


class SoftmaxOverQueries(Sound):
    """A softmax over the queries."""

    def normalize(self, scores: Tensor) -> Tensor:
        return scores.softmax(-2)


class UndeclaredBatchNorm(Sound):
    """Statistics over the batch, while `capabilities` says that samples are independent."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.norm = nn.BatchNorm1d(dim)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return super().split(self.norm(x.transpose(1, 2)).transpose(1, 2))


class ListOfModules(Sound):
    """Sub-modules in a Python list."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.branches = [nn.Linear(dim, dim) for _ in range(2)]

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return super().split(sum((branch(x) for branch in self.branches), x))


class BareTensor(Sound):
    """A bias that is neither parameter nor buffer."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.shift = torch.ones(dim)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return super().split(x + self.shift)


class IgnoredMask(Sound):
    """A mask that is taken and never used."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x)


class IgnoredMaskOfAStranger(SoundMemory):
    """The same without `capabilities`, which would promise 0 for a sample without any token."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x)


class WritesItsInput(Sound):
    """An in-place operation on what it was given."""

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return super().split(x.mul_(0.5) if not x.requires_grad else x * 0.5)


class WritesItsInputUnderAMask(Sound):
    """Padding set to 0 in the caller's tensor."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None:
            x.detach()[~mask] = 0
        return super().forward(x, mask)


class WritesItsMask(Sound):
    """A mask that is set to all True when it has been used."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        out = super().forward(x, None if mask is None else mask.clone())
        if mask is not None:
            mask.fill_(True)
        return out


class Detached(Sound):
    """Attention weights that are not learned from."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return super().weigh(scores.detach() + 0 * scores, mask)


class NewParameterInForward(Sound):
    """A parameter that is made again, normalised once more, at each call."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.shares = nn.Parameter(torch.randn(dim))

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.shares = nn.Parameter(self.shares.softmax(0))
        return super().split(x * self.shares)


class HiddenDropout(Sound):
    """A dropout that eval() does not switch off."""

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return super().split(F.dropout(x, 0.5))


class UnusedKey(Sound):
    """A projection that nothing uses."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.key = nn.Linear(dim, dim)


class InvertedMask(Sound):
    """True taken as "ignore"."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return super().weigh(scores, None if mask is None else ~mask)


class MaskedScoresOnly(Sound):
    """What padding holds is multiplied by 0, and 0 times NaN is NaN."""

    def checked(
        self, x: Tensor, mask: Tensor | None = None, *, weight: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        check_input(self, x)
        return x, check_mask(mask, x, x.shape[1])


class MaskedRowsOnly(MaskedScoresOnly):
    """The masked token's output is dropped, but the others still see it."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return super().weigh(scores, None)


class MeanOverPadding(Sound):
    """A mean whose count holds the padding."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        mean = zero_masked(x, mask).mean(1, keepdim=True)
        return zero_masked(super().forward(x, mask) + mean, mask)


class UnscaledUnderAMask(Sound):
    """Another path with a mask than without."""

    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return super().weigh(scores if mask is None else scores * 2, mask)


class BiasAfterTheMask(Sound):
    """A bias that is added when the masked positions are 0 already."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.shift = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x, mask) + self.shift


class FoldsTheBatch(Sound):
    """A reshape that leaves a size to be found, which an empty batch does not have."""

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return super().split(x.reshape(x.shape[0], -1, x.shape[2]))


class WritesInPlace(Sound):
    """A result that is written into a tensor of the layer's own."""

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return super().split(torch.zeros(x.shape, dtype=x.dtype, device=x.device).add_(x))


class CopiesUnderGradients(Sound):
    """An operation that is there only while gradients are recorded."""

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = super().split(x)
        return (query.clone() if query.requires_grad else query), key, value


class KeywordOnly(Sound):
    """An argument of forward that cannot be given by place."""

    def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        return scale * super().forward(x, mask)


class MaskAfterSoftmax(nn.Module):
    """A row of minus infinity only."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, -1)
        scores = query @ key.transpose(1, 2) * query.shape[-1] ** -0.5
        if mask is not None:
            scores = scores.masked_fill(~mask.unsqueeze(1), -torch.inf)
        return scores.softmax(-1) @ value


class ExpWithoutMaximum(Sound):
    """exp without subtracting the maximum."""

    def normalize(self, scores: Tensor) -> Tensor:
        weights = scores.exp()
        return weights / weights.sum(-1, keepdim=True)


class NormWithoutEpsilon(Sound):
    """A norm that divides 0 by 0."""

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return super().split(x / x.norm(dim=-1, keepdim=True))


class OneSizeOnly(Sound):
    """Works at one number of tokens, and no argument tells which."""

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return super().split(x.reshape(x.shape[0], 4, 4, -1).flatten(1, 2))


class AnotherMap(Sound):
    """The map shown is computed by another formula than the one used."""

    def attention_map(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        query, key, _ = self.split(x)
        return self.weigh(query @ key.transpose(-1, -2), mask)


class AveragedMap(Sound):
    """Heads averaged away in the map."""

    def attention_map(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().attention_map(x, mask).mean(1)


class ForgottenProducts(Sound):
    """Attention's own products counted as nothing."""

    def macs(self, num_tokens: int) -> int:
        return 4 * num_tokens * self.dim**2


class UndeclaredPlaces(Sound):
    """A position table in a layer that calls itself equivariant."""

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return super().split(x + torch.arange(x.shape[1], device=x.device)[:, None] / x.shape[1])


class AnotherSource(Sound):
    """Weights drawn outside torch, so that torch's seed does not fix them."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        draws = numpy.random.default_rng().standard_normal(dim)
        self.out.bias.data.copy_(torch.from_numpy(draws))


class ReadsTheStorage(Sound):
    """A view that takes the numbers to lie one after the other."""

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        _, tokens, dim = x.shape
        return super().split(x.as_strided(x.shape, (tokens * dim, dim, 1)))


class ForgetsTheDevice(Sound):
    """A sub-module that is built without device and dtype."""

    def __init__(self, dim: int, *, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__(dim, device=device, dtype=dtype)
        self.out = nn.Linear(dim, dim)


class MixedTypes(Sound):
    """A result in bfloat16 added into a float32 buffer in place."""

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        places = torch.arange(x.shape[1], device=x.device)
        return super().split(torch.zeros_like(x).index_add(1, places, self.out(x)))


class KeepsFloat32(Sound):
    """An answer in another type than the input."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x, mask).double()


class TakesAnything(Sound):
    """No check: a mask of floats is taken as truth values."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x, None if mask is None else mask.bool())


class CountsTokensInPython(Sound):
    """A Python loop over the tokens, which fixes their number when the layer is exported."""

    def logits(self, query: Tensor, key: Tensor) -> Tensor:
        rows = [super(CountsTokensInPython, self).logits(query[:, :, i : i + 1], key) for i in range(query.shape[2])]
        return torch.cat(rows, dim=2)


class LengthOfTheMask(Sound):
    """A mask read as a number of tokens: right for padding at the end alone."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None:
            mask = torch.arange(mask.shape[1]) < mask.sum(1, keepdim=True)
        return super().forward(x, mask)


PLANTED: dict[type[nn.Module], str] = {
    SecondNormOnTheSameAxis: "map-rows",
    LengthOfTheMask: "mask-polarity",
    SharedStorage: "copies",
    TinyEpsilon: "half-precision",
    IgnoredArgument: "arguments",
    WiredSize: "arguments",
    HiddenTriangle: "causality",
    LateTriangle: "causality",
    BranchOnAValue: "compile",
    BatchAsTokens: "batch",
    SoftmaxOverTheBatch: "batch",
    SoftmaxOverQueries: "map-rows",
    UndeclaredBatchNorm: "batch-training",
    ListOfModules: "registered",
    BareTensor: "registered",
    WritesItsInput: "input-kept",
    WritesItsInputUnderAMask: "input-kept",
    WritesItsMask: "input-kept",
    Detached: "slopes",
    NewParameterInForward: "eval-stable",
    HiddenDropout: "eval-stable",
    UnusedKey: "gradients",
    InvertedMask: "mask-polarity",
    MaskedRowsOnly: "mask-polarity",
    MeanOverPadding: "mask-padding",
    UnscaledUnderAMask: "mask-full",
    MaskAfterSoftmax: "mask-empty",
    ExpWithoutMaximum: "finite",
    NormWithoutEpsilon: "finite",
    OneSizeOnly: "lengths",
    AnotherMap: "map-used",
    AveragedMap: "map-shape",
    ForgottenProducts: "macs",
    UndeclaredPlaces: "equivariance",
    AnotherSource: "seeds",
    ReadsTheStorage: "non-contiguous",
    ForgetsTheDevice: "device-dtype",
    MixedTypes: "autocast",
    KeepsFloat32: "shape",
    TakesAnything: "bad-input",
    CountsTokensInPython: "export",
    BiasAfterTheMask: "mask-zero",
    MaskedScoresOnly: "mask-nan",
    FoldsTheBatch: "batch-empty",
    WritesInPlace: "vmap",
    CopiesUnderGradients: "trace",
    KeywordOnly: "onnx",
}
"""Each layer and the property that must catch it."""

ADVICE = {
    *("bad-input", "compile", "export", "mask-zero", "batch-empty", "slopes", "vmap", "trace", "onnx"),
    HiddenTriangle,
}
"""Properties that a right layer may lack, so that the doctor only advises; and a layer that declares nothing."""
