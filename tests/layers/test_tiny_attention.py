"""Tiny attention against a plain loop and an independent implementation."""

import copy
import math

import pytest
import torch
from g_mlp_pytorch import g_mlp_pytorch as lucidrains
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.export import Dim
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tokenmix.errors import UserError
from tokenmix.layers.gating import TinyAttention


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def _loop(layer: TinyAttention, x: Tensor, mask: Tensor) -> Tensor:
    """The equation token by token."""
    out = torch.zeros(*x.shape[:2], layer.out_dim, dtype=x.dtype)
    d = layer.attention_dim
    projected = x @ layer.qkv.weight.T + layer.qkv.bias
    for s in range(x.shape[0]):
        for i in range(x.shape[1]):
            seen = [j for j in range(x.shape[1]) if mask[s, j] and not (layer.causal and j > i)]
            if not mask[s, i]:
                continue
            scores = [torch.exp(projected[s, i, :d] @ projected[s, j, d : 2 * d] / math.sqrt(d)) for j in seen]
            mixed = sum(a * projected[s, j, 2 * d :] for a, j in zip(scores, seen)) / sum(scores)
            out[s, i] = layer.proj.weight @ mixed + layer.proj.bias
    return out


@given(data=st.data(), n=st.integers(1, 6), causal=st.booleans(), out_dim=st.sampled_from([None, 3]))
@settings(deadline=None, max_examples=25)
def test_equals_plain_loops(data, n, causal, out_dim):
    layer = TinyAttention(6, out_dim=out_dim, attention_dim=4, causal=causal, dtype=torch.float64)
    x = torch.randn(2, n, 6, dtype=torch.float64)
    mask = torch.tensor(data.draw(st.lists(st.lists(st.booleans(), min_size=n, max_size=n), min_size=2, max_size=2)))
    torch.testing.assert_close(layer(x, mask), _loop(layer, x, mask))
    torch.testing.assert_close(layer(x), _loop(layer, x, torch.ones(2, n, dtype=torch.bool)))


@pytest.mark.parametrize("causal", [False, True])
def test_parity_with_g_mlp_pytorch(causal):
    theirs = lucidrains.Attention(10, 6, 4, causal=causal)
    ours = TinyAttention(10, out_dim=6, attention_dim=4, causal=causal)
    with torch.no_grad():
        ours.qkv.weight.copy_(theirs.to_qkv.weight)
        ours.qkv.bias.zero_()
        ours.proj.load_state_dict(theirs.to_out.state_dict())
    x = torch.randn(2, 7, 10)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_gradients(causal):
    layer = TinyAttention(3, attention_dim=2, causal=causal, dtype=torch.float64)
    mask = torch.tensor([[True, False, True], [False] * 3])
    x = torch.randn(2, 3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: layer(x, mask), x)
    layer(x, mask).square().sum().backward()
    assert all(p.grad.isfinite().all() and p.grad.abs().max() > 0 for p in layer.parameters())


@pytest.mark.parametrize("causal", [False, True])
def test_map_is_what_was_used(causal):
    layer = TinyAttention(6, attention_dim=4, causal=causal)
    x, mask = torch.randn(2, 5, 6), torch.tensor([[True] * 5, [True, True, False, True, False]])
    used = layer.attention_map(x, mask)
    assert used.shape == (2, 1, 5, 5)
    value = layer.qkv(x)[..., 8:]
    out = layer.proj(used[:, 0] @ value).masked_fill(~mask.unsqueeze(-1), 0)
    torch.testing.assert_close(layer(x, mask), out)
    torch.testing.assert_close(used.sum(-1), mask[:, None].float())
    if causal:
        assert torch.equal(used, used.tril())


def test_macs_are_those_of_an_unfused_run():
    layer = TinyAttention(12, out_dim=10, attention_dim=8)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        layer(torch.randn(1, 9, 12))
    assert counter.get_total_flops() == 2 * layer.macs(9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_and_copies(dtype):
    layer, x = TinyAttention(16, attention_dim=8), torch.randn(2, 9, 16)
    half = copy.deepcopy(layer).to(dtype)(x.to(dtype))
    assert half.dtype == dtype
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(half.float(), layer(x), rtol=tolerance, atol=tolerance)


@pytest.mark.slow
def test_compiles_and_exports_with_dynamic_sizes():
    layer = TinyAttention(6, attention_dim=4, causal=True).eval()
    x, mask = torch.randn(2, 5, 6), torch.tensor([[True] * 5, [True, True, False, True, False]])
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, mask), layer(x, mask))
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: Dim("batch"), 1: Dim("tokens", min=2)},)).module()
    long = torch.randn(3, 11, 6)
    torch.testing.assert_close(program(long), layer(long))


def test_widths_must_be_positive():
    with pytest.raises(UserError, match="attention_dim must be at least 1, got 0"):
        TinyAttention(8, attention_dim=0)
