"""The properties on other people's layers: right ones pass them all, known bugs fail the one that is meant for them."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tokenmix.testing import PROPERTIES, Builder
from tokenmix.testing.doctor import examine
from tokenmix.testing.harness import noise

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from fightingcv_attention.attention.A2Atttention import DoubleAttention
    from fightingcv_attention.attention.AFT import AFT_FULL
    from fightingcv_attention.attention.BAM import BAMBlock
    from fightingcv_attention.attention.DANet import DAModule
    from fightingcv_attention.attention.EMSA import EMSA
    from fightingcv_attention.attention.ExternalAttention import ExternalAttention
    from fightingcv_attention.attention.MUSEAttention import MUSEAttention
    from fightingcv_attention.attention.PSA import PSA
    from fightingcv_attention.attention.S2Attention import S2Attention
    from fightingcv_attention.attention.SelfAttention import ScaledDotProductAttention
    from g_mlp_pytorch.g_mlp_pytorch import SpatialGatingUnit
    from vit_pytorch.simple_vit import Attention as SimpleVitAttention
    from vit_pytorch.vit import Attention as VitAttention
    from x_transformers.x_transformers import Attention as XAttention

HEADS = {"d_model": 32, "d_k": 8, "d_v": 8, "h": 4}
NARROW = {"dim": 32, "heads": 4, "dim_head": 8}
TOKENS = noise(3, 16, 32)
MAP = noise(3, 32, 4, 4)
CAPTURE = frozenset({"compile", "export", "onnx"})
EAGER = frozenset(PROPERTIES) - CAPTURE


class OfItself(nn.Module):
    """A layer of (queries, keys, values) as one of tokens; its own masks mean True = ignore."""

    def __init__(self, make: Callable[..., nn.Module], **kwargs: Any) -> None:
        super().__init__()
        self.inner = make(**kwargs)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        ignored = None if mask is None else ~mask[:, None, None, :].expand(-1, 4, x.shape[1], -1)
        return self.inner(x, x, x, attention_mask=ignored)


class OfItselfUnmasked(OfItself):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x)


class Gate(nn.Module):
    """A spatial gating unit with the projection before it, so that it keeps the width."""

    def __init__(self, dim: int, seq_len: int, **kwargs: Any) -> None:
        super().__init__()
        self.proj, self.gate = nn.Linear(dim, 2 * dim), SpatialGatingUnit(2 * dim, seq_len, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(self.proj(x))


class Masked(nn.Module):
    """x-transformers' attention, its context left out."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.causal = kwargs.get("causal", False)
        self.inner = XAttention(**kwargs)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.inner(x, mask=mask)


class WithItsMap(ExternalAttention):
    """The map is what enters the second memory."""

    def attention_map(self, x: Tensor) -> Tensor:
        seen = []
        handle = self.mv.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        self(x)
        handle.remove()
        return seen[0]


def failures(build: Builder, x: Tensor, names: frozenset[str] = EAGER) -> set[str]:
    """Properties that fail; also a triangle that nothing declares, which is advice."""
    found = examine(build, x, names)
    return {v.property for v in found if v.status == "FAIL" or (v.property, v.status) == ("causality", "advice")}


RIGHT = {
    "vit-pytorch": Builder(VitAttention, NARROW),
    "vit-pytorch-simple": Builder(SimpleVitAttention, NARROW),
    "x-transformers": Builder(Masked, NARROW),
    "x-transformers-causal": Builder(Masked, {**NARROW, "causal": True}),
    "g-mlp-pytorch": Builder(Gate, {"dim": 32, "seq_len": 16}),
    "g-mlp-pytorch-causal": Builder(Gate, {"dim": 32, "seq_len": 16, "causal": True}),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_implementation_passes(name: str) -> None:
    assert failures(RIGHT[name], TOKENS) == set()


@pytest.mark.slow
def test_a_right_implementation_compiles_and_exports() -> None:
    assert failures(RIGHT["vit-pytorch"], TOKENS, CAPTURE) == set()


WRONG: dict[str, tuple[Builder, Tensor, set[str]]] = {
    # exp underflows in every slot and the sum divides 0 by 0
    "external": (Builder(ExternalAttention, {"d_model": 32, "S": 12}), TOKENS, {"finite", "half-precision"}),
    "gate": (
        Builder(Gate, {"dim": 32, "seq_len": 16, "circulant_matrix": True}),
        TOKENS,
        {"causality"},
    ),
    "double": (
        Builder(DoubleAttention, {"in_channels": 32, "c_m": 16, "c_n": 8}),
        MAP,
        {"batch", "batch-training"},
    ),
    "psa": (
        Builder(PSA, {"channel": 32, "reduction": 2, "S": 4}),
        MAP,
        {"registered", "input-kept", "gradients"},
    ),
    "muse": (Builder(partial(OfItselfUnmasked, MUSEAttention), HEADS), TOKENS, {"eval-stable"}),
    "bam": (Builder(BAMBlock, {"channel": 32, "reduction": 4}), noise(3, 32, 7, 7), {"lengths"}),
    "danet": (
        Builder(DAModule, {"d_model": 512, "H": 7, "W": 7}),
        noise(2, 512, 7, 7),
        {"arguments", "lengths"},
    ),
    "s2": (Builder(S2Attention, {"channels": 32}), MAP, {"shape", "arguments"}),
    "emsa": (
        Builder(partial(OfItself, EMSA), {**HEADS, "H": 4, "W": 4, "ratio": 1}),
        TOKENS,
        {"mask-polarity", "mask-padding", "mask-empty"},
    ),
    "self": (Builder(partial(OfItself, ScaledDotProductAttention), HEADS), TOKENS, {"mask-empty"}),
    "aft": (Builder(AFT_FULL, {"d_model": 32, "n": 16}), TOKENS, {"finite", "half-precision"}),
    "aft-simple": (Builder(AFT_FULL, {"d_model": 32, "n": 16, "simple": True}), TOKENS, {"registered"}),
}


@pytest.mark.filterwarnings("ignore:Implicit dimension choice for softmax")
@pytest.mark.parametrize("name", WRONG)
def test_a_known_bug_fails_its_property(name: str) -> None:
    build, x, expected = WRONG[name]
    assert failures(build, x, frozenset(expected)) == expected


@pytest.mark.filterwarnings("ignore:Implicit dimension choice for softmax")
@pytest.mark.parametrize("name", ["double", "bam", "self", "gate"])
def test_nothing_else_is_held_against_it(name: str) -> None:
    build, x, expected = WRONG[name]
    assert failures(build, x) == expected


def test_rows_of_their_external_attention_are_not_numbers_for_large_logits() -> None:
    build = Builder(WithItsMap, {"d_model": 32, "S": 12})
    assert failures(build, TOKENS, frozenset({"map-rows", "map-used"})) == {"map-rows"}
    with torch.no_grad():
        assert not build().attention_map(TOKENS * 1e6).isfinite().all()
