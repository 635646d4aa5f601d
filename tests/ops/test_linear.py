"""The convolutions against the products that they stand for, gradients included, and where they are taken."""

import pytest
import torch
import torch.nn.functional as F

from tokenmix.ops import linear as ops
from tokenmix.ops.gating import spatial_projection
from tokenmix.ops.linear import convolves, convolves_tokens, features_by_convolution, linear, tokens_by_convolution


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def _onednn_is_faster(monkeypatch):
    monkeypatch.setattr(ops, "AVX512", True)
    monkeypatch.setattr(ops, "MKL_IS_FAST", False)


def _double(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("bias", [True, False])
def test_features_by_convolution(bias):
    inputs = [_double(2, 5, 4), _double(3, 4), *([_double(3)] if bias else [])]
    out = features_by_convolution(*inputs)
    expected = torch.einsum("bnd,ed->bne", *inputs[:2]) + (inputs[2] if bias else 0)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    assert out.is_contiguous()
    assert torch.autograd.gradcheck(features_by_convolution, inputs)


def test_features_by_convolution_of_tokens_in_another_layout():
    x, weight = torch.randn(2, 4, 5).transpose(1, 2), torch.randn(3, 4)
    torch.testing.assert_close(features_by_convolution(x, weight), F.linear(x, weight))


def test_tokens_by_convolution():
    x, weight, bias = _double(2, 5, 3), _double(5, 5), _double(5)
    expected = torch.einsum("ij,bjc->bic", weight, x) + bias[:, None]
    torch.testing.assert_close(tokens_by_convolution(x, weight, bias), expected, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(tokens_by_convolution, (x, weight, bias))


@pytest.mark.parametrize("size", [1, 3])
def test_large_linear_in_float32_with_gradients_equals_float64(size, monkeypatch):
    _onednn_is_faster(monkeypatch)
    x, weight, bias = torch.randn(size, 150, 240), torch.randn(32, 240), torch.randn(32)
    assert convolves(x, weight)
    _same_as_float64(linear, F.linear, (x, weight, bias))


@pytest.mark.parametrize(("n", "built_for", "causal"), [(150, 150, False), (145, 150, False), (150, 150, True)])
@pytest.mark.parametrize("toeplitz", [False, True])
def test_large_gate_in_float32_with_gradients_equals_float64(n, built_for, causal, toeplitz, monkeypatch):
    _onednn_is_faster(monkeypatch)
    weight = torch.randn((2 * built_for - 1,) if toeplitz else (built_for, built_for))
    z = torch.randn(2, n, 240)
    assert convolves_tokens(z, weight)
    half = z.tensor_split(2, -1)[0]
    for tokens in (z, half):
        args = (tokens, weight, torch.randn(built_for))
        _same_as_float64(lambda *a: spatial_projection(*a, causal=causal), None, args)


def _same_as_float64(function, reference, inputs):
    singles = [t.detach().clone().requires_grad_() for t in inputs]
    doubles = [t.detach().double().requires_grad_() for t in inputs]
    out, expected = function(*singles), (reference or function)(*doubles)
    weights = torch.randn_like(out)
    (out * weights).sum().backward()
    (expected * weights).sum().backward()
    for a, b in ((out, expected), *zip((t.grad for t in singles), (t.grad for t in doubles))):
        # A relative error of the sums of up to 300 products.
        assert (a - b).abs().max() < 1e-5 * b.abs().max()


def test_where_the_convolution_is_not_taken(monkeypatch):
    _onednn_is_faster(monkeypatch)
    x, weight = torch.randn(2, 150, 240), torch.nn.Parameter(torch.randn(32, 240))
    assert convolves(x, weight)
    assert not convolves(x[:, :10], weight)
    assert not convolves(x.double(), weight.double())
    assert not convolves(x.bfloat16(), weight.bfloat16())
    assert not convolves(x.to("meta"), weight.to("meta"))
    assert not convolves(x, weight.as_subclass(_Sharded))
    with torch.autocast("cpu", torch.bfloat16):
        assert not convolves(x, weight)
    monkeypatch.setattr(ops, "AVX512", False)
    assert not convolves(x, weight)


def test_where_mkl_is_fast_few_features_of_large_inputs_alone_are_convolved(monkeypatch):
    monkeypatch.setattr(ops, "AVX512", True)
    monkeypatch.setattr(ops, "MKL_IS_FAST", True)
    assert convolves(torch.randn(1, 4096, 256), torch.randn(64, 256))
    assert convolves(torch.randn(2, 8192, 64), torch.randn(128, 64))
    assert not convolves(torch.randn(1, 4095, 256), torch.randn(64, 256))
    assert not convolves(torch.randn(1, 4096, 256), torch.randn(256, 256))
    assert not convolves_tokens(torch.randn(16, 256, 256), torch.randn(256, 256))


class _Sharded(torch.Tensor):
    """A weight of a kind that a convolution may not know."""


def test_an_exported_graph_says_linear(monkeypatch):
    _onednn_is_faster(monkeypatch)

    class Layer(torch.nn.Linear):
        def forward(self, input):
            return linear(input, self.weight, self.bias)

    program = torch.export.export(Layer(240, 32), (torch.randn(2, 150, 240),))
    called = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert called == ["aten.linear.default"]


@pytest.mark.parametrize("bias", [True, False])
def test_compiles_in_one_graph_with_gradients(bias, monkeypatch):
    _onednn_is_faster(monkeypatch)
    compiled = torch.compile(linear, backend="aot_eager", fullgraph=True)
    tensors = [torch.randn(2, 150, 240), torch.randn(32, 240), *([torch.randn(32)] if bias else [])]
    _same_as_float64(compiled, F.linear, tensors)


def test_the_operator_for_compiling_keeps_its_promises():
    inputs = [torch.randn(3, 5, 4, requires_grad=True), torch.randn(6, 4, requires_grad=True), torch.randn(6)]
    torch.library.opcheck(ops._compiled_features, tuple(inputs))
    torch.library.opcheck(ops._compiled_features, (inputs[0].transpose(1, 2), torch.randn(6, 5), None))
