"""Fused external attention against the reference in float64: outputs and gradients. See test_in_interpreter.py."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from comparison import assert_as_good_as, external_inputs, outputs, poisoned

from tokenmix.errors import UserError
from tokenmix.kernels import external as kernels
from tokenmix.ops.external import external_attention
from tokenmix.ops.external_blocks import Factors, reference

fused = partial(external_attention, backend="triton")


def eager(query, key_memory, value_memory, *, normalization="double", **rest):
    return reference(Factors(query, key_memory, value_memory, **rest), normalization)


SHAPES = [
    # B, H, N, d, d_v, S
    (2, 2, 1, 5, 24, 3),
    (2, 3, 37, 24, 5, 17),
    pytest.param((1, 2, 130, 64, 64, 64), marks=pytest.mark.slow),
    (1, 1, 37, 80, 40, 70),
]
FINITE_SHAPES = [(2, 2, 70, 8), (5, 8), (5, 8)]


@pytest.mark.parametrize("normalization", ["double", pytest.param("softmax", marks=pytest.mark.slow)])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_eager_op(shape: tuple[int, ...], normalization: Any) -> None:
    inputs = external_inputs(*shape, dtype=torch.float32)
    with poisoned():
        assert_as_good_as(fused, eager, inputs, normalization=normalization)


@pytest.mark.parametrize("normalization", ["double", pytest.param("softmax", marks=pytest.mark.slow)])
def test_masks_and_a_row_without_tokens(normalization: Any) -> None:
    inputs = external_inputs(3, 2, 37, 24, 24, 20, dtype=torch.float32)
    mask = torch.rand(3, 37, generator=torch.Generator().manual_seed(2)) > 0.4
    mask[1] = False
    with poisoned():
        assert_as_good_as(fused, eager, inputs, mask=mask, normalization=normalization)
    assert fused(**inputs, mask=mask)[1].abs().max() == 0.0


def test_what_stands_in_a_padded_place_reaches_nothing() -> None:
    inputs = external_inputs(1, 1, 20, 8, 8, 4, dtype=torch.float32)
    mask = torch.arange(20)[None] < 15
    clean = outputs(fused, inputs, mask=mask)
    inputs["query"].data[:, :, 15:] = torch.nan
    for name, tensor in outputs(fused, inputs, mask=mask).items():
        assert torch.equal(tensor, clean[name]), name


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize(
    ("number", "masked"),
    [
        (torch.nan, False),
        (torch.inf, True),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [(torch.nan, True), (torch.inf, False), (-torch.inf, False), (-torch.inf, True)]
        ),
    ],
)
def test_a_token_that_is_not_finite_is_told_to_all_others(number: float, masked: bool) -> None:
    query, key, value = (torch.randn(*shape, generator=torch.Generator().manual_seed(0)) for shape in FINITE_SHAPES)
    mask = (torch.arange(70) < 63).expand(2, 70) if masked else None
    clean = fused(query, key, value, mask=mask)
    query[0, 0, 3, 2] = number
    out = fused(query, key, value, mask=mask)
    rows = out.isfinite().all(-1)
    assert torch.equal(rows, external_attention(query, key, value, mask=mask, backend="sdpa").isfinite().all(-1))
    # With a mask eager leaves the others finite where inf, though not NaN, is among the logits.
    if not masked or number != number:
        assert torch.equal(rows, external_attention(query, key, value, mask=mask, backend="eager").isfinite().all(-1))
    assert not rows[0, 0, :63].any()
    assert torch.equal(out[rows], clean[rows])


def test_columns_may_lie_more_than_32_bits_apart(tmp_path: Path) -> None:
    # A file with holes: only the pages of the query take room.
    stride = 2**30 + 8
    memory = torch.from_file(str(tmp_path / "query"), shared=True, size=2 * stride + 16, dtype=torch.float16)
    query = memory.as_strided((1, 1, 16, 3), (16, 16, 1, stride))
    query.copy_(torch.randn(query.shape, generator=torch.Generator().manual_seed(0)))
    memories = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(1)).half().unbind()
    assert torch.equal(fused(query, *memories), fused(query.clone(), *memories))


def test_half_type() -> None:
    inputs = external_inputs(2, 2, 70, 24, 24, 64, dtype=torch.float16)
    with poisoned():
        assert_as_good_as(fused, eager, inputs, normalization="double")


@pytest.mark.parametrize("scale", [1000.0, pytest.param(30.0, marks=pytest.mark.slow)])
def test_large_logits(scale: float) -> None:
    inputs = external_inputs(1, 2, 37, 16, 8, 20, dtype=torch.float32)
    inputs["key_memory"] = (inputs["key_memory"].detach() * scale).requires_grad_()
    with poisoned():
        assert_as_good_as(fused, eager, inputs)


def test_a_row_sums_to_one_at_any_scale() -> None:
    inputs = external_inputs(1, 1, 50, 16, 8, 20, dtype=torch.float16)
    key = inputs["key_memory"].detach() * 100
    out = fused(inputs["query"], key, torch.ones(20, 8, dtype=torch.float16))
    torch.testing.assert_close(out, torch.ones_like(out), rtol=2e-3, atol=0.0)


@pytest.mark.parametrize(
    "layout",
    ["heads inside tokens", "one head", "every second column", pytest.param("heads first", marks=pytest.mark.slow)],
)
def test_any_strides(layout: str) -> None:
    inputs = external_inputs(2, 2, 18, 8, 8, 5, dtype=torch.float32)
    query = inputs["query"].detach()
    if layout == "heads first":
        query = query.contiguous()
    elif layout == "one head":
        query = query[:, 0]
    elif layout == "every second column":
        query = torch.stack([query, query + 1], -1).flatten(-2)[..., ::2]
    inputs["query"] = query.requires_grad_()
    assert_as_good_as(fused, eager, inputs)
    if layout == "heads inside tokens":
        assert fused(**inputs).transpose(1, 2).is_contiguous()


def test_more_axes_and_none() -> None:
    inputs = external_inputs(2, 3, 11, 8, 8, 5, dtype=torch.float32)
    query = inputs["query"].detach()
    rest = {name: tensor for name, tensor in inputs.items() if name != "query"}
    for q in (query[0, 0], query.reshape(2, 3, 1, 11, 8), query[:0]):
        out = fused(q, **rest)
        torch.testing.assert_close(out, eager(q, **rest))
        assert out.shape == q.shape


@pytest.mark.slow
def test_the_same_bits_twice() -> None:
    inputs = external_inputs(2, 2, 70, 16, 16, 8, dtype=torch.float32)
    first, second = outputs(fused, inputs), outputs(fused, inputs)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
def test_the_operators_are_registered_as_torch_wants() -> None:
    inputs = external_inputs(1, 2, 18, 8, 6, 5, dtype=torch.float32)
    for double in (True, False):
        args = (*inputs.values(), torch.arange(18).expand(1, 2, 18) < 15, double)
        torch.library.opcheck(kernels.external_forward, args)


@pytest.mark.slow
def test_compiles_without_a_break() -> None:
    inputs = external_inputs(1, 2, 18, 8, 6, 5, dtype=torch.float32)
    compiled = torch.compile(fused, fullgraph=True, backend="eager")
    expected = outputs(fused, inputs)
    for name, tensor in outputs(compiled, inputs).items():
        assert torch.equal(tensor, expected[name]), name


def test_refuses_what_it_cannot_do() -> None:
    inputs = external_inputs(1, 1, 4, 8, 8, 300, dtype=torch.float32)
    with pytest.raises(UserError, match="at most 256 slots, got 300"):
        fused(**inputs)
    inputs = {name: tensor.double() for name, tensor in inputs.items()}
    with pytest.raises(UserError, match="float16, bfloat16, float32 for all tensors, got float64"):
        fused(**inputs)
    inputs = external_inputs(1, 1, 4, 8, 8, 3, dtype=torch.float32)
    with pytest.raises(UserError, match="one device, got cpu, meta"):
        fused(**inputs, mask=torch.ones(1, 4, dtype=torch.bool, device="meta"))
