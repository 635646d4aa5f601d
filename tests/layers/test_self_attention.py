"""Self-attention and its simplified form: independent implementations, masks, maps, cost, compile, export."""

import copy

import pytest
import timm.layers
import torch
import torch.nn.functional as F
import vit_pytorch.vit
import x_transformers.x_transformers
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tokenmix.errors import UserError
from tokenmix.layers.self_attention import SelfAttention, SimplifiedSelfAttention
from tokenmix.ops.less import Scores

VARIANTS = {
    "self": lambda: SelfAttention(16, num_heads=4),
    "double": lambda: SelfAttention(16, num_heads=4, normalization="double"),
    "causal": lambda: SelfAttention(16, num_heads=4, causal=True),
    "simplified": lambda: SimplifiedSelfAttention(16, scale=0.25, output_projection=True),
}


@pytest.fixture(params=VARIANTS)
def layer(request):
    torch.manual_seed(0)
    return VARIANTS[request.param]()


def count_macs(layer, x):
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        layer(x)
    return counter.get_total_flops() // 2 // x.shape[0]


@pytest.mark.parametrize("causal", [False, True])
def test_equals_pytorchs_function(causal):
    torch.manual_seed(0)
    layer, x = SelfAttention(16, num_heads=4, causal=causal).double(), torch.randn(2, 7, 16, dtype=torch.float64)
    mask = torch.arange(7) < torch.tensor([[7], [5]])
    ahead = torch.ones(7, 7, dtype=torch.bool).triu(1) if causal else None
    sequence = x.transpose(0, 1)
    expected, weights = F.multi_head_attention_forward(
        sequence,
        sequence,
        sequence,
        16,
        4,
        layer.qkv.weight,
        layer.qkv.bias,
        None,
        None,
        False,
        0.0,
        layer.proj.weight,
        layer.proj.bias,
        key_padding_mask=~mask,
        attn_mask=ahead,
        average_attn_weights=False,
    )
    assert weights is not None
    torch.testing.assert_close(layer(x, mask)[mask], expected.transpose(0, 1)[mask])
    torch.testing.assert_close(layer.attention_map(x, mask).transpose(1, 2)[mask], weights.transpose(1, 2)[mask])


def test_equals_timm():
    layer, x = SelfAttention(24, num_heads=3), torch.randn(2, 6, 24)
    theirs = timm.layers.Attention(24, num_heads=3, qkv_bias=True)
    theirs.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(x), theirs(x))


def test_equals_vit_pytorch():
    layer, x = SelfAttention(24, num_heads=3, qkv_bias=False), torch.randn(2, 6, 24)
    theirs = vit_pytorch.vit.Attention(24, heads=3, dim_head=8)
    theirs.to_qkv.load_state_dict(layer.qkv.state_dict())
    torch.nn.init.zeros_(layer.proj.bias)
    theirs.to_out = torch.nn.Linear(24, 24)
    theirs.to_out.load_state_dict(layer.proj.state_dict())
    torch.testing.assert_close(layer(theirs.norm(x)), theirs(x))


@pytest.mark.parametrize("causal", [False, True])
def test_equals_x_transformers(causal):
    layer, x = SelfAttention(24, num_heads=3, qkv_bias=False, causal=causal), torch.randn(2, 6, 24)
    mask = torch.arange(6) < torch.tensor([[6], [4]])
    theirs = x_transformers.x_transformers.Attention(24, dim_head=8, heads=3, causal=causal)
    query, key, value = layer.qkv.weight.chunk(3)
    for module, weight in ((theirs.to_q, query), (theirs.to_k, key), (theirs.to_v, value)):
        module.weight.data.copy_(weight)
    theirs.to_out.weight.data.copy_(layer.proj.weight)
    torch.nn.init.zeros_(layer.proj.bias)
    torch.testing.assert_close(layer(x, mask)[mask], theirs(x, mask=mask)[mask])


def test_double_normalisation_of_the_map():
    layer, x = SelfAttention(16, num_heads=2, normalization="double").double(), torch.randn(2, 5, 16).double()
    query, key, value = layer.qkv(x).view(2, 5, 3, 2, 8).permute(2, 0, 3, 1, 4)
    columns = torch.softmax(query @ key.mT / 8**0.5, dim=-2)
    weights = columns / columns.sum(-1, keepdim=True)
    torch.testing.assert_close(layer.attention_map(x), weights)
    torch.testing.assert_close(layer(x), layer.proj((weights @ value).transpose(1, 2).flatten(2)))


def test_simplified_is_the_printed_equation():
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    layer = SimplifiedSelfAttention(16)
    assert list(layer.parameters()) == []
    weights = torch.softmax(x @ x.mT, dim=-1)
    torch.testing.assert_close(layer(x), weights @ x)
    torch.testing.assert_close(layer.attention_map(x), weights.unsqueeze(1))
    projected = SimplifiedSelfAttention(16, scale=0.25, output_projection=True).double()
    weights = torch.softmax(x @ x.mT / 4, dim=-1)
    torch.testing.assert_close(projected(x), projected.proj(weights @ x))


def test_mask_is_as_if_cropped_and_padding_may_hold_anything(layer):
    x = torch.randn(2, 7, 16)
    mask = torch.arange(7) < torch.tensor([[7], [4]])
    x[1, 4:] = torch.nan
    out = layer(x, mask)
    torch.testing.assert_close(out[1:, :4], layer(x[1:, :4]))
    torch.testing.assert_close(out[:1], layer(x[:1]))
    assert (out[1, 4:] == 0).all()
    out.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in layer.parameters())


def test_a_row_without_tokens_is_zero(layer):
    x = torch.randn(2, 5, 16, requires_grad=True)
    mask = torch.tensor([[False] * 5, [True] * 5])
    out = layer(x, mask)
    out.square().sum().backward()
    assert (out[0] == 0).all()
    assert (layer.attention_map(x, mask)[0] == 0).all()
    assert (x.grad[0] == 0).all()
    assert torch.isfinite(x.grad).all()


def test_map_times_values_is_the_output():
    layer, x = SelfAttention(16, num_heads=4), torch.randn(2, 6, 16)
    mask = torch.rand(2, 6) > 0.3
    value = layer.qkv(x)[..., 32:].unflatten(2, (4, 4)).transpose(1, 2)
    mixed = (layer.attention_map(x, mask) @ value).transpose(1, 2).flatten(2)
    torch.testing.assert_close(layer(x, mask)[mask], layer.proj(mixed)[mask])


def test_permutation(layer):
    x, order = torch.randn(2, 6, 16), torch.randperm(6)
    out, moved = layer(x), layer(x[:, order])
    if getattr(layer, "causal", False):
        changed = torch.cat([x[:, :4], torch.randn(2, 2, 16)], 1)
        torch.testing.assert_close(layer(changed)[:, :4], out[:, :4])
        assert not torch.allclose(moved, out[:, order])
    else:
        torch.testing.assert_close(moved, out[:, order])


def test_counted_macs(layer):
    x = torch.randn(2, 9, 16)
    assert count_macs(layer, x) == layer.macs(9)


def test_counted_macs_of_the_printed_form():
    layer = SimplifiedSelfAttention(16)
    assert count_macs(layer, torch.randn(2, 9, 16)) == layer.macs(9) == 2 * 9 * 9 * 16


@pytest.mark.one_fast
def test_exports_with_any_length(layer):
    batch, length = torch.export.Dim("batch", min=1, max=16), torch.export.Dim("length", min=2, max=64)
    x, mask = torch.randn(3, 6, 16), torch.rand(3, 6) > 0.3
    shapes = ({0: batch, 1: length}, {0: batch, 1: length})
    program = torch.export.export(layer.eval(), (x, mask), dynamic_shapes=shapes).module()
    x, mask = torch.randn(2, 11, 16), torch.rand(2, 11) > 0.3
    torch.testing.assert_close(program(x, mask), layer(x, mask))


def test_survives_copy_and_types(layer):
    x = torch.randn(2, 6, 16)
    out = layer(x)
    torch.testing.assert_close(copy.deepcopy(layer)(x), out)
    for dtype, tolerance in ((torch.float16, 1e-2), (torch.bfloat16, 5e-2), (torch.float64, 1e-5)):
        half = copy.deepcopy(layer).to(dtype)(x.to(dtype))
        assert half.dtype == dtype
        torch.testing.assert_close(half.float(), out, rtol=tolerance, atol=tolerance)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(layer(x).float(), out, rtol=5e-2, atol=5e-2)


def test_dropouts_act_in_training_only():
    x = torch.randn(2, 6, 16)
    for option in ("dropout", "attention_dropout"):
        for layer in (SelfAttention(16, **{option: 0.5}), SimplifiedSelfAttention(16, **{option: 0.5})):
            assert not torch.equal(layer(x), layer(x))
            layer.eval()
            assert torch.equal(layer(x), layer(x))


def test_mix_returns_the_scores_that_the_map_is_made_of():
    layer, x = SelfAttention(16, num_heads=4).double(), torch.randn(2, 6, 16).double()
    out, scores = layer.mix(x)
    assert scores is not None
    assert scores.dense is None
    torch.testing.assert_close(out, layer(x))
    torch.testing.assert_close(scores.matrix().softmax(-1), layer.attention_map(x))


@pytest.mark.parametrize("normalization", ["softmax", "double"])
def test_mix_adds_a_residual(normalization):
    layer, x = SelfAttention(16, num_heads=4, normalization=normalization).double(), torch.randn(2, 6, 16).double()
    residual = torch.randn(2, 4, 6, 6).double()
    out, scores = layer.mix(x, residual=residual)
    assert scores is not None
    assert scores.dense is residual
    used = layer.mix_map(x, residual=residual)
    if normalization == "softmax":
        torch.testing.assert_close(scores.matrix().softmax(-1), used)
    value = layer.qkv(x)[..., 32:].unflatten(2, (4, 4)).transpose(1, 2)
    torch.testing.assert_close(out, layer.proj((used @ value).transpose(1, 2).flatten(2)))
    assert not torch.allclose(out, layer(x))


def test_a_causal_layer_hands_on_what_it_was_given():
    layer, x = SelfAttention(16, causal=True), torch.randn(1, 3, 16)
    given = Scores(torch.randn(1, 8, 3, 2), torch.randn(1, 8, 3, 2))
    assert layer.mix(x, given)[1] is given
    assert layer.mix(x)[1] is None


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: SelfAttention(16, num_heads=3), "num_heads must divide dim 16, got 3; the nearest that does is [24]"),
        (lambda: SelfAttention(16, num_heads=0), "num_heads must be at least 1, got 0"),
        (lambda: SelfAttention(16, normalization="l1"), "unknown normalization 'l1'"),
        (lambda: SelfAttention(16, normalization="double", causal=True), "cannot be causal"),
        (lambda: SelfAttention(16)(torch.randn(2, 16, 4, 4)), r"flatten\(2\)"),
        (lambda: SelfAttention(16)(torch.randn(2, 4, 16), torch.ones(2, 5, dtype=torch.bool)), "mask must be"),
        (lambda: SimplifiedSelfAttention(16)(torch.ones(2, 4, 16, dtype=torch.int64)), "floating-point"),
    ],
)
def test_errors(build, message):
    with pytest.raises(UserError, match=message):
        build()
