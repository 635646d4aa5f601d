"""oneDNN's products against those that they stand for, gradients included, and where they are taken."""

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.backends.debugging import aot_eager
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from tokenmix.ops import cpu, onednn
from tokenmix.ops import linear as ops
from tokenmix.ops.gating import spatial_projection
from tokenmix.ops.less import Scores, next_scores
from tokenmix.ops.linear import inner_product, linear, linear_into, takes_inner_product, weight_gradient


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def _onednn_is_faster(monkeypatch):
    monkeypatch.setattr(ops, "AVX512", True)
    monkeypatch.setattr(ops, "MKL_IS_FAST", False)
    monkeypatch.setattr(onednn, "_IS_FASTER", True)
    monkeypatch.setattr(onednn, "MKL_IS_HALF", True)


def _inputs(*lead, biased=True):
    """Tokens of 240 features, few more than are needed for oneDNN to be taken, weight and bias."""
    return [torch.randn(*lead, 240), torch.randn(32, 240), *([torch.randn(32)] if biased else [])]


def _layouts():
    """Weights and inputs (150, 240) that lie in memory in other ways."""
    plain, wide = torch.randn(150, 240), torch.randn(300, 480)
    return {
        "plain": plain,
        "transposed": plain.mT.contiguous().mT,
        "rows apart": wide[::2, :240],
        "columns apart": wide[:150, ::2],
        "expanded rows": plain[:1].expand(150, 240),
        "expanded columns": plain[:, :1].expand(150, 240),
        "a row": torch.randn(1, 240),
    }


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("lead", [(1, 150), (3, 150), (2, 3, 70), (200,)])
def test_large_linear_in_float32_with_gradients_equals_float64(lead, biased, monkeypatch):
    _onednn_is_faster(monkeypatch)
    inputs = _inputs(*lead, biased=biased)
    assert takes_inner_product(*inputs[:2])
    _same_as_float64(linear, F.linear, inputs)
    with torch.no_grad():
        out = linear(*inputs)
    assert out.is_contiguous()
    torch.testing.assert_close(out, F.linear(*inputs), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("layout", list(_layouts()))
def test_layouts_of_inputs_and_weights(layout):
    found = _layouts()[layout]
    x, weight, bias = torch.randn(160, 240), torch.randn(150, 240), torch.randn(150)
    for args in ((x, found, None), (found, weight, bias), (found[None], weight, None)):
        expected = F.linear(*(None if arg is None else arg.double() for arg in args))
        torch.testing.assert_close(inner_product(*args).double(), expected, rtol=1e-5, atol=1e-4)


def test_gradients_that_are_not_written_out(monkeypatch):
    _onednn_is_faster(monkeypatch)
    x, weight, bias = (t.requires_grad_() for t in _inputs(2, 150))
    grads = torch.autograd.grad(linear(x, weight, bias).sum(), (x, weight, bias))
    expected = torch.autograd.grad(F.linear(x, weight, bias).sum(), (x, weight, bias))
    for one, other in zip(grads, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("learns", [0, 1, 2])
def test_a_single_input_learns(learns, monkeypatch):
    _onednn_is_faster(monkeypatch)
    inputs = _inputs(2, 150)
    inputs[learns].requires_grad_()
    linear(*inputs).square().sum().backward()
    found = inputs[learns].grad
    inputs[learns].grad = None
    F.linear(*inputs).square().sum().backward()
    assert (found - inputs[learns].grad).abs().max() < 1e-5 * found.abs().max()


@pytest.mark.parametrize("bias", ["apart", "expanded", "one", "none"])
def test_biases_of_another_kind_go_another_way(bias, monkeypatch):
    _onednn_is_faster(monkeypatch)
    x, weight, plain = _inputs(2, 150)
    found = {"apart": torch.randn(32, 2)[:, 0], "expanded": plain[:1].expand(32), "one": plain[:1], "none": plain[0]}[
        bias
    ]
    expected = F.linear(x.double(), weight.double()) + found.double()
    torch.testing.assert_close(linear(x, weight, found).double(), expected, rtol=1e-5, atol=1e-4)
    compiled = torch.compile(linear, backend="aot_eager")
    torch.testing.assert_close(compiled(x, weight, found).double(), expected, rtol=1e-5, atol=1e-4)


def test_shapes_that_do_not_fit_are_refused_as_ever(monkeypatch):
    _onednn_is_faster(monkeypatch)
    x, weight, bias = _inputs(2, 150)
    for args in ((x, weight[:, :200]), (x, weight, bias[:30]), (x, weight, bias.double())):
        with pytest.raises(RuntimeError):
            linear(*args)


def test_a_vector_and_no_features(monkeypatch):
    _onednn_is_faster(monkeypatch)
    x, weight = torch.randn(2**15), torch.randn(3, 2**15)
    torch.testing.assert_close(linear(x, weight).double(), F.linear(x.double(), weight.double()), rtol=1e-5, atol=1e-3)
    x, weight = torch.randn(200, 240, requires_grad=True), torch.randn(0, 240, requires_grad=True)
    to_x, to_weight = torch.autograd.grad(linear(x, weight).sum(), (x, weight))
    assert to_weight.shape == (0, 240)
    assert not to_x.any()


def test_operators_in_place_may_follow(monkeypatch):
    _onednn_is_faster(monkeypatch)
    x, weight, bias = _inputs(2, 150)
    weight.requires_grad_()
    found = torch.autograd.grad(linear(x, weight, bias).relu_().square().sum(), weight)[0]
    expected = torch.autograd.grad(F.linear(x, weight, bias).relu().square().sum(), weight)[0]
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
    with torch.no_grad():
        assert linear(x, weight, bias)._base is None


@pytest.mark.parametrize("dual", [0, 1, 2])
def test_forward_mode_keeps_its_tangents(dual, monkeypatch):
    _onednn_is_faster(monkeypatch)
    inputs = _inputs(2, 150)
    gate = [torch.randn(2, 150, 240), torch.randn(150, 150), torch.randn(150)]
    gate_reference = lambda z, w, b: torch.einsum("ij,bjc->bic", w, z) + b[:, None]  # noqa: E731
    for function, reference, args in ((linear, F.linear, inputs), (spatial_projection, gate_reference, gate)):
        with forward_ad.dual_level():
            args[dual] = forward_ad.make_dual(args[dual], torch.randn_like(args[dual]))
            found, expected = (forward_ad.unpack_dual(f(*args)).tangent for f in (function, reference))
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


def test_forward_mode_over_a_gradient(monkeypatch):
    _onednn_is_faster(monkeypatch)
    x, weight, bias = _inputs(2, 150)
    weight.requires_grad_()
    out, expected = linear(x, weight, bias), F.linear(x, weight, bias)
    with forward_ad.dual_level():
        grad = forward_ad.make_dual(torch.ones_like(out), torch.randn_like(out))
        tangents = [forward_ad.unpack_dual(torch.autograd.grad(o, weight, grad)[0]).tangent for o in (out, expected)]
    torch.testing.assert_close(*tangents, rtol=1e-4, atol=1e-3)


def _calls(function):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        function()
    return [event.name for event in found.events()]


@pytest.mark.skipif(not cpu.AVX512, reason="the CPU has no AVX-512")
def test_what_is_called(monkeypatch):
    _onednn_is_faster(monkeypatch)
    inputs = _inputs(2, 150)
    with torch.no_grad():
        calls = _calls(lambda: linear(*inputs, gelu=True))
        assert calls.count("mkldnn::_linear_pointwise") == 1
        assert not {"aten::gelu", "aten::linear"} & set(calls)
    inputs[1].requires_grad_()
    calls = _calls(lambda: linear(*inputs).sum().backward())
    assert calls.count("mkldnn::_linear_pointwise") == 1
    assert calls.count("aten::mm") == 1
    assert "aten::linear" not in calls
    with torch.backends.mkldnn.flags(enabled=False):
        assert "mkldnn::_linear_pointwise" not in _calls(lambda: linear(*inputs))


@pytest.mark.parametrize(("learns", "kept"), [(0, 1), (1, 0)])
def test_what_is_kept_for_the_backward_pass(learns, kept, monkeypatch):
    _onednn_is_faster(monkeypatch)
    inputs, saved = _inputs(2, 150), []
    inputs[learns].requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        linear(*inputs)
    assert saved == [inputs[kept].shape]


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("least", [1, 2**40])
def test_gradient_of_a_matrix_that_all_share(batch, least, monkeypatch):
    _onednn_is_faster(monkeypatch)
    monkeypatch.setattr(onednn, "LEAST_MACS", least)
    args = torch.randn(150, 150), torch.randn(batch, 150, 240), torch.randn(150)
    reference = lambda a, b, bias: torch.einsum("ij,bjc->bic", a, b) + bias[:, None]  # noqa: E731
    _same_as_float64(onednn.batched_product, reference, args)


def test_second_derivatives(monkeypatch):
    _onednn_is_faster(monkeypatch)

    def second(function, inputs):
        (to_x,) = torch.autograd.grad(function(*inputs).square().sum(), inputs[0], create_graph=True)
        return torch.autograd.grad(to_x.square().sum(), inputs)

    singles = [t.requires_grad_() for t in _inputs(2, 150)]
    doubles = [t.detach().double().requires_grad_() for t in singles]
    for one, other in zip(second(linear, singles), second(F.linear, doubles), strict=True):
        assert (one - other).abs().max() < 1e-5 * other.abs().max()


@pytest.mark.parametrize("n", [10, 150])
def test_gelu_in_the_same_pass(n, monkeypatch):
    _onednn_is_faster(monkeypatch)
    inputs = _inputs(2, n)
    exact = F.gelu(F.linear(*(t.double() for t in inputs)))
    with torch.no_grad():
        torch.testing.assert_close(linear(*inputs, gelu=True).double(), exact, rtol=1e-5, atol=1e-5)
    _same_as_float64(lambda *a: linear(*a, gelu=True), lambda *a: F.gelu(F.linear(*a)), inputs)


@pytest.mark.parametrize(("n", "built_for", "causal"), [(150, 150, False), (145, 150, False), (150, 150, True)])
@pytest.mark.parametrize("toeplitz", [False, True])
def test_large_gate_in_float32_with_gradients_equals_float64(n, built_for, causal, toeplitz, monkeypatch):
    _onednn_is_faster(monkeypatch)
    weight = torch.randn((2 * built_for - 1,) if toeplitz else (built_for, built_for))
    z = torch.randn(2, n, 240)
    halves = z.tensor_split(2, -1)
    for tokens in (z, halves[0], halves[1]):
        args = (tokens, weight, torch.randn(built_for))
        _same_as_float64(lambda *a: spatial_projection(*a, causal=causal), None, args)


@pytest.mark.parametrize("heads", [(), (3,)])
def test_less_attention_s_mixing_by_onednn_equals_float64(heads, monkeypatch):
    _onednn_is_faster(monkeypatch)
    args = [torch.randn(*shape) for shape in ((2, 3, 150, 40), (2, 3, 150, 40), *2 * ((*heads, 150, 150), (150,)))]
    for is_half in (True, False):
        monkeypatch.setattr(onednn, "MKL_IS_HALF", is_half)
        _same_as_float64(lambda q, k, *transform: next_scores(Scores(q, k), *transform).matrix(), None, args)


@pytest.mark.parametrize(
    ("numbers", "tokens", "count", "gains"),
    [
        (3 * 196 * 768, 196, 3, True),
        (8 * 196 * 768, 196, 8, True),
        (2 * 196 * 768, 196, 2, False),
        (16 * 196 * 128, 196, 16, False),
        (784 * 256, 784, 1, True),
        (64 * 49 * 64, 49, 64, False),
    ],
)
def test_where_a_batched_product_gains_on_a_zen_4(numbers, tokens, count, gains, monkeypatch):
    monkeypatch.setattr(onednn, "MKL_IS_HALF", False)
    assert onednn.batches_gain(numbers, tokens, count) is gains
    monkeypatch.setattr(onednn, "MKL_IS_HALF", True)
    assert onednn.batches_gain(numbers, tokens, count)
    assert not onednn.batches_gain(2**15 - 1, tokens, count)


def _same_as_float64(function, reference, inputs):
    singles = [t.detach().clone().requires_grad_() for t in inputs]
    doubles = [t.detach().double().requires_grad_() for t in inputs]
    out, expected = function(*singles), (reference or function)(*doubles)
    weights = torch.randn_like(out)
    (out * weights).sum().backward()
    (expected * weights).sum().backward()
    for a, b in ((out, expected), *zip((t.grad for t in singles), (t.grad for t in doubles))):
        # A relative error of the sums of up to 600 products.
        assert (a - b).abs().max() < 1e-5 * b.abs().max()


@pytest.mark.parametrize("biased", [True, False])
def test_linear_into_memory_that_is_there(biased):
    x, weight, *bias = _inputs(1, 150, biased=biased)
    out = torch.full((1, 150, 64), torch.nan)
    linear_into(out[..., ::2], x, weight, *bias)
    torch.testing.assert_close(out[..., ::2], F.linear(x, weight, *bias), rtol=1e-5, atol=1e-4)
    assert out[..., 1::2].isnan().all()


@pytest.mark.parametrize("small", [0, 2**30])
def test_weight_gradient(small, monkeypatch):
    _onednn_is_faster(monkeypatch)
    monkeypatch.setattr(ops, "_SMALL_WEIGHT", small)
    grad, x = torch.randn(2, 150, 32), torch.randn(2, 150, 240)
    expected = torch.einsum("bne,bnd->ed", grad.double(), x.double())
    torch.testing.assert_close(weight_gradient(grad, x).double(), expected, rtol=1e-5, atol=1e-4)


def test_where_onednn_is_not_taken(monkeypatch):
    _onednn_is_faster(monkeypatch)
    x, weight = torch.randn(2, 150, 240), torch.nn.Parameter(torch.randn(32, 240))
    assert takes_inner_product(x, weight)
    assert not takes_inner_product(x[:, :10], weight)
    assert not takes_inner_product(x.double(), weight.double())
    assert not takes_inner_product(x.bfloat16(), weight.bfloat16())
    assert not takes_inner_product(x.to("meta"), weight.to("meta"))
    assert not takes_inner_product(x, weight.as_subclass(_Sharded))
    with torch.autocast("cpu", torch.bfloat16):
        assert not takes_inner_product(x, weight)
    with forward_ad.dual_level():
        assert not takes_inner_product(forward_ad.make_dual(x, x), weight)
    monkeypatch.setattr(ops, "AVX512", False)
    assert not takes_inner_product(x, weight)


def test_where_mkl_is_fast_few_features_of_large_inputs_alone_are_onednns(monkeypatch):
    monkeypatch.setattr(ops, "AVX512", True)
    monkeypatch.setattr(ops, "MKL_IS_FAST", True)
    assert takes_inner_product(torch.randn(1, 4096, 256), torch.randn(64, 256))
    assert takes_inner_product(torch.randn(2, 8192, 64), torch.randn(128, 64))
    assert not takes_inner_product(torch.randn(1, 4095, 256), torch.randn(64, 256))
    assert not takes_inner_product(torch.randn(1, 4096, 256), torch.randn(256, 256))


def test_multiply_adds_are_counted_and_transforms_work(monkeypatch):
    _onednn_is_faster(monkeypatch)
    x, weight, bias = _inputs(2, 150)
    with FlopCounterMode(display=False) as counter:
        linear(x, weight.requires_grad_(), bias).sum().backward()
    assert counter.get_total_flops() == 2 * 2 * 300 * 240 * 32
    each = torch.func.vmap(lambda row: linear(row, weight, bias))(x)
    torch.testing.assert_close(each, F.linear(x, weight, bias))
    found = torch.func.jvp(lambda row: linear(row, weight, bias), (x,), (x,))[1]
    torch.testing.assert_close(found, F.linear(x, weight))


class _Sharded(torch.Tensor):
    """A weight of a kind that oneDNN may not know."""


class _Layer(torch.nn.Linear):
    def forward(self, input):
        return linear(input, self.weight, self.bias)


def test_an_exported_or_traced_graph_says_linear(monkeypatch):
    _onednn_is_faster(monkeypatch)
    x = torch.randn(2, 150, 240)
    program = torch.export.export(_Layer(240, 32), (x,))
    called = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert called == ["aten.linear.default"]
    graph = torch.jit.trace(_Layer(240, 32), x).graph
    assert [node.kind() for node in graph.nodes() if node.kind().startswith("aten")] == ["aten::linear"]


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("gelu", [True, False])
def test_compiles_in_one_graph_with_gradients(biased, gelu, monkeypatch):
    _onednn_is_faster(monkeypatch)

    def function(*args):
        return linear(*args, gelu=gelu)

    def reference(*args):
        return F.gelu(F.linear(*args)) if gelu else F.linear(*args)

    called = []

    def backend(graph, example):
        called.extend(str(node.target) for node in graph.graph.nodes)
        return aot_eager(graph, example)

    compiled = torch.compile(function, backend=backend, fullgraph=True)
    tensors = _inputs(2, 150, biased=biased)
    _same_as_float64(compiled, reference, tensors)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*tensors), reference(*tensors), rtol=1e-5, atol=1e-4)
    assert sum("tokenmix.linear" in name for name in called) == 2


def test_the_operator_for_compiling_keeps_its_promises():
    inputs = [torch.randn(3, 5, 4, requires_grad=True), torch.randn(6, 4, requires_grad=True), torch.randn(6)]
    torch.library.opcheck(ops._operator, (*inputs, False))
    torch.library.opcheck(ops._operator, (inputs[0].detach(), torch.randn(6, 4), None, True))
    torch.library.opcheck(ops._operator, (inputs[0].transpose(1, 2), torch.randn(6, 5), None, False))
