"""A swapped layer is called as the one before it was: masks, weights, layouts; what it cannot honour is refused."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tokenmix
from tokenmix.errors import UserError
from tokenmix.swap import AttentionLayout, register_adapter, registry
from tokenmix.swap.adapter import shared_mask
from tokenmix.swap.coded_adapters import MixerInTorch


@pytest.fixture(params=[True, False], ids=["batch-first", "seq-first"])
def attention(request: pytest.FixtureRequest) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    return nn.MultiheadAttention(32, 4, batch_first=request.param).eval()


def swapped(attention: nn.MultiheadAttention, mixer: str = "self", **kwargs: Any) -> MixerInTorch:
    holder = nn.ModuleDict({"attn": copy.deepcopy(attention)})
    tokenmix.swap_attention(holder, mixer, ["attn"], **kwargs)
    made = holder["attn"]
    assert isinstance(made, MixerInTorch)
    return made


def tokens(attention: nn.MultiheadAttention) -> Tensor:
    return torch.randn(3, 7, 32) if attention.batch_first else torch.randn(7, 3, 32)


@pytest.mark.parametrize("as_added", [False, True])
@torch.no_grad()
def test_padding_and_weights_are_multihead_attention_s(attention: nn.MultiheadAttention, as_added: bool) -> None:
    x, ignored = tokens(attention), torch.zeros(3, 7, dtype=torch.bool)
    ignored[0, 4:] = ignored[2, :2] = True
    mask = torch.zeros(3, 7).masked_fill(ignored, float("-inf")) if as_added else ignored
    new = swapped(attention)
    here = ~ignored if attention.batch_first else ~ignored.T
    for averaged in (True, False):
        known = {"key_padding_mask": mask, "average_attn_weights": averaged}
        (expected, weights), (out, ours) = attention(x, x, x, **known), new(x, x, x, **known)
        torch.testing.assert_close(out[here], expected[here])
        assert not out[~here].any()
        assert ours is not None
        assert ours.shape == weights.shape
        rows = ~ignored if averaged else (~ignored)[:, None].expand(-1, 4, -1)
        torch.testing.assert_close(ours[rows], weights[rows])
    assert new(x, x, x, need_weights=False)[1] is None


@torch.no_grad()
def test_one_sequence_without_a_batch(attention: nn.MultiheadAttention) -> None:
    x, ignored = torch.randn(7, 32), torch.arange(7) > 4
    (expected, weights), new = attention(x, x, x, key_padding_mask=ignored), swapped(attention)
    out, ours = new(x, x, x, key_padding_mask=ignored)
    torch.testing.assert_close(out[:5], expected[:5])
    assert ours is not None
    torch.testing.assert_close(ours[:5], weights[:5])


def test_a_map_that_is_not_between_tokens_is_no_weight(attention: nn.MultiheadAttention) -> None:
    x = tokens(attention)
    assert swapped(attention, "external")(x, x, x)[1] is None


def test_calls_that_no_mixer_can_answer(attention: nn.MultiheadAttention) -> None:
    x, new = tokens(attention), swapped(attention, "external")
    square = torch.zeros(7, 7, dtype=torch.bool)
    for words, args, kwargs in [
        ("not one tensor", (x, x.clone(), x), {}),
        ("not one tensor", (x, x, x.clone()), {}),
        ("pairs of tokens", (x, x, x), {"attn_mask": square}),
        ("has no causal form", (x, x, x), {"attn_mask": square, "is_causal": True}),
        ("weigh", (x, x, x), {"key_padding_mask": torch.full((3, 7), 0.5)}),
    ]:
        with pytest.raises(UserError, match=words):
            new(*args, **kwargs)
    with pytest.raises(UserError, match="'causal': True"):
        swapped(attention)(x, x, x, is_causal=True)


@torch.no_grad()
def test_a_causal_mixer_answers_causal_calls(attention: nn.MultiheadAttention) -> None:
    x, future = tokens(attention), torch.ones(7, 7, dtype=torch.bool).triu(1)
    new = swapped(attention, mixer_kwargs={"causal": True})
    expected = attention(x, x, x, attn_mask=future, is_causal=True, need_weights=False)[0]
    torch.testing.assert_close(new(x, x, x, attn_mask=future, is_causal=True, need_weights=False)[0], expected)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@torch.no_grad()
def test_an_encoder_with_padding_goes_the_same_way_in_evaluation() -> None:
    """In evaluation PyTorch packs padded batches and has a fused path that would pass the mixer by."""
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 2).eval()
    x, ignored = torch.randn(3, 7, 32), torch.arange(7).expand(3, 7) > 4
    expected = encoder(x, src_key_padding_mask=ignored)
    report = tokenmix.swap_attention(encoder, "self")
    assert any("use_nested_tensor" in note for note in report.notes)
    torch.testing.assert_close(encoder(x, src_key_padding_mask=ignored)[:, :5], expected[:, :5], rtol=1e-4, atol=1e-5)
    assert report.macs_after is None
    assert any("example_inputs" in note for note in report.notes)


@torch.no_grad()
def test_timm_s_masks(make: Callable[..., Any]) -> None:
    model = make().eval()
    old = copy.deepcopy(model.blocks[0].attn)
    tokenmix.swap_attention(model, "self")
    new, x = model.blocks[0].attn, torch.randn(3, 7, 32)
    taking_part = (torch.arange(7) < 5).expand(3, 1, 1, 7)
    for mask in (taking_part, taking_part.expand(3, 1, 7, 7), torch.zeros(3, 1, 1, 7).masked_fill(~taking_part, -1e38)):
        torch.testing.assert_close(new(x, attn_mask=mask)[:, :5], old(x, attn_mask=mask)[:, :5], rtol=1e-4, atol=1e-5)
    with pytest.raises(UserError, match="pairs of tokens"):
        new(x, attn_mask=torch.ones(3, 1, 7, 7, dtype=torch.bool).tril())
    with pytest.raises(UserError, match="pairs of tokens"):  # two axes are pairs
        new(x, attn_mask=torch.ones(7, 7, dtype=torch.bool).tril())
    with pytest.raises(UserError, match="pairs of tokens"):  # also with as many samples as tokens
        new(x[:1].expand(7, 7, 32), attn_mask=torch.ones(7, 7, dtype=torch.bool).tril())
    with pytest.raises(UserError, match="is_causal=True"):
        new(x, is_causal=True)


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_transformers_masks_and_attentions(implementation: str) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is optional and not installed")
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, image_size=16, patch_size=4
    )
    model = transformers.ViTModel._from_config(config, attn_implementation=implementation).eval()
    x, mask = torch.randn(2, 3, 16, 16), torch.ones(2, 17, dtype=torch.long)
    mask[0, 12:] = 0
    expected = model(x, attention_mask=mask).last_hidden_state
    assert not torch.allclose(expected, model(x).last_hidden_state)
    tokenmix.swap_attention(model, "self")
    torch.testing.assert_close(model(x, attention_mask=mask).last_hidden_state[0, :12], expected[0, :12])
    with pytest.raises(UserError, match="output_attentions"):
        model(x, output_attentions=True)


def vit(**kwargs: Any) -> Any:
    transformers = pytest.importorskip("transformers", reason="transformers is optional and not installed")
    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    return transformers.ViTModel(transformers.ViTConfig(**size, image_size=16, patch_size=4)).eval()


@torch.no_grad()
def test_a_swapped_vit_of_transformers_exports() -> None:
    """transformers hands a mask of pairs to every layer while a model is exported."""
    model, x = vit(), torch.randn(2, 3, 16, 16)
    tokenmix.swap_attention(model, "external")
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("b", min=2)},))
    images = torch.randn(3, 3, 16, 16)
    torch.testing.assert_close(program.module()(images)[0], model(images)[0])


@torch.no_grad()
def test_a_compiled_layer_refuses_the_masks_that_it_refuses_itself(make: Callable[..., Any]) -> None:
    model = make().eval()
    tokenmix.swap_attention(model, "self")
    layer, x = model.blocks[0].attn, torch.randn(2, 7, 32)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    padding = (torch.arange(7) < 5).expand(2, 1, 7, 7)
    torch.testing.assert_close(compiled(x, padding), layer(x, padding))
    for mask in (torch.ones(2, 1, 7, 7, dtype=torch.bool).tril(), torch.full((2, 1, 7, 7), 0.5)):
        with pytest.raises(RuntimeError, match=r"can only mask tokens|weight them"):
            compiled(x, mask)
    torch.compiler.reset()


@torch.no_grad()
def test_padding_may_be_queries_that_see_nothing(make: Callable[..., Any]) -> None:
    """timm's NaFlex ViT masks pair (i, j) unless both take part."""
    model = make().eval()
    old = copy.deepcopy(model.blocks[0].attn)
    tokenmix.swap_attention(model, "self")
    new, x, valid = model.blocks[0].attn, torch.randn(3, 7, 32), torch.arange(7) < 5
    mask = (valid[:, None] & valid).expand(3, 1, 7, 7)
    torch.testing.assert_close(new(x, mask)[:, :5], old(x, mask)[:, :5], rtol=1e-4, atol=1e-5)
    blind = mask.clone()
    blind[:, :, 2] = False
    with pytest.raises(UserError, match="pairs of tokens"):
        new(x, blind)


class Padded(nn.Module):
    """An encoder that cannot be called without its mask, and looks into it."""

    def __init__(self, *, batch_first: bool = True) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=batch_first)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        if padding.dtype == torch.bool:
            assert not padding.all(1).any(), "a sequence without tokens"
        return self.encoder(x, src_key_padding_mask=padding)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("as_added", [False, True])
@torch.no_grad()
def test_an_encoder_s_padding_may_be_among_the_example_inputs(batch_first: bool, as_added: bool) -> None:
    torch.manual_seed(0)
    model, ignored = Padded(batch_first=batch_first).eval(), torch.arange(7).expand(3, 7) > 4
    x, mask = torch.randn(3, 7, 32), torch.zeros(3, 7).masked_fill(ignored, -torch.inf) if as_added else ignored
    x = x if batch_first else x.transpose(0, 1)
    expected, weights = model(x, mask), copy.deepcopy(model.state_dict())
    report = tokenmix.swap_attention(model, "self", example_inputs=(x, mask))
    assert report.macs_before == report.macs_after != 0
    assert report.rows[0].num_tokens == 7
    assert torch.backends.mha.get_fastpath_enabled()
    assert all(torch.equal(p, weights[name]) for name, p in model.state_dict().items() if name in weights)
    here = ~ignored if batch_first else ~ignored.T
    torch.testing.assert_close(model(x, mask)[here], expected[here], rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@torch.no_grad()
def test_a_causal_mask_among_the_example_inputs_is_seen_as_one() -> None:
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 1).eval()
    x, mask = torch.randn(2, 5, 32), nn.Transformer.generate_square_subsequent_mask(5)
    expected = encoder(x, mask)
    with pytest.raises(UserError, match="called with is_causal=True"):
        tokenmix.swap_attention(encoder, "external", example_inputs=(x, mask))
    with pytest.raises(UserError, match="which pairs of tokens meet"):
        tokenmix.swap_attention(encoder, "external", example_inputs=(x, torch.randn(5, 5)))
    tokenmix.swap_attention(encoder, "self", example_inputs=(x, mask), mixer_kwargs={"causal": True})
    torch.testing.assert_close(encoder(x, mask), expected, rtol=1e-4, atol=1e-5)


def test_attention_that_is_not_causal_does_not_become_causal():
    torch.manual_seed(0)
    model = nn.Transformer(16, 2, 1, 1, 32, batch_first=True).eval()
    source, target = torch.randn(2, 5, 16), torch.randn(2, 6, 16)
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    given = {"src": source, "tgt": target, "tgt_mask": mask, "tgt_is_causal": True}
    expected = model(**given)
    report = tokenmix.swap_attention(model, "self", example_inputs=given, mixer_kwargs={"causal": True})
    assert [row.name for row in report.rows] == ["decoder.layers.0.self_attn"]
    assert "it is not causal" in report.skipped[0].reason
    torch.testing.assert_close(model(**given), expected, rtol=1e-4, atol=1e-5)


def test_a_wrapped_projection_is_refused_in_one_line():
    encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    wrapped = nn.Sequential(encoder.self_attn.out_proj)  # as PEFT does it
    wrapped.weight, wrapped.bias = wrapped[0].weight, wrapped[0].bias
    encoder.self_attn.out_proj = wrapped
    with pytest.raises(UserError, match=r"Sequential, not nn\.Linear"):
        tokenmix.swap_attention(encoder, "self", example_inputs=(torch.randn(1, 5, 16),))


def test_a_linear_layer_that_does_more_is_refused(make: Callable[..., Any]):
    class LowRank(nn.Linear):  # as loralib has it
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + x.mean(-1, keepdim=True)

    model = make()
    model.blocks[0].attn.qkv = LowRank(32, 96)
    with pytest.raises(UserError, match=r"LowRank, not nn\.Linear"):
        tokenmix.swap_attention(model, "self", ["blocks.0.attn"])


def test_a_mask_that_the_adapter_does_not_name_is_refused(monkeypatch: pytest.MonkeyPatch):
    class Masked(nn.Module):
        num_heads = 4

        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.proj = nn.Linear(16, 48), nn.Linear(16, 16)

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            q, k, v = self.qkv(x).unflatten(2, (3, 4, 4)).permute(2, 0, 3, 1, 4)
            bias = None if mask is None else mask[:, None, None]
            return self.proj(nn.functional.scaled_dot_product_attention(q, k, v, bias).transpose(1, 2).flatten(2))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = Masked()

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return self.attn(x, mask)

    monkeypatch.setattr(registry, "ADAPTERS", [*registry.ADAPTERS])
    layout = register_adapter(AttentionLayout(classes=[Masked], qkv="qkv", out="proj"))
    assert isinstance(layout, AttentionLayout)
    x, mask = torch.randn(2, 5, 16), torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    net = Net().eval()
    expected = net(x, mask)
    with pytest.raises(UserError, match="mask is given, and the adapter does not name it"):
        tokenmix.swap_attention(net, "self", example_inputs=(x, mask))
    register_adapter(replace(layout, mask="mask"))
    tokenmix.swap_attention(net, "self", example_inputs=(x, mask))
    for out in (net(x, mask), net.attn(mask=mask, x=x)):
        torch.testing.assert_close(out[mask], expected[mask])


def test_masks_of_older_code():
    x = torch.randn(2, 5, 8)
    seen = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]).bool()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        added = ((~seen).to(dtype) * -10_000)[:, None, None]
        assert shared_mask(added, x).equal(seen)  # type: ignore[union-attr]
    with pytest.raises(UserError, match="has whole numbers; give a boolean mask"):
        shared_mask(seen.long()[:, None, None], x)
    with pytest.raises(UserError, match="can mask tokens, not weight them"):
        shared_mask((~seen)[:, None, None] * -100.0, x)


def test_a_flag_of_which_tracing_made_a_tensor_is_no_mask() -> None:
    """The older ONNX exporter calls timm's attention so."""
    timm = pytest.importorskip("timm")
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, num_classes=3).eval()
    tokenmix.swap_attention(model, "external")
    x, layer = torch.randn(1, 5, 192), model.blocks[0].attn
    torch.testing.assert_close(layer(x, is_causal=torch.tensor(False)), layer(x))


def test_a_tuple_of_tensors_needs_a_name_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_heads = 2
            self.qkv, self.proj = nn.Linear(16, 48), nn.Linear(16, 16)

        def forward(self, x: Tensor, turn: tuple[Tensor, Tensor] | None = None) -> Tensor:
            q, k, v = self.qkv(x).unflatten(2, (3, 2, 8)).permute(2, 0, 3, 1, 4)
            q = q if turn is None else q * turn[0] + q.flip(-1) * turn[1]
            return self.proj(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = Turned()

        def forward(self, x: Tensor) -> Tensor:
            return self.attn(x, (torch.ones(5, 8), torch.ones(5, 8)))

    monkeypatch.setattr(registry, "ADAPTERS", [*registry.ADAPTERS])
    register_adapter(AttentionLayout(classes=[Turned], qkv="qkv", out="proj"))
    with pytest.raises(UserError, match=r"turn is given, .* positions=\('turn',\)"):
        tokenmix.swap_attention(Net(), "self", example_inputs=(torch.randn(2, 5, 16),))
