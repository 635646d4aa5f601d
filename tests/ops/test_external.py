"""External attention against loops, whole and in chunks, with what the chunks save."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import forward_ad, gradcheck

from tokenmix.errors import UserError
from tokenmix.ops.external import external_attention, external_attention_map
from tokenmix.profiling.machine import peak_memory

FORMS = (("double", 1), ("double", 2), ("double", 3), ("softmax", 1))
VARIANTS = (("sigmoid", 1), ("sigmoid", 2), ("l2", 1), ("l2", 3), ("entmax15", 1))
MASK = torch.tensor([[1, 0, 1, 1, 0, 1, 1], [0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1, 1]]).bool()


def entmax_by_bisection(logits: list[float]) -> list[float]:
    """max(a / 2 - tau, 0)^2 with the tau for which they sum to 1."""
    low, high = max(logits) / 2 - 1, max(logits) / 2
    for _ in range(100):
        tau = (low + high) / 2
        total = sum(max(a / 2 - tau, 0.0) ** 2 for a in logits)
        low, high = (tau, high) if total > 1 else (low, tau)
    return [max(a / 2 - tau, 0.0) ** 2 for a in logits]


def loop_oracle(
    query: Tensor,
    key_memory: Tensor,
    value_memory: Tensor,
    key_bias: Tensor,
    value_bias: Tensor,
    mask: Tensor,
    normalization: str,
    num_steps: int,
) -> Tensor:
    """(B, H, N, d_v), one token and one slot after the other, from the two published divisions."""
    query, key_memory, value_memory = query.detach(), key_memory.detach(), value_memory.detach()
    out = torch.zeros(*query.shape[:-1], value_memory.shape[1], dtype=torch.float64)
    for b, h in itertools.product(range(query.shape[0]), range(query.shape[1])):
        taking = [i for i in range(query.shape[2]) if mask[b, i]]
        share: dict[int, list[float]] = {}
        for i in taking:
            share[i] = []
            for key, bias in zip(key_memory, key_bias.detach()):
                product = query[b, h, i] @ key
                if normalization == "l2":
                    product = len(key) ** 0.5 * product / (query[b, h, i].norm() * key.norm())
                grown = torch.sigmoid if normalization == "sigmoid" else torch.exp
                share[i].append(float(grown(product + bias)))
        for _ in range(num_steps):
            if normalization != "softmax":
                columns = [sum(share[i][j] for i in taking) for j in range(len(key_memory))]
                share = {i: [s / c for s, c in zip(share[i], columns)] for i in taking}
            if normalization == "entmax15":
                share = {i: entmax_by_bisection([math.log(s) for s in share[i]]) for i in taking}
            share = {i: [s / sum(share[i]) for s in share[i]] for i in taking}
        for i in taking:
            out[b, h, i] = sum(s * value for s, value in zip(share[i], value_memory)) + value_bias
    return out


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def problem(
    *shape: int, slots: int = 5, width: int = 4, dtype: torch.dtype = torch.float64, seed: int = 0
) -> dict[str, Any]:
    """query (*shape), both memories and both biases, all wanting gradients."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "query": shape,
        "key_memory": (slots, shape[-1]),
        "value_memory": (slots, width),
        "key_bias": (slots,),
        "value_bias": (width,),
    }
    drawn = {name: torch.randn(s, dtype=torch.float64, generator=generator).to(dtype) for name, s in shapes.items()}
    return {name: tensor.requires_grad_() for name, tensor in drawn.items()}


def grads(out: Tensor, inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
    weights = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return torch.autograd.grad((out * weights).sum(), list(inputs.values()))


@pytest.mark.parametrize("chunk_size", [None, 1, 3])
@pytest.mark.parametrize(("normalization", "num_steps"), FORMS)
def test_equals_loops(normalization: Any, num_steps: int, chunk_size: int | None) -> None:
    inputs = problem(3, 2, 7, 3)
    expected = loop_oracle(**inputs, mask=MASK, normalization=normalization, num_steps=num_steps)
    actual = external_attention(
        **inputs, mask=MASK, normalization=normalization, num_steps=num_steps, chunk_size=chunk_size
    )
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 11), st.integers(1, 5)),
    slots=st.integers(1, 6),
    chunk_size=st.integers(1, 13),
    form=st.sampled_from(FORMS),
    scale=st.sampled_from([0.1, 1.0, 10.0, 100.0]),
    seed=st.integers(0, 2**31),
)
def test_chunks_change_nothing(
    shape: tuple[int, ...], slots: int, chunk_size: int, form: tuple[Any, int], scale: float, seed: int
) -> None:
    inputs = problem(*shape, slots=slots, seed=seed)
    inputs["key_memory"] = (inputs["key_memory"].detach() * scale).requires_grad_()
    mask = torch.rand(shape[0], shape[2], generator=torch.Generator().manual_seed(seed)) > 0.3
    options: dict[str, Any] = {"mask": mask, "normalization": form[0], "num_steps": form[1]}
    whole = external_attention(**inputs, **options)
    chunked = external_attention(**inputs, **options, chunk_size=chunk_size)
    torch.testing.assert_close(chunked, whole, rtol=1e-9, atol=1e-10)
    for ours, reference in zip(grads(chunked, inputs), grads(whole, inputs)):
        torch.testing.assert_close(ours, reference, rtol=1e-8, atol=1e-9 * max(scale, 1.0))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("mask", [None, MASK])
@pytest.mark.parametrize(("normalization", "num_steps"), FORMS)
def test_gradients_of_the_chunked_path(normalization: Any, num_steps: int, mask: Tensor | None, biased: bool) -> None:
    inputs = problem(3, 1, 7, 2, slots=3, width=2)
    names = list(inputs) if biased else ["query", "key_memory", "value_memory"]

    def run(*values: Tensor) -> Tensor:
        given: dict[str, Any] = dict(zip(names, values))
        return external_attention(**given, mask=mask, normalization=normalization, num_steps=num_steps, chunk_size=3)

    assert gradcheck(run, [inputs[name] for name in names], fast_mode=True)


def test_gradients_of_one_memory_used_for_both() -> None:
    query, memory = (problem(2, 1, 5, 3)[name] for name in ("query", "key_memory"))
    assert gradcheck(lambda q, m: external_attention(q, m, m, chunk_size=2), (query, memory))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk_size", [None, 16])
def test_half_types_are_as_good_as_the_type(dtype: torch.dtype, chunk_size: int | None) -> None:
    inputs = problem(2, 2, 50, 8, dtype=dtype)
    exact_inputs = {name: tensor.detach().double().requires_grad_() for name, tensor in inputs.items()}
    out = external_attention(**inputs, chunk_size=chunk_size)
    exact = external_attention(**exact_inputs)
    assert out.dtype == dtype
    eps = torch.finfo(dtype).eps
    assert (out - exact).abs().max() < 16 * eps * exact.abs().max()
    named = zip(inputs, grads(out, inputs), grads(exact, exact_inputs))
    for name, ours, reference in named:
        if name == "key_bias":  # 0 in exact arithmetic
            assert ours.abs().max() < 64 * eps
        else:
            assert (ours - reference).abs().max() < 32 * eps * reference.abs().max()


@pytest.mark.parametrize("shape", [(7, 3), (2, 7, 3), (2, 2, 2, 7, 3)])
def test_any_leading_axes(shape: tuple[int, ...]) -> None:
    inputs = problem(*shape)
    whole, chunked = external_attention(**inputs), external_attention(**inputs, chunk_size=3)
    assert whole.shape == (*shape[:-1], 4)
    torch.testing.assert_close(chunked, whole)
    flat = external_attention(**{**inputs, "query": inputs["query"].reshape(-1, 1, 7, 3)})
    torch.testing.assert_close(whole.reshape(flat.shape), flat)


@pytest.mark.parametrize("chunk_size", [None, 4])
def test_heads_that_are_views_and_masks_of_full_rank(chunk_size: int | None) -> None:
    inputs = problem(3, 7, 2, 3)
    inputs["query"] = inputs["query"].transpose(1, 2)
    out = external_attention(**inputs, mask=MASK, chunk_size=chunk_size)
    full = MASK[:, None].expand(3, 2, 7)
    dense = external_attention(**{**inputs, "query": inputs["query"].contiguous()}, mask=full, chunk_size=chunk_size)
    torch.testing.assert_close(out, dense)


@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize(("normalization", "num_steps"), FORMS)
def test_a_sample_without_tokens(normalization: Any, num_steps: int, chunk_size: int | None) -> None:
    inputs = problem(3, 2, 7, 3, dtype=torch.float32)
    out = external_attention(
        **inputs, mask=MASK, normalization=normalization, num_steps=num_steps, chunk_size=chunk_size
    )
    assert (out[1] == 0).all()
    assert (out.transpose(1, 2)[~MASK] == 0).all()
    gradients = grads(out, inputs)
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert (gradients[0].transpose(1, 2)[~MASK] == 0).all()


def test_the_key_bias_cancels_under_double_normalisation_only() -> None:
    inputs = problem(2, 2, 7, 3)
    unbiased = {**inputs, "key_bias": None}
    torch.testing.assert_close(external_attention(**inputs), external_attention(**unbiased))
    gradient = grads(external_attention(**inputs), inputs)[3]
    assert gradient.abs().max() < 1e-14
    softmax = external_attention(**inputs, normalization="softmax")
    assert (softmax - external_attention(**unbiased, normalization="softmax")).abs().max() > 1e-2
    assert grads(softmax, inputs)[3].abs().max() > 1e-3


@pytest.mark.parametrize(("normalization", "num_steps"), VARIANTS)
def test_variants_of_the_double_normalisation_equal_loops(normalization: Any, num_steps: int) -> None:
    inputs = problem(3, 2, 7, 3)
    options: dict[str, Any] = {"mask": MASK, "normalization": normalization, "num_steps": num_steps}
    expected = loop_oracle(**inputs, **options)
    torch.testing.assert_close(external_attention(**inputs, **options), expected, rtol=1e-5, atol=1e-5)
    shares = external_attention_map(inputs["query"], inputs["key_memory"], mask=MASK, normalization=normalization)
    torch.testing.assert_close(shares.sum(-1), MASK[:, None].expand(3, 2, 7).double())
    if normalization == "entmax15":
        assert 0.1 < (shares[MASK[:, None].expand(3, 2, 7)] == 0).double().mean() < 0.9
    assert gradcheck(lambda *given: external_attention(*given, **options), tuple(inputs.values())[:3])


@pytest.mark.parametrize("backend", ["eager", "tiled", "sdpa"])
def test_cosines_take_every_backend(backend: Any) -> None:
    inputs = problem(2, 2, 7, 3)
    expected = external_attention(**inputs, normalization="l2")
    torch.testing.assert_close(external_attention(**inputs, normalization="l2", backend=backend), expected)
    torch.testing.assert_close(external_attention(**inputs, normalization="l2", chunk_size=2), expected)
    larger = {**inputs, "query": 5 * inputs["query"]}
    torch.testing.assert_close(external_attention(**larger, normalization="l2"), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("normalization", "num_steps"), FORMS)
def test_the_map_is_the_one_that_was_used(normalization: Any, num_steps: int) -> None:
    inputs = problem(3, 2, 7, 3)
    options: dict[str, Any] = {"mask": MASK, "normalization": normalization, "num_steps": num_steps}
    shares = external_attention_map(inputs["query"], inputs["key_memory"], key_bias=inputs["key_bias"], **options)
    assert shares.shape == (3, 2, 7, 5)
    out = external_attention(**{**inputs, "value_bias": None}, **options)
    torch.testing.assert_close(shares @ inputs["value_memory"], out)


def test_plain_softmax_mixes_no_tokens_and_the_others_do() -> None:
    inputs = problem(1, 1, 6, 3)
    other = {**inputs, "query": inputs["query"].detach().clone()}
    other["query"][..., -1, :] += 3.0
    mixing = (("softmax", False), ("double", True), ("sigmoid", True), ("l2", True), ("entmax15", True))
    for normalization, moves in mixing:
        before, after = (external_attention(**i, normalization=normalization)[0, 0, 0] for i in (inputs, other))
        assert ((after - before).abs().max() > 1e-3).item() is moves


def working_memory(num_tokens: int, chunk_size: int | None, num_steps: int = 1) -> tuple[int, int]:
    """Bytes of forward, and of forward and backward, beyond inputs, outputs and their gradients."""
    inputs = problem(1, 2, num_tokens, 8, slots=32, width=8, dtype=torch.float32)
    query = inputs["query"]
    one = query.numel() * query.element_size()
    upstream = torch.ones_like(query)

    def forward() -> None:
        with torch.no_grad():
            external_attention(**inputs, chunk_size=chunk_size, num_steps=num_steps)

    def both() -> None:
        out = external_attention(**inputs, chunk_size=chunk_size, num_steps=num_steps)
        torch.autograd.grad(out, list(inputs.values()), upstream)

    both()
    return peak_memory(forward) - one, peak_memory(both) - 2 * one


@pytest.mark.parametrize("num_steps", [1, 2])
def test_working_memory_of_chunks_does_not_grow_with_the_tokens(num_steps: int) -> None:
    few, many = (working_memory(n, 64, num_steps) for n in (512, 8192))
    assert few[0] > 0
    assert many[0] <= 1.05 * few[0]
    assert many[1] <= 1.05 * few[1]
    whole = working_memory(8192, None, num_steps)
    assert whole[0] > 8 * many[0]
    assert whole[1] > 8 * many[1]


def test_autocast_reaches_both_paths() -> None:
    inputs = problem(2, 2, 9, 4, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        whole, chunked = external_attention(**inputs), external_attention(**inputs, chunk_size=4)
    assert whole.dtype == chunked.dtype == torch.bfloat16
    exact = external_attention(**inputs)
    for out in (whole, chunked):
        assert (out - exact).abs().max() < 0.05 * exact.abs().max()
        assert all(g.dtype == torch.float32 for g in grads(out, inputs))


def test_dropout_drops_entries_of_the_map() -> None:
    inputs = problem(1, 1, 400, 3, slots=1)
    out = external_attention(**{**inputs, "value_bias": None}, dropout=0.25)
    dropped = (out == 0).all(-1).double().mean().item()
    assert 0.15 < dropped < 0.35
    kept = out[(out != 0).all(-1)]
    torch.testing.assert_close(kept, (inputs["value_memory"] / 0.75).expand_as(kept))


def _change(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda inputs: {**inputs, **changes}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_change(query=torch.randn(2, 2, 7, 4)), "of one width d"),
        (_change(value_memory=torch.randn(6, 4)), r"value_memory must be \(S = 5, d_v\), got \(6, 4\)"),
        (_change(key_bias=torch.randn(4)), r"key_bias must be \(S,\) = \(5,\)"),
        (_change(value_bias=torch.randn(5)), r"value_bias must be \(d_v,\) = \(4,\)"),
        (_change(mask=torch.ones(2, 6).bool()), "mask must be"),
        (_change(mask=torch.ones(2, 6).bool(), chunk_size=2), "mask must be"),
        (_change(normalization="duoble"), "did you mean double"),
        (_change(num_steps=0), "num_steps must be at least 1, got 0"),
        (_change(normalization="softmax", num_steps=2), "no Sinkhorn steps"),
        (_change(normalization="entmax15", num_steps=2), "no Sinkhorn steps"),
        (_change(normalization="entmax15", backend="tiled"), "'tiled' has no normalization='entmax15'; leave backend"),
        (_change(normalization="sigmoid", chunk_size=2), "'sigmoid' does all tokens at once; leave chunk_size out"),
        (_change(chunk_size=0), "chunk_size must be at least 1 token, got 0"),
        (_change(chunk_size=2, dropout=0.1), "excludes dropout"),
    ],
)
def test_mistakes_are_named(change: Callable[[dict[str, Any]], dict[str, Any]], says: str) -> None:
    with pytest.raises(UserError, match=says):
        external_attention(**change(problem(2, 2, 7, 3)))


@pytest.mark.parametrize("chunk_size", [None, 3])
def test_shapes_without_numbers(chunk_size):
    query, memory = torch.empty(2, 7, 8, device="meta"), torch.empty(4, 8, device="meta")
    with torch.no_grad():
        assert external_attention(query, memory, memory, chunk_size=chunk_size).shape == (2, 7, 8)


def test_forward_mode_derivative_without_gradients():
    query, memory, tangent = torch.randn(2, 7, 8), torch.randn(4, 8), torch.randn(2, 7, 8)
    with torch.no_grad(), forward_ad.dual_level():
        dual = forward_ad.make_dual(query, tangent)
        found = forward_ad.unpack_dual(external_attention(dual, memory, memory)).tangent
    _, expected = torch.func.jvp(lambda q: external_attention(q, memory, memory), (query,), (tangent,))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "options", [{"backend": "eager"}, {"backend": "tiled"}, {"chunk_size": 3}, {"backend": "sdpa"}]
)
@pytest.mark.parametrize("normalization", ["double", "softmax"])
def test_what_padding_holds_reaches_no_gradient(options: dict[str, Any], normalization: Any) -> None:
    torch.manual_seed(0)
    query = torch.randn(3, 2, 7, 4, dtype=torch.float64)
    memories = [torch.randn(5, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    weights = torch.randn(3, 2, 7, 4, dtype=torch.float64)
    results = []
    for padding in (0.0, torch.nan, torch.inf):
        given = query.masked_fill(~MASK[:, None, :, None], padding).requires_grad_()
        out = external_attention(given, *memories, mask=MASK, normalization=normalization, **options)
        results.append([out, *torch.autograd.grad((out * weights).sum(), [given, *memories])])
        shares = external_attention_map(given, memories[0], mask=MASK, normalization=normalization)
        results[-1] += torch.autograd.grad(shares.square().sum(), memories[0])
    for other in results[1:]:
        for ours, clean in zip(other, results[0], strict=True):
            torch.testing.assert_close(ours, clean, rtol=0, atol=0)


def test_chunks_do_not_lose_precision_of_half_gradients() -> None:
    """With a bias, whose addition half precision rounds once or twice."""
    torch.manual_seed(0)
    query, keys, values = 4 * torch.randn(1, 4, 96, 16), 2 * torch.randn(8, 16), torch.randn(8, 16)
    biases = {"key_bias": 4 * torch.randn(8), "value_bias": torch.randn(16)}

    def error(chunk_size: int | None) -> float:
        found = []
        for dtype in (torch.bfloat16, torch.float64):
            x = query.bfloat16().to(dtype).requires_grad_()
            k, v = (t.bfloat16().to(dtype) for t in (keys, values))
            options = {name: bias.bfloat16().to(dtype) for name, bias in biases.items()}
            size = chunk_size if dtype == torch.bfloat16 else None
            external_attention(x, k, v, **options, chunk_size=size).sum().backward()
            assert x.grad is not None
            found.append(x.grad.double())
        return float((found[0] - found[1]).norm() / found[1].norm())

    assert error(16) < 1.5 * error(None)
