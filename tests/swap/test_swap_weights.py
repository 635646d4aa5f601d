"""Which weights continue: those that do in the new layer what they did in the old one, and no others."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tokenmix
from tokenmix.layers import LinearAttention, MultiHeadExternalAttention
from tokenmix.swap import SwapReport, SwapRow


def swapped(model: nn.Module, mixer: str, **kwargs: Any) -> tuple[Any, SwapRow]:
    """The first new mixer and its row."""
    report: SwapReport = tokenmix.swap_attention(model, mixer, **kwargs)
    return model.get_submodule(report.rows[0].name).mixer, report.rows[0]


def test_external_attention_keeps_what_reads_and_what_writes_tokens(make: Callable[..., Any]) -> None:
    model = make()
    old = model.blocks[0].attn
    layer, row = swapped(model, "external", mixer_kwargs={"num_slots": 8})
    assert row.kept == ("query", "out")
    assert torch.equal(layer.query.weight, old.qkv.weight[:32])
    assert torch.equal(layer.query.bias, old.qkv.bias[:32])
    assert torch.equal(layer.proj.weight, old.proj.weight)
    assert torch.equal(layer.proj.bias, old.proj.bias)
    assert layer.memory.key_memory.shape == (8, 32)


def test_a_projection_without_a_bias_goes_on_with_zero(make: Callable[..., Any]) -> None:
    layer, row = swapped(make(qkv_bias=False, proj_bias=False), "external")
    assert row.kept == ("query", "out")
    assert not layer.query.bias.any()
    assert not layer.proj.bias.any()


def test_simplified_keeps_values_and_output_as_one_map(make: Callable[..., Any]) -> None:
    model = make()
    old = model.blocks[0].attn
    nn.init.normal_(old.qkv.bias)
    layer, row = swapped(model, "simplified", mixer_kwargs={"output_projection": True})
    assert row.kept == ("value", "out")
    value_bias = old.qkv.bias[64:]

    def through_attention(x: Tensor) -> Tensor:
        return old.proj(x @ old.qkv.weight[64:].mT + value_bias)

    x = torch.randn(3, 7, 32)
    mixed = layer.attention_map(x)[:, 0] @ x
    torch.testing.assert_close(layer(x), through_attention(mixed), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("mixer", "options", "kept"),
    [
        ("self", {}, ("query", "key", "value", "out")),
        ("self", {"num_heads": 4}, ("value", "out")),
        ("self", {"qkv_bias": False}, ()),
        ("linear", {}, ("query", "key", "value", "out")),
        ("linear", {"qkv_bias": False}, ()),
        ("less", {"num_heads": 4}, ("value", "out")),
        ("external", {"query_projection": False}, ("out",)),
        ("external", {"output_projection": False}, ("query",)),
        ("multihead-external", {}, ()),
        ("multihead-external", {"expansion": 1}, ("query", "out")),
        ("simplified", {}, ()),
        ("gating", {}, ()),
        ("gating-attention", {}, ()),
    ],
)
def test_what_is_kept(make: Callable[..., Any], mixer: str, options: dict[str, Any], kept: tuple[str, ...]) -> None:
    row = swapped(make(), mixer, mixer_kwargs=options)[1]
    assert row.kept == kept
    assert row.why


@pytest.mark.parametrize(
    ("options", "kept", "word"),
    [
        ({"qk_norm": True}, ("value", "out"), "norms"),
        ({"scale_attn_norm": True}, ("query", "key"), "after a norm"),
    ],
)
def test_projections_beside_norms_are_not_those_of_plain_attention(
    make: Callable[..., Any], options: dict[str, Any], kept: tuple[str, ...], word: str
) -> None:
    row = swapped(make(**options), "self")[1]
    assert word in row.why
    assert row.kept == kept


def test_a_key_of_its_own_makes_query_and_key_another_thing() -> None:
    model = nn.ModuleDict({"attn": nn.MultiheadAttention(32, 2, add_bias_kv=True)})
    row = swapped(model, "self", where=["attn"])[1]
    assert row.kept == ("value", "out")
    assert "key of its own" in row.why


def test_dropout_goes_over_where_there_is_a_place_for_it(make: Callable[..., Any]) -> None:
    layer, _ = swapped(make(attn_drop_rate=0.1, proj_drop_rate=0.2), "self")
    assert (layer.attention_dropout, layer.dropout.p) == (0.1, 0.2)
    layer, row = swapped(make(attn_drop_rate=0.1, proj_drop_rate=0.2), "external")
    assert layer.dropout.p == 0.2
    assert "dropout of 0.1" in row.why
    _, row = swapped(make(attn_drop_rate=0.1, proj_drop_rate=0.2), "depthwise")
    assert "the dropout of 0.1 on the map has no place in it; the dropout of 0.2 on the output has no place" in row.why


def test_dropout_of_our_own_mixers_goes_over() -> None:
    ours = MultiHeadExternalAttention(16, num_heads=4, num_slots=5, dropout=0.3, attention_dropout=0.2)
    for mixer, of_map in ((ours, 0.2), (LinearAttention(16, num_heads=4, dropout=0.3), 0.0)):
        model = nn.ModuleDict({"attn": mixer})
        tokenmix.swap_attention(model, "self")
        assert (model["attn"].dropout.p, model["attn"].attention_dropout) == (0.3, of_map)


def test_what_is_asked_for_comes_first(make: Callable[..., Any]) -> None:
    layer, _ = swapped(make(proj_drop_rate=0.2), "self", mixer_kwargs={"dropout": 0.0, "num_heads": 4})
    assert (layer.dropout.p, layer.num_heads) == (0.0, 4)


def test_mixers_without_attention_s_projections_give_none() -> None:
    row = tokenmix.swap_attention(tokenmix.create_model("gmlp_nano"), "self").rows[0]
    assert row.kept == ()
    assert "GatedMLP" in row.why
