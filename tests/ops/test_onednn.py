"""Products by oneDNN and the attention built on them, against float64, with gradients; and where they are taken."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from tokenmix.cost.memory import peak_memory
from tokenmix.ops import attention_onednn as kernels
from tokenmix.ops import onednn
from tokenmix.ops.attention import attention
from tokenmix.ops.attention_onednn import attention_by_onednn, serves
from tokenmix.ops.onednn import batched_product, onednn_products, product_operator, takes_onednn


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def _setting():
    return torch.backends.mkldnn.matmul.fp32_precision


@pytest.mark.parametrize(("m", "k", "n"), [(196, 64, 196), (196, 196, 66), (1, 300, 17), (40, 2048, 3)])
def test_products_round_as_float32_does(m, k, n):
    a, b = torch.randn(3, m, k), torch.randn(3, k, n)
    with onednn_products():
        found = torch.bmm(a, b)
    exact = torch.bmm(a.double(), b.double())
    # bfloat16 would be off by 2^-9 of the entries' products; float32 by 2^-24, summed over k.
    bound = torch.bmm(a.double().abs(), b.double().abs()) * 2.0**-20
    assert ((found - exact).abs() <= bound).all()


@pytest.mark.parametrize("before", ["none", "ieee"])
def test_the_setting_comes_back(before, monkeypatch):
    monkeypatch.setattr(onednn, "_rounds_as_float32", lambda: True)
    start = _setting()
    torch.backends.mkldnn.matmul.fp32_precision = before
    try:
        asked = torch.get_float32_matmul_precision()
        with pytest.raises(RuntimeError, match="size"), onednn_products(), onednn_products():
            torch.bmm(torch.ones(1, 2, 2), torch.ones(1, 3, 2))
        with onednn_products():
            assert _setting() == "bf16"
        assert _setting() == before
        assert torch.get_float32_matmul_precision() == asked
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = start


def test_the_setting_comes_back_when_threads_overlap(monkeypatch):
    monkeypatch.setattr(onednn, "_rounds_as_float32", lambda: True)
    before, first_is_in, second_is_in, seen = _setting(), threading.Event(), threading.Event(), []

    def first():
        with onednn_products():
            first_is_in.set()
            second_is_in.wait(5)

    thread = threading.Thread(target=first)
    thread.start()
    first_is_in.wait(5)
    with onednn_products():
        second_is_in.set()
        thread.join()
        seen.append(_setting())
    assert seen == ["bf16"]
    assert _setting() == before


def test_nothing_is_set_where_the_rounding_would_be_another(monkeypatch):
    monkeypatch.setattr(onednn, "_rounds_as_float32", lambda: False)
    before = _setting()
    with onednn_products():
        assert _setting() == before != "bf16"


@pytest.mark.parametrize("biased", [False, True])
def test_batched_product_with_gradients(biased):
    a, b, bias = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 3, 4), (2, 4, 5), (3,)))
    inputs = (a, b, bias if biased else None)
    expected = torch.einsum("gmk,gkn->gmn", a, b) + (bias[:, None] if biased else 0)
    for product in (batched_product, product_operator):
        torch.testing.assert_close(product(*inputs), expected, rtol=1e-12, atol=1e-12)
        assert torch.autograd.gradcheck(product, inputs)
        assert torch.autograd.gradgradcheck(product, inputs)
        with torch.no_grad():
            torch.testing.assert_close(product(*inputs), expected, rtol=1e-12, atol=1e-12)
    torch.library.opcheck(product_operator, inputs)


@pytest.mark.parametrize("product", [batched_product, product_operator])
@pytest.mark.parametrize("learns", [0, 1, 2])
def test_batched_product_of_which_one_factor_learns(product, learns):
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in ((2, 3, 4), (2, 4, 5), (3,))]
    inputs[learns].requires_grad_()
    assert torch.autograd.gradcheck(product, inputs)


def _heads(n, d, dv, *, batch=2, heads=3, keys=None, dtype=torch.float32):
    """Query, key and value as a projection leaves them: (B, N, H, d) in memory."""
    shapes = ((n, d), (keys or n, d), (keys or n, dv))
    return [torch.randn(batch, rows, heads, w, dtype=dtype).transpose(1, 2).requires_grad_() for rows, w in shapes]


def _expected(query, key, value, allowed, causal, scale):
    scores = query @ key.mT * scale
    if causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    return (scores if allowed is None else scores.masked_fill(~allowed, -torch.inf)).softmax(-1) @ value


def _allowed(kind, batch, n, keys):
    if kind in ("none", "causal"):
        return None
    shape = {"keys": (batch, 1, 1, keys), "shared": (1, 1, n, keys), "all": (batch, 1, n, keys)}[kind]
    allowed = torch.rand(shape) > 0.3
    allowed[..., 0] = True
    return allowed


@pytest.mark.parametrize("kind", ["none", "causal", "keys", "shared", "all"])
@pytest.mark.parametrize("way", ["written", "written, some heads at a time", "fused"])
@pytest.mark.parametrize("widths", [(10, 8), (6, 8)])
def test_attention_with_gradients_equals_float64(kind, way, widths, monkeypatch):
    monkeypatch.setattr(kernels, "MOST_WRITTEN", 0 if way == "fused" else 2**18)
    monkeypatch.setattr(kernels, "TILE_ENTRIES", 2**20 if way == "written" else 4 * 40 * 40)
    inputs = _heads(40, *widths)
    allowed, causal = _allowed(kind, 2, 40, 40), kind == "causal"
    wide = [x.detach().double().requires_grad_() for x in inputs]
    out, exact = attention_by_onednn(*inputs, allowed, causal, 0.4), _expected(*wide, allowed, causal, 0.4)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
    assert out.transpose(1, 2).is_contiguous()
    with torch.no_grad():
        torch.testing.assert_close(attention_by_onednn(*inputs, allowed, causal, 0.4), out)
    grad = torch.randn(2, 3, 40, widths[1])
    found = torch.autograd.grad(out, inputs, grad)
    for one, other in zip(found, torch.autograd.grad(exact, wide, grad.double()), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lead", [(1, 1), (1, 3), (2, 1), (2, 3)])
@pytest.mark.parametrize("way", ["written", "written, some heads at a time", "fused"])
def test_numbers_that_the_scores_are_added_to(lead, way, monkeypatch):
    monkeypatch.setattr(kernels, "MOST_WRITTEN", 0 if way == "fused" else 2**18)
    monkeypatch.setattr(kernels, "TILE_ENTRIES", 2**20 if way == "written" else 4 * 40 * 40)
    inputs, added = _heads(40, 8, 8), torch.randn(*lead, 40, 40).masked_fill(torch.rand(40, 40) > 0.7, -torch.inf)
    added[..., 0] = 1.0
    wide = [x.detach().double().requires_grad_() for x in inputs]
    out = attention_by_onednn(*inputs, added, False, 0.4)
    exact = ((wide[0] @ wide[1].mT) * 0.4 + added.double()).softmax(-1) @ wide[2]
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
    grad = torch.randn(2, 3, 40, 8)
    twice = torch.autograd.grad(out, inputs, grad, create_graph=True)
    once = torch.autograd.grad(out, inputs, grad, retain_graph=True)
    for found in (once, twice):
        for one, other in zip(found, torch.autograd.grad(exact, wide, grad.double(), retain_graph=True), strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


def test_a_bias_that_learns_is_not_for_it(monkeypatch):
    _take_it(monkeypatch)
    inputs, bias = _heads(150, 8, 8), torch.randn(1, 3, 150, 150)
    assert serves(*inputs, bias)
    bias.requires_grad_()
    assert not serves(*inputs, bias)
    with torch.no_grad():
        assert serves(*inputs, bias)
    (grad,) = torch.autograd.grad(attention(*inputs, bias=bias).sum(), bias)
    assert torch.isfinite(grad).all()


def test_other_numbers_of_keys():
    inputs = _heads(7, 5, 4, keys=9)
    torch.testing.assert_close(
        attention_by_onednn(*inputs, None, False, 1.0), _expected(*inputs, None, False, 1.0), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("causal", [False, True])
def test_derivatives_and_the_operator_s_own_rules(causal):
    inputs = _heads(4, 3, 2, batch=1, heads=2, dtype=torch.float64)

    def fn(*tensors):
        return attention_by_onednn(*tensors, None, causal, 0.7)

    assert torch.autograd.gradcheck(fn, inputs)
    assert torch.autograd.gradgradcheck(fn, inputs)
    allowed = _allowed("all", 1, 4, 4)
    torch.library.opcheck(
        kernels._operator, (*(x.detach().float().requires_grad_() for x in inputs), allowed, False, 0.7)
    )


@pytest.mark.parametrize("most", [0, 2**18])
def test_what_memory_held_before_does_not_matter(most, monkeypatch):
    monkeypatch.setattr(kernels, "MOST_WRITTEN", most)
    inputs = [x.detach() for x in _heads(40, 8, 8)]
    torch.use_deterministic_algorithms(True)  # Fills what is new with NaN.
    try:
        filled = attention_by_onednn(*inputs, None, False, 0.4)
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(filled, _expected(*inputs, None, False, 0.4), rtol=1e-5, atol=1e-5)


def test_many_tokens_never_write_the_map():
    n, heads = 1536, 4
    query, key = (torch.randn(1, heads, n, 66, requires_grad=True) for _ in range(2))
    value = torch.randn(1, heads, n, 64, requires_grad=True)

    def run():
        attention_by_onednn(query, key, value, None, False, 0.1).sum().backward()

    assert peak_memory(run) < 4 * heads * n * n / 2


def _take_it(monkeypatch):
    monkeypatch.setattr(onednn, "_IS_FASTER", True)
    monkeypatch.setattr(kernels, "LEAST_IN_A_HEAD", 0)


def test_where_it_is_taken(monkeypatch):
    _take_it(monkeypatch)
    inputs = _heads(150, 8, 8)
    assert serves(*inputs)
    with sdpa_kernel(SDPBackend.MATH):
        assert not serves(*inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not serves(*inputs)
    assert not serves(*(x.bfloat16() for x in inputs))
    assert not serves(*(x[:, :, :30] for x in inputs))
    assert not takes_onednn(torch.empty(2, device="meta"))
    monkeypatch.setattr(onednn, "_IS_FASTER", False)
    assert not serves(*inputs)


def test_small_heads_stay_with_pytorch_where_its_library_is_not_half_as_fast(monkeypatch):
    _take_it(monkeypatch)
    inputs = _heads(150, 8, 8)
    monkeypatch.setattr(kernels, "LEAST_IN_A_HEAD", 150 * 150)
    assert serves(*inputs)
    assert not serves(inputs[0][:, :, :149], *inputs[1:])


def test_transforms_go_another_way(monkeypatch):
    _take_it(monkeypatch)
    query, key, value = (x.detach() for x in _heads(150, 8, 8))
    many = torch.func.vmap(lambda q: attention(q, key, value))(torch.stack([query, 2 * query]))
    torch.testing.assert_close(many[0], attention(query, key, value), rtol=1e-5, atol=1e-5)
    with forward_ad.dual_level():
        assert takes_onednn(query)
        assert not takes_onednn(forward_ad.make_dual(query, query))


def test_attention_in_float32_is_compiled_as_one_node(monkeypatch):
    _take_it(monkeypatch)
    inputs = _heads(150, 10, 8)

    def fn(query, key, value):
        return attention(query, key, value).transpose(1, 2).flatten(2)

    out = torch.compile(fn, fullgraph=True, backend="aot_eager")(*inputs)
    torch.testing.assert_close(out, fn(*inputs))
    plain = F.scaled_dot_product_attention(*(F.pad(x, (0, 10 - x.shape[-1])) for x in inputs))[..., :8]
    torch.testing.assert_close(out, plain.transpose(1, 2).flatten(2), rtol=1e-5, atol=1e-5)
    for found, expected in zip(
        torch.autograd.grad(out.sin().sum(), inputs), torch.autograd.grad(fn(*inputs).sin().sum(), inputs), strict=True
    ):
        torch.testing.assert_close(found, expected)
