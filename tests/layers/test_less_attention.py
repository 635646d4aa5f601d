"""Less-attention as a layer: chains of layers, masks, cost, memory, what it refuses."""

import copy

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tokenmix.errors import UserError
from tokenmix.layers.less_attention import AttentionResidual, LessAttention
from tokenmix.layers.self_attention import SelfAttention
from tokenmix.ops.less import Scores
from tokenmix.ops.resize import resize_score_transform
from tokenmix.profiling.machine import peak_memory

OPTIONS = [{"mode": mode, "share_heads": shared} for mode in ("factored", "dense") for shared in (True, False)]
APART = [OPTIONS[0], OPTIONS[3]]


def less(dim=16, num_tokens=6, num_heads=4, **kwargs):
    """A layer whose transform has left the identity."""
    layer = LessAttention(dim, num_tokens, num_heads=num_heads, **kwargs)
    with torch.no_grad():
        for weight in (layer.theta, layer.psi, layer.theta_bias, layer.psi_bias):
            weight.add_(torch.randn_like(weight) / num_tokens**0.5)
    return layer


def stack(num_layers, mode, share_heads):
    torch.manual_seed(0)
    first = SelfAttention(16, num_heads=4)
    rest = [less(scores_from="previous", mode=mode, share_heads=share_heads) for _ in range(num_layers)]
    return torch.nn.ModuleList([first, *rest]).double()


def run(layers, x, mask=None, residual=None):
    out, scores = layers[0].mix(x, None, mask, residual=residual)
    x = x + out
    for layer in layers[1:]:
        out, scores = layer.mix(x, scores, mask)
        x = x + out
    return x


@pytest.mark.parametrize("share_heads", [True, False])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("with_residual", [False, True])
def test_a_chain_of_layers_factored_and_dense_agree_with_gradients(share_heads, masked, with_residual):
    results = []
    for mode in ("factored", "dense"):
        layers = stack(3, mode, share_heads)
        x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(1)).double().requires_grad_()
        mask = torch.tensor([[True, True, False, True, True, False], [True] * 6]) if masked else None
        residual = None
        leaves = [x, *layers.parameters()]
        if with_residual:
            torch.manual_seed(2)
            bridge = AttentionResidual(2, 4, init_scale=1.0).double()
            before = SelfAttention(16, num_heads=2).double().mix(torch.randn(2, 24, 16).double())[1]
            residual = bridge(before, (4, 6))
            leaves += list(bridge.parameters())
        out = run(layers, x, mask, residual)
        results.append((out, *torch.autograd.grad((out * out.sin()).sum(), leaves)))
    for factored, dense in zip(*results, strict=True):
        torch.testing.assert_close(factored, dense, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("options", OPTIONS)
def test_own_scores_by_hand(options):
    torch.manual_seed(0)
    layer, x = less(**options).double(), torch.randn(2, 6, 16).double()
    query, key = layer.qk(x).view(2, 6, 2, 4, 4).permute(2, 0, 3, 1, 4)
    scores = query @ key.mT / 2
    theta = scores @ layer.theta.mT + layer.theta_bias.unsqueeze(-2)
    scores = (theta.mT @ layer.psi.mT + layer.psi_bias.unsqueeze(-2)).mT
    weights = scores.softmax(-1)
    value = layer.v(x).view(2, 6, 4, 4).transpose(1, 2)
    torch.testing.assert_close(layer.attention_map(x), weights)
    torch.testing.assert_close(layer(x), layer.proj((weights @ value).transpose(1, 2).flatten(2)))
    handed_on = layer.mix(x)[1]
    assert handed_on is not None
    torch.testing.assert_close(handed_on.matrix(), scores)


def test_starts_by_handing_on_the_scores_of_the_layer_before():
    first, x = SelfAttention(16, num_heads=4), torch.randn(2, 5, 16)
    layer = LessAttention(16, 6, num_heads=4, scores_from="previous")
    scores = first.mix(x)[1]
    torch.testing.assert_close(layer.mix_map(x, scores), first.attention_map(x))
    torch.testing.assert_close(layer.mix(x, scores)[1].matrix(), scores.matrix())


@pytest.mark.parametrize("options", OPTIONS)
def test_fewer_tokens_use_the_leading_block(options):
    large, x = less(num_tokens=8, **options), torch.randn(2, 5, 16)
    small = less(num_tokens=5, **options)
    state = large.state_dict()
    for name in ("theta", "psi"):
        state[name] = state[name][..., :5, :5]
        state[f"{name}_bias"] = state[f"{name}_bias"][..., :5]
    small.load_state_dict(state)
    torch.testing.assert_close(large(x), small(x))


@pytest.mark.parametrize("options", OPTIONS)
def test_mask_is_as_if_cropped_and_padding_may_hold_anything(options):
    layer, x = less(**options), torch.randn(2, 6, 16)
    mask = torch.arange(6) < torch.tensor([[6], [4]])
    x[1, 4:] = torch.nan
    out = layer(x, mask)
    torch.testing.assert_close(out[1:, :4], layer(x[1:, :4]))
    torch.testing.assert_close(out[:1], layer(x[:1]))
    assert (out[1, 4:] == 0).all()
    out.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in layer.parameters())


@pytest.mark.parametrize("options", OPTIONS)
def test_a_row_without_tokens_is_zero(options):
    layer, x = less(**options), torch.randn(2, 6, 16, requires_grad=True)
    mask = torch.tensor([[False] * 6, [True] * 6])
    out = layer(x, mask)
    out.square().sum().backward()
    assert (out[0] == 0).all()
    assert (layer.attention_map(x, mask)[0] == 0).all()
    assert (x.grad[0] == 0).all()
    assert all(torch.isfinite(p.grad).all() for p in (x, *layer.parameters()))


@pytest.mark.parametrize("scores_from", ["own", "previous"])
@pytest.mark.parametrize("options", OPTIONS)
def test_every_parameter_learns(scores_from, options):
    layer, x = LessAttention(16, 6, num_heads=4, scores_from=scores_from, **options), torch.randn(2, 6, 16)
    layer.mix(x, SelfAttention(16, num_heads=4).mix(x)[1])[0].square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in layer.parameters())


def test_parameter_counts():
    def count(**kwargs):
        return sum(p.numel() for p in LessAttention(16, 6, num_heads=4, **kwargs).parameters())

    linear = 16 * 16 + 16
    assert count() == 4 * linear + 2 * (36 + 6)
    assert count(scores_from="previous") == 2 * linear + 2 * (36 + 6)
    assert count(share_heads=False) == 4 * linear + 4 * 2 * (36 + 6)
    assert count(qkv_bias=False) == 4 * linear + 2 * (36 + 6) - 3 * 16


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("scores_from", ["own", "previous"])
def test_counted_macs(options, scores_from):
    layer, x = less(scores_from=scores_from, **options), torch.randn(2, 6, 16)
    scores = SelfAttention(16, num_heads=4).mix(x)[1]
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        layer.mix(x, scores)
    counted = counter.get_total_flops() // 2 // 2
    # In dense mode the product that writes the scores down belongs to anyone who needs them dense.
    assert counted == layer.macs(6)


def test_a_chain_of_layers_makes_no_map():
    n, dim = 768, 32
    first = SelfAttention(dim, num_heads=4)
    rest = [LessAttention(dim, n, num_heads=4, scores_from="previous") for _ in range(3)]
    for parameter in (p for layer in rest for p in layer.parameters()):
        parameter.grad = torch.zeros_like(parameter)
    x = torch.randn(4, n, dim)
    peak = peak_memory(lambda: run([first, *rest], x).sum().backward())
    assert peak < 4 * 4 * 4 * n * n  # one map of a batch of 4, 4 heads, 4 bytes


@pytest.mark.one_fast
@pytest.mark.parametrize("options", APART)
def test_exports_with_any_length_up_to_its_own(options):
    layer = less(num_tokens=12, **options).eval()
    length = torch.export.Dim("length", min=2, max=12)
    x, mask = torch.randn(2, 6, 16), torch.rand(2, 6) > 0.3
    program = torch.export.export(layer, (x, mask), dynamic_shapes=({1: length}, {1: length})).module()
    for n in (5, 12):
        x, mask = torch.randn(2, n, 16), torch.rand(2, n) > 0.3
        torch.testing.assert_close(program(x, mask), layer(x, mask))


@pytest.mark.parametrize("options", OPTIONS)
def test_survives_copy_and_types(options):
    torch.manual_seed(0)
    layer, x = less(**options), torch.randn(2, 6, 16)
    out = layer(x)
    torch.testing.assert_close(copy.deepcopy(layer)(x), out)
    for dtype, tolerance in ((torch.float16, 2e-2), (torch.bfloat16, 1e-1), (torch.float64, 1e-5)):
        other = copy.deepcopy(layer).to(dtype)(x.to(dtype))
        assert other.dtype == dtype
        torch.testing.assert_close(other.float(), out, rtol=tolerance, atol=tolerance)
    with torch.autocast("cpu", torch.bfloat16):
        result = layer(x)
    torch.testing.assert_close(result.float(), out, rtol=1e-1, atol=1e-1)


def test_dropouts_act_in_training_only():
    x = torch.randn(2, 6, 16)
    for option in ("dropout", "attention_dropout"):
        layer = less(**{option: 0.5})
        assert not torch.equal(layer(x), layer(x))
        layer.eval()
        assert torch.equal(layer(x), layer(x))


def test_residual_bridges_stages_of_any_heads():
    bridge, x = AttentionResidual(2, 4), torch.randn(3, 35, 16)
    scores = SelfAttention(16, num_heads=2).mix(x)[1]
    residual = bridge(scores, (5, 7))
    assert residual.shape == (3, 4, 12, 12)
    torch.testing.assert_close(bridge(scores.matrix(), (5, 7)), residual)
    next_stage = SelfAttention(16, num_heads=4)
    out, carried = next_stage.mix(torch.randn(3, 12, 16), residual=residual)
    out.square().sum().backward()
    assert carried.dense is residual
    assert all(p.grad.abs().max() > 0 for p in bridge.parameters() if p is not bridge.norm_bias)
    with pytest.raises(UserError, match=r"built for scores \(B, 2, N, ...\), got \(3, 4, 12, 4\)"):
        bridge(carried, (3, 4))


def test_residual_macs():
    bridge, x = AttentionResidual(2, 4), torch.randn(3, 35, 16)
    scores = SelfAttention(16, num_heads=2).mix(x)[1]
    with FlopCounterMode(display=False) as counter:
        bridge(scores, (5, 7))
    assert counter.get_total_flops() // 2 // 3 == bridge.macs((5, 7), 8)


def test_resized_transform_serves_a_larger_input():
    layer, x = less(num_tokens=6), torch.randn(2, 24, 16)
    with pytest.raises(UserError, match=r"built for 6 tokens and got 24.*resize_score_transform"):
        layer(x)
    state = layer.state_dict()
    for name in ("theta", "psi"):
        weight, bias = state[name], state[f"{name}_bias"]
        state[name], state[f"{name}_bias"] = resize_score_transform(weight, bias, (2, 3), (4, 6))
    larger = LessAttention(16, 24, num_heads=4)
    larger.load_state_dict(state)
    assert larger(x).shape == x.shape


def test_scores_from_previous_needs_scores_that_fit():
    layer, x = LessAttention(16, 6, num_heads=4, scores_from="previous"), torch.randn(2, 6, 16)
    for call in (layer, layer.attention_map):
        with pytest.raises(UserError, match=r"call mix\(x, carry\)"):
            call(x)
    with pytest.raises(UserError, match="same num_heads"):
        layer.mix(x, SelfAttention(16, num_heads=2).mix(x)[1])
    with pytest.raises(UserError, match="AttentionResidual"):
        layer.mix(x, Scores(torch.randn(2, 4, 5, 4), torch.randn(2, 4, 5, 4)))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: LessAttention(16, 6, num_heads=3), "must divide dim 16, got 3"),
        (lambda: LessAttention(16, 0), "num_tokens must be at least 1, got 0"),
        (lambda: LessAttention(16, 6, mode="factor"), "did you mean factored"),
        (lambda: LessAttention(16, 6, scores_from="prev"), "did you mean previous"),
        (lambda: AttentionResidual(0, 2), "num_heads_in must be at least 1, got 0"),
    ],
)
def test_errors(build, message):
    with pytest.raises(UserError, match=message):
        build()


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_traced_with_a_mask_for_one_sample_it_takes_more():
    layer = LessAttention(8, 6, num_heads=2).eval()
    x, mask = torch.randn(3, 6, 8), torch.rand(3, 6) < 0.7
    traced = torch.jit.trace(layer, (x[:1], mask[:1]), check_trace=False)
    torch.testing.assert_close(traced(x, mask), layer(x, mask))
