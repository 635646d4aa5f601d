"""Families of models: the same outputs with self-attention swapped in, and what a swap says to each name."""

import copy
from typing import Any

import pytest
import timm
import torch
from packaging.version import Version
from swap_families import FAMILIES, TIMM, TRANSFORMERS, Family
from torch import Tensor, nn

import tokenmix
from tokenmix.errors import UserError

transformers = pytest.importorskip("transformers", reason="transformers is optional and not installed")
HEAVY = ("vit_base", "eva_giant", "aimv2", "beit_base", "samvit", "naflex", "maxvit", "coatnet", "cait", "Segformer")


def names(table: dict[str, Any]) -> list[Any]:
    return [pytest.param(n, marks=pytest.mark.slow) if n.startswith(HEAVY) else n for n in table]


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_self_attention_with_its_weights_kept_gives_the_model_s_own_outputs(name: str) -> None:
    torch.manual_seed(0)
    family: Family = FAMILIES[name]
    model, inputs = family.build(), family.inputs()
    if family.positions:
        plain = copy.deepcopy(model)
        with pytest.raises(UserError, match=rf"{family.positions} adds positions .* drop='positions'"):
            tokenmix.swap_attention(model, "self")
        assert str(model) == str(plain)
    before = model(**inputs)[0]
    report = tokenmix.swap_attention(model, "self", drop="positions" if family.positions else None)
    after = model(**inputs)[0]
    assert all(row.kept == ("query", "key", "value", "out") for row in report.rows)
    assert report.macs_before == report.macs_after
    other = copy.deepcopy(model)
    tokenmix.swap_attention(other, "external", mixer_kwargs={"num_slots": 4})
    assert not torch.allclose(other(**inputs)[0], after, rtol=1e-3, atol=1e-3), "attention has no effect here"
    if family.taking_part is not None:
        before, after = before[family.taking_part], after[family.taking_part]
    if family.positions:
        assert {row.dropped for row in report.rows} == {(family.positions,)}
        assert f"positions dropped: {family.positions}" in str(report)
        assert not torch.allclose(after, before)
    else:
        torch.testing.assert_close(after, before, rtol=1e-10, atol=1e-10)


def check(model: nn.Module, said: str) -> None:
    if not said.startswith(("ok", "drop")):
        for drop in (None, "positions"):
            with pytest.raises(UserError, match=said):
                tokenmix.swap_attention(model, "external", drop=drop)
        return
    if said.startswith("drop"):
        with pytest.raises(UserError, match=f"{said.removeprefix('drop ')} adds positions"):
            tokenmix.swap_attention(model, "external")
    report = tokenmix.swap_attention(model, "external", drop="positions" if said.startswith("drop") else None)
    assert report.rows
    assert {name for row in report.rows for name in row.dropped} == set(said.split()[1:] if said[:4] == "drop" else ())
    if said == "ok":
        assert not report.skipped
    elif said.startswith("ok but"):
        assert any(said.removeprefix("ok but ") in skipped.reason for skipped in report.skipped)


@pytest.mark.parametrize("name", names(TIMM))
def test_names_of_timm(name: str) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
    check(model, TIMM[name])


@pytest.mark.parametrize("name", names(TRANSFORMERS))
def test_names_of_transformers(name: str) -> None:
    config, said = TRANSFORMERS[name]
    if name == "Dinov2" and Version(transformers.__version__) < Version("5.20"):
        pytest.skip("Dinov2's projections had other names")
    check(getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**config)), said)


def test_the_list_has_about_sixty_names() -> None:
    assert len(TIMM) + len(TRANSFORMERS) + len(FAMILIES) >= 60


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("hiera_tiny_224", {"img_size": (64, 64), "embed_dim": 16, "stages": (1, 1, 2, 2)}),
        ("deit_tiny_distilled_patch16_224", {"img_size": 32, "depth": 2}),
        ("eva_giant_patch14_224", {"img_size": 28, "depth": 2, "embed_dim": 32, "num_heads": 2, "mlp_ratio": 2}),
    ],
)
@torch.no_grad()
def test_timm_s_own_outputs(name: str, size: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=5, **size).double().eval()
    for p in model.parameters():
        nn.init.normal_(p, std=0.1)
    side = size["img_size"]
    x = torch.randn(2, 3, *(side if isinstance(side, tuple) else (side, side)), dtype=torch.float64)
    before = model(x)
    report = tokenmix.swap_attention(model, "self")
    assert before.std() > 0.01
    assert report.macs_before == report.macs_after
    torch.testing.assert_close(model(x), before, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("mixer", ["external", "less"])
def test_rows_count_every_sequence_of_a_call(mixer: str) -> None:
    """MobileViT mixes the tokens of each position in a patch by themselves: four sequences of an image."""
    with torch.device("meta"):
        model = timm.create_model("mobilevit_xxs")
    report = tokenmix.swap_attention(model, mixer)
    assert {row.num_tokens for row in report.rows} == {256, 64, 16}
    assert report.macs_before is not None
    assert report.macs_after is not None
    rows = sum((row.macs_after or 0) - (row.macs_before or 0) for row in report.rows)
    assert rows == report.macs_after - report.macs_before


@torch.no_grad()
def test_naflex_with_padded_batches() -> None:
    torch.manual_seed(0)
    model = timm.create_model("naflexvit_base_patch16_gap", depth=2, embed_dim=32, num_heads=2, num_classes=5).double()
    model.eval()
    valid = torch.arange(12) < torch.tensor([[12], [6]])
    coordinates = torch.stack([torch.arange(12) // 4, torch.arange(12) % 4], -1).expand(2, -1, -1)
    batch = {
        "patches": torch.randn(2, 12, 768, dtype=torch.float64),
        "patch_coord": coordinates * valid.unsqueeze(2),
        "patch_valid": valid,
    }
    before = model(batch)
    tokenmix.swap_attention(model, "self")
    torch.testing.assert_close(model(batch), before, rtol=1e-10, atol=1e-10)
    tokenmix.swap_attention(model, "external")
    small = {key: value[1:, :6] for key, value in batch.items()}
    torch.testing.assert_close(model(batch)[1:], model(small), rtol=1e-10, atol=1e-10)


class Once(nn.Module):
    """One layer of attention in a model."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor, **kwargs: Tensor) -> Tensor:
        out: Tensor = self.attention(x, **kwargs)
        return out


@torch.no_grad()
def test_monai_s_block() -> None:
    block = pytest.importorskip("monai.networks.blocks.selfattention", reason="monai is optional").SABlock
    x, mask = torch.randn(2, 5, 32, dtype=torch.float64), torch.arange(5) < torch.tensor([[5], [3]])
    for combined in (True, False):
        model = Once(block(32, 2, qkv_bias=True, use_combined_linear=combined)).double().eval()
        before = model(x, attn_mask=mask)
        report = tokenmix.swap_attention(model, "self", example_inputs=(x,))
        assert report.rows[0].kept == ("query", "key", "value", "out")
        assert report.macs_before == report.macs_after
        torch.testing.assert_close(model(x, attn_mask=mask)[mask], before[mask], rtol=1e-10, atol=1e-10)
    relative = Once(block(32, 2, rel_pos_embedding="decomposed", input_size=(2, 3)))
    with pytest.raises(UserError, match="rel_positional_embedding adds positions"):
        tokenmix.swap_attention(relative, "external", example_inputs=(torch.zeros(1, 6, 32),))
    with pytest.raises(UserError, match="is causal"):
        tokenmix.swap_attention(Once(block(32, 2, causal=True, sequence_length=5)), "external", example_inputs=(x,))


@torch.no_grad()
def test_diffusers_attention_on_its_own_tokens() -> None:
    attention = pytest.importorskip("diffusers.models.attention_processor", reason="diffusers is optional").Attention
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    model = Once(attention(32, heads=2, dim_head=16, bias=True)).double().eval()
    before = model(x)
    assert tokenmix.swap_attention(model, "self", example_inputs=(x,)).rows[0].kept == ("query", "key", "value", "out")
    torch.testing.assert_close(model(x), before, rtol=1e-10, atol=1e-10)
    model = Once(attention(32, heads=2, dim_head=16)).double().eval()
    with pytest.raises(UserError, match="encoder_hidden_states is given"):
        tokenmix.swap_attention(model, "self", example_inputs={"x": x, "encoder_hidden_states": x.clone()})
    with pytest.raises(UserError, match="is_cross_attention is True"):
        tokenmix.swap_attention(Once(attention(32, cross_attention_dim=8)), "self", ["attention"])
