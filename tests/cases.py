"""One row for each mixer of the table: how it is built at a tiny size. What it can do it says itself."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from tokenmix.layers import LessAttention, Mixer, SelfAttention, SpatialGatingUnit, TinyAttention, create_mixer
from tokenmix.layers.base import Capabilities
from tokenmix.layers.table import MIXERS
from tokenmix.testing.harness import Builder, noise

BATCH, NUM_TOKENS, DIM = 3, 16, 24
GRID = (4, 4)


@dataclass(frozen=True)
class Case:
    """A mixer at a tiny size.

    Attributes:
        mixer: its name in the table, or what builds it.
        kwargs: arguments that keep it tiny or choose a variant.
        except_for: properties that do not hold, each with the reason.
    """

    mixer: str | type[nn.Module]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    except_for: Mapping[str, str] = field(default_factory=dict)


def builder(case: Case) -> Builder:
    """What builds the layer of a case."""
    if not isinstance(case.mixer, str):
        return Builder(case.mixer, case.kwargs)
    fixed = MIXERS[case.mixer].fixed
    make = partial(create_mixer, case.mixer)
    size = {"dim": DIM, "num_tokens": NUM_TOKENS}
    return Builder(make, {**size, **fixed, **case.kwargs})


def example(case: Case) -> Tensor:
    """Input for the layer of a case."""
    layer = builder(case)()
    if getattr(layer, "capabilities", Capabilities(map="tokens")).layout == "2d":
        return noise(BATCH, DIM, *GRID)
    return noise(BATCH, NUM_TOKENS, DIM)


class LessStack(Mixer):
    """A leading self-attention and less-attention after it, as a stack calls them."""

    capabilities = LessAttention.capabilities

    def __init__(self, dim: int, num_tokens: int, *, num_heads: int = 4) -> None:
        super().__init__()
        self.dim = dim
        self.leader = SelfAttention(dim, num_heads=num_heads)
        self.follower = LessAttention(dim, num_tokens, num_heads=num_heads, scores_from="previous")

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        out, scores = self.leader.mix(x, None, mask)
        return self.follower.mix(out, scores, mask)[0]

    def attention_map(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        out, scores = self.leader.mix(x, None, mask)
        return self.follower.mix_map(out, scores, mask)

    def macs(self, num_tokens: int) -> int:
        return self.leader.macs(num_tokens) + self.follower.macs(num_tokens)


SMALL_MEMORY: dict[str, Any] = {"num_slots": 10}

TINY: dict[str, dict[str, Any]] = {
    "self": {"num_heads": 4},
    "self-double": {"num_heads": 4},
    "external": SMALL_MEMORY,
    "external-softmax": SMALL_MEMORY,
    "external-2d": SMALL_MEMORY,
    "multihead-external": {**SMALL_MEMORY, "num_heads": 4},
    "gating-attention": {"attention_dim": 8},
    "less": {"num_heads": 4},
    "em": {"num_heads": 4, "num_slots": 6},
}
"""Arguments that keep a mixer tiny, where its defaults do not."""

NO_MAP = "the point of linear attention is that no map is ever made"
EXCEPT: dict[str, dict[str, str]] = {
    "linear": {"map-used": NO_MAP, "map-rows": "a query without a positive product has no weights"},
}
"""Properties that do not hold, each with the reason."""

CASES: dict[str, Case] = {name: Case(name, TINY.get(name, {}), EXCEPT.get(name, {})) for name in MIXERS}
"""One for each mixer of the table."""

UNPOOLED = {"equivariance": "only the pooled form is bound to places; the declaration speaks for all three"}
STREAMED = {
    "map-used": "the point of streaming is that no map is ever whole",
    "macs": "slots are normalised over all tokens before any output, so the logits are computed twice",
}
BY_FFT = {
    "map-used": "the point of the FFT is that the matrix is never written",
    "macs": "the counter counts no FFT",
    "onnx": "the exporter of traced graphs has no FFT",
}
BY_RMS_NORM = {"onnx": "the exporter of traced graphs has no RMSNorm; the command's exporter has"}
TWICE = {"macs": "chunks make the logits twice", "export": "a graph has a fixed number of chunks"}
SIZE: dict[str, Any] = {"dim": DIM, "num_tokens": NUM_TOKENS}

VARIANTS: dict[str, Case] = {
    "self-causal": Case("self", {"num_heads": 4, "causal": True}),
    "sagan-paper": Case("sagan", {"variant": "paper"}, except_for=UNPOOLED),
    "sagan-compact": Case("sagan", {"variant": "compact"}, except_for=UNPOOLED),
    "external-tied": Case("external", {**SMALL_MEMORY, "tie": "hard"}),
    "external-sinkhorn": Case("external", {**SMALL_MEMORY, "num_steps": 3}),
    **{
        f"external-{name}": Case("external", {**SMALL_MEMORY, "normalization": name}, except_for=exceptions)
        for name, exceptions in {"sigmoid": {}, "l2": BY_RMS_NORM, "entmax15": {}}.items()
    },
    "external-chunked": Case("external", {**SMALL_MEMORY, "chunk_size": 5}, except_for=STREAMED),
    "offset-chunked": Case("offset", {"chunk_size": 5}, except_for=TWICE),
    "gating-causal": Case("gating", {"causal": True}),
    "gating-fft": Case("gating-toeplitz", {"gate": "toeplitz-fft"}, except_for=BY_FFT),
    "gating-attention-causal": Case("gating-attention", {"attention_dim": 8, "causal": True}),
    "gating-unit": Case(SpatialGatingUnit, {**SIZE, "variant": "additive"}),
    "tiny-attention": Case(TinyAttention, {"dim": DIM, "attention_dim": 8}),
    "less-dense": Case("less", {"num_heads": 4, "mode": "dense", "share_heads": False}),
    "less-stack": Case(LessStack, {**SIZE, "num_heads": 4}),
}
"""Forms of the same mechanisms that take another path through the code, and the layers that are used inside others."""

PARTS: dict[str, str] = {
    "SpatialGatingUnit": "gating",
    "TinyAttention": "gating-attention",
    "AttentionResidual": "less",
}
"""Public layers that are not a row of the table, and the row in which each of them is used."""
