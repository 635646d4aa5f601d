"""Attention against loops written from the equation, in float64; masks, widths, memory."""

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tokenmix.errors import UserError
from tokenmix.ops.attention import attention, attention_probabilities
from tokenmix.profiling.machine import peak_memory


def loop_map(query, key, normalization, scale, mask=None, causal=False, bias=None):
    """The map entry by entry; a masked token is neither query nor key."""
    batch, heads, n, d = query.shape
    out = torch.zeros(batch, heads, n, n, dtype=torch.float64)
    for b in range(batch):
        kept = [i for i in range(n) if mask is None or mask[b, i]]
        for h in range(heads):
            exps = {}
            for i in kept:
                for j in kept:
                    if not causal or j <= i:
                        score = scale * sum(float(query[b, h, i, c]) * float(key[b, h, j, c]) for c in range(d))
                        exps[i, j] = math.exp(score + (float(bias[b, h, i, j]) if bias is not None else 0.0))
            if normalization == "double":
                columns = {j: sum(exps[i, j] for i in kept) for j in kept}
                exps = {(i, j): e / columns[j] for (i, j), e in exps.items()}
            for (i, j), e in exps.items():
                out[b, h, i, j] = e / sum(v for (row, _), v in exps.items() if row == i)
    return out


def sample(seed=0, batch=2, heads=2, n=5, d=3, dv=4):
    gen = torch.Generator().manual_seed(seed)
    query, key = (torch.randn(batch, heads, n, d, generator=gen, dtype=torch.float64) for _ in range(2))
    value = torch.randn(batch, heads, n, dv, generator=gen, dtype=torch.float64)
    mask = torch.tensor([[True, False, True, True, False], [True] * 5])[:batch, :n]
    return query, key, value, mask


CASES = [("softmax", False), ("softmax", True), ("double", False)]


@pytest.mark.parametrize(("normalization", "causal"), CASES)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_equals_the_loops(normalization, causal, masked, biased):
    query, key, value, mask = sample()
    mask = mask if masked else None
    bias = torch.randn(2, 2, 5, 5, dtype=torch.float64) if biased else None
    options = {"mask": mask, "bias": bias, "causal": causal, "normalization": normalization, "scale": 0.7}
    expected = loop_map(query, key, normalization, 0.7, mask, causal, bias)
    torch.testing.assert_close(attention_probabilities(query, key, **options), expected, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(attention(query, key, value, **options), expected @ value, rtol=1e-12, atol=1e-13)


def test_double_is_the_published_two_steps():
    query, key, _, _ = sample(n=7)
    logits = query @ key.mT / 3**0.5
    columns = logits.softmax(-2)
    two_steps = columns / columns.sum(-1, keepdim=True)
    torch.testing.assert_close(attention_probabilities(query, key, normalization="double"), two_steps)


@pytest.mark.parametrize(("normalization", "causal"), CASES)
def test_gradients(normalization, causal):
    query, key, value, mask = (t.requires_grad_() if t.is_floating_point() else t for t in sample(batch=1, heads=1))

    def fn(q, k, v):
        return attention(q, k, v, mask=mask, causal=causal, normalization=normalization)

    assert torch.autograd.gradcheck(fn, (query, key, value))


@pytest.mark.parametrize(("normalization", "causal"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_sample_without_tokens_is_zero_with_finite_gradients(normalization, causal, dtype):
    tensors = [t.to(dtype).requires_grad_() for t in sample()[:3]]
    mask = torch.tensor([[False] * 5, [True, True, True, False, False]])
    out = attention(*tensors, mask=mask, causal=causal, normalization=normalization)
    out.float().square().sum().backward()
    assert (out[0] == 0).all()
    assert (out[1, :, 3:] == 0).all()
    assert (out[1, :, :3] != 0).any()
    for tensor in tensors:
        assert torch.isfinite(tensor.grad).all()
        assert (tensor.grad[0] == 0).all()


def test_mask_of_other_keys():
    query, _, _, mask = sample()
    key, value = torch.randn(2, 2, 3, 3, dtype=torch.float64), torch.randn(2, 2, 3, 4, dtype=torch.float64)
    key_mask = torch.tensor([[True, False, True], [False] * 3])
    out = attention(query, key, value, mask=mask, key_mask=key_mask)
    kept = key_mask[0]
    expected = attention(query[:1], key[:1, :, kept], value[:1, :, kept])
    torch.testing.assert_close(out[0, :, mask[0]], expected[0, :, mask[0]])
    assert (out[0, :, ~mask[0]] == 0).all()
    assert (out[1] == 0).all()
    assert (attention(query, key, value, key_mask=key_mask)[1] == 0).all()


@settings(max_examples=40, deadline=None)
@given(
    batch=st.integers(1, 3),
    heads=st.integers(1, 3),
    n=st.integers(1, 9),
    d=st.integers(1, 8),
    power=st.floats(-1, 2),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    case=st.sampled_from(CASES),
    seed=st.integers(0, 2**31 - 1),
)
def test_rows_are_shares_at_any_scale(batch, heads, n, d, power, dtype, case, seed):
    gen = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(batch, heads, n, d, generator=gen).to(dtype) for _ in range(3))
    mask = torch.rand(batch, n, generator=gen) > 0.4
    options = {"mask": mask, "normalization": case[0], "causal": case[1], "scale": 10.0**power}
    weights = attention_probabilities(query, key, **options)
    expected = mask[:, None, :].expand(batch, heads, n).double()
    # Each of n shares is rounded once to the type.
    torch.testing.assert_close(weights.double().sum(-1), expected, rtol=0, atol=n * torch.finfo(dtype).eps)
    assert (weights.transpose(-1, -2)[~mask[:, None, :].expand(batch, heads, n)] == 0).all()
    out = attention(query, key, value, **options)
    assert out.dtype == dtype
    # A score is rounded in the type that is computed in, and what it is off by is a share's relative error.
    scores = options["scale"] * (query.double() @ key.double().mT).abs().max().item()
    inside = torch.float64 if dtype == torch.float64 else torch.float32
    allowed = 16 * (torch.finfo(dtype).eps + scores * torch.finfo(inside).eps)
    torch.testing.assert_close(out.double(), weights.double() @ value.double(), rtol=0, atol=allowed)


def test_dropout_drops_and_rescales():
    torch.manual_seed(0)
    query = torch.zeros(1, 1, 64, 8)
    for normalization in ("softmax", "double"):
        out = attention(query, query, torch.eye(64)[None, None], normalization=normalization, dropout=0.5)
        assert set(out.unique().tolist()) == {0.0, 2 / 64}
        assert 0.4 < (out == 0).float().mean() < 0.6


@pytest.mark.parametrize(("query_width", "value_width"), [(66, 64), (16, 64)])
@pytest.mark.parametrize("masked", [False, True])
def test_unequal_widths_never_write_the_map(query_width, value_width, masked):
    n, heads = 1536, 4
    query, key = (torch.randn(1, heads, n, query_width, requires_grad=True) for _ in range(2))
    value = torch.randn(1, heads, n, value_width, requires_grad=True)
    mask = torch.arange(n)[None] < 1500 if masked else None
    bytes_of_map = 4 * heads * n * n

    def run():
        attention(query, key, value, mask=mask).sum().backward()

    fused = peak_memory(run)
    with sdpa_kernel(SDPBackend.MATH):
        unfused = peak_memory(run)
    assert fused < bytes_of_map / 2 < bytes_of_map < unfused


def test_transposed_input_never_writes_the_map():
    n, heads = 1536, 4
    pixels = torch.randn(1, heads, 16, n, requires_grad=True)

    def run():
        attention(pixels.mT, pixels.mT, pixels.mT).sum().backward()

    assert peak_memory(run) < 4 * heads * n * n / 2


def test_padding_the_widths_changes_nothing():
    query, key, value, mask = sample(d=3, dv=8)
    with sdpa_kernel(SDPBackend.MATH):
        unfused = attention(query, key, value, mask=mask)
    torch.testing.assert_close(attention(query, key, value, mask=mask), unfused)
    narrow = attention(value, value, query, mask=mask)
    expected = F.scaled_dot_product_attention(value[1], value[1], query[1])
    torch.testing.assert_close(narrow[1], expected)


def test_errors():
    query, key, value, _ = sample()
    with pytest.raises(UserError, match="cannot be causal"):
        attention(query, key, value, causal=True, normalization="double")
    with pytest.raises(UserError, match=r"unknown normalization 'softmx'; did you mean softmax"):
        attention(query, key, value, normalization="softmx")  # type: ignore[arg-type]


@pytest.mark.parametrize("fast", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["some", "all"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("limits", ["none", "mask", "key mask", "bias"])
def test_derivatives_agree_with_differences(causal: bool, limits: str, fast: bool) -> None:
    """Reverse and forward mode; second derivatives with PyTorch's math backend, since fused kernels have none."""
    query, key, value = (x.requires_grad_() for x in sample()[:3])
    options: dict[str, Any] = {"causal": causal, "scale": 0.7}
    tensors = [query, key, value]
    if limits == "bias":
        tensors.append(torch.randn(2, 1, 5, 5, dtype=torch.float64, requires_grad=True))
    elif limits != "none":
        options["mask"] = torch.tensor([[True, True, False, True, True], [False] * 5])
    if limits == "key mask":
        options["key_mask"] = torch.tensor([[True, False, False, True, True], [True] * 5])

    def run(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
        return attention(query, key, value, bias=bias, **options)

    assert torch.autograd.gradcheck(run, tensors, check_forward_ad=True, fast_mode=fast)
    with sdpa_kernel(SDPBackend.MATH):
        assert torch.autograd.gradgradcheck(run, tensors, fast_mode=fast)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_bias_for_each_batch_has_gradients_under_vmap(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    query, bias = torch.randn(3, 2, 4, 5, 8, dtype=dtype), torch.randn(3, 2, 4, 5, 5, dtype=dtype)
    weight = torch.ones(1, dtype=dtype, requires_grad=True)

    def run(query: Tensor, bias: Tensor) -> Tensor:
        return attention(query, query, query, bias=bias * weight)

    found, wanted = torch.vmap(run)(query, bias), torch.stack([run(*each) for each in zip(query, bias, strict=True)])
    torch.testing.assert_close(found, wanted)
    gradients = [torch.autograd.grad(out.square().sum(), weight)[0] for out in (found, wanted)]
    # A sum of squares over all outputs: its last digits depend on the order of the CPU's additions.
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


def test_what_else_a_kernel_refuses_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(F, "scaled_dot_product_attention", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        attention(*[torch.randn(1, 1, 3, 4)] * 3)


def test_causal_queries_see_no_masked_key() -> None:
    """Keys of their own mask, where a query may have none."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 1, 5, 4, dtype=torch.float64) for _ in range(3))
    keys = torch.tensor([[1, 1, 0, 0, 1], [0, 0, 1, 1, 0]]).bool()
    wanted = torch.zeros(2, 1, 5, 5, dtype=torch.float64)
    for b in range(2):
        for i in range(5):
            if seen := [j for j in range(i + 1) if keys[b, j]]:
                scores = torch.stack([query[b, 0, i] @ key[b, 0, j] / 2 for j in seen])
                wanted[b, 0, i, seen] = scores.softmax(0)
    given: Any = {"causal": True, "key_mask": keys}
    torch.testing.assert_close(attention_probabilities(query, key, **given), wanted)
    torch.testing.assert_close(attention(query, key, value, **given), wanted @ value)
    bias = torch.zeros(1, 1, 5, 5, dtype=torch.float64)
    torch.testing.assert_close(attention(query, key, value, bias=bias, **given), wanted @ value)


def test_causal_attention_needs_a_key_for_each_query() -> None:
    query, key = torch.randn(1, 1, 3, 4), torch.randn(1, 1, 5, 4)
    for run in (lambda **causal: attention(query, key, key, **causal), partial(attention_probabilities, query, key)):
        with pytest.raises(UserError, match="5 keys and 3 queries; use causal=False"):
            run(causal=True)
