"""Double normalisation against the two published divisions, in every type and at every scale."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tokenmix.errors import UserError
from tokenmix.ops.normalize import double_normalize, entmax15, slot_offset

TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def loop_oracle(logits: Tensor, mask: list[bool] | None = None, num_steps: int = 1) -> Tensor:
    """Softmax over tokens, shares over slots, with Python floats and no epsilon, for logits (N, S)."""
    num_tokens, num_slots = logits.shape
    taking = [i for i in range(num_tokens) if mask is None or mask[i]]
    share = [[math.exp(float(logits[i, j])) for j in range(num_slots)] for i in range(num_tokens)]
    for _ in range(num_steps):
        for j in range(num_slots):
            column = math.fsum(share[i][j] for i in taking)
            for i in taking:
                share[i][j] /= column
        for i in taking:
            row = math.fsum(share[i])
            share[i] = [value / row for value in share[i]]
    rows = [share[i] if i in taking else [0.0] * num_slots for i in range(num_tokens)]
    return torch.tensor(rows, dtype=torch.float64)


def two_steps(logits: Tensor, epsilon: float) -> Tensor:
    """The released code's form."""
    shares = torch.softmax(logits, dim=-2)
    return shares / (epsilon + shares.sum(-1, keepdim=True))


@st.composite
def problems(draw: st.DrawFn) -> tuple[Tensor, list[bool], int]:
    num_tokens, num_slots = draw(st.integers(1, 9)), draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    scale = draw(st.sampled_from([0.1, 1.0, 10.0, 30.0]))
    logits = torch.randn(num_tokens, num_slots, dtype=torch.float64, generator=generator) * scale
    mask = draw(st.lists(st.booleans(), min_size=num_tokens, max_size=num_tokens))
    return logits, mask, draw(st.integers(1, 4))


@settings(max_examples=60, deadline=None)
@given(problems())
def test_equals_the_loop_over_python_floats(problem: tuple[Tensor, list[bool], int]) -> None:
    logits, mask, num_steps = problem
    expected = loop_oracle(logits, mask, num_steps)
    actual = double_normalize(logits, mask=torch.tensor(mask), num_steps=num_steps)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


def test_agrees_with_the_published_two_steps() -> None:
    logits = torch.randn(2, 3, 196, 64, dtype=torch.float64)
    torch.testing.assert_close(double_normalize(logits), two_steps(logits, 0.0), rtol=1e-12, atol=0)
    assert (double_normalize(logits) - two_steps(logits, 1e-9)).abs().max() < 1e-8


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("std", [0.1, 1.0, 10.0, 30.0, 100.0])
def test_rows_sum_to_one(dtype: torch.dtype, std: float) -> None:
    logits = (torch.randn(2, 196, 64, dtype=torch.float64) * std).to(dtype)
    shares = double_normalize(logits)
    assert shares.dtype == dtype
    # Rounding every share moves the sum by half an eps at most; the softmax itself adds a few roundings of its own.
    tolerance = torch.finfo(dtype).eps * (1 if dtype in (torch.bfloat16, torch.float16) else 8)
    assert (shares.double().sum(-1) - 1).abs().max() <= tolerance


def test_a_row_that_underflows_in_float16_is_right() -> None:
    logits = torch.randn(32, 16).half()
    logits[5] -= 80
    classic = two_steps(logits, torch.tensor(1e-9).half().item())
    assert classic[5].isnan().all()
    torch.testing.assert_close(double_normalize(logits).double(), loop_oracle(logits), rtol=2**-10, atol=6e-8)


def test_float16_stays_exact_over_many_tokens() -> None:
    logits = torch.randn(16384, 64, generator=torch.Generator().manual_seed(0)).half()
    exact = double_normalize(logits.double())
    normal = exact > torch.finfo(torch.float16).tiny
    ours, classic = (
        ((shares.double() - exact).abs() / exact)[normal].max().item()
        for shares in (double_normalize(logits), two_steps(logits, 0.0))
    )
    assert ours < 1e-3
    assert classic > 0.02


@pytest.mark.parametrize("num_steps", [1, 3])
def test_a_mask_equals_dropping_the_tokens(num_steps: int) -> None:
    logits = torch.randn(3, 2, 7, 5, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0, 1, 0, 1, 1], [1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 1]]).bool()
    shares = double_normalize(logits, mask=mask, num_steps=num_steps)
    for sample, takes in enumerate(mask):
        torch.testing.assert_close(
            shares[sample][:, takes], double_normalize(logits[sample][:, takes], num_steps=num_steps)
        )
        assert (shares[sample][:, ~takes] == 0).all()


def test_a_mask_of_full_rank_says_the_same() -> None:
    logits, mask = torch.randn(2, 3, 6, 4), torch.rand(2, 6) > 0.5
    full = mask[:, None].expand(2, 3, 6)
    assert torch.equal(double_normalize(logits, mask=mask), double_normalize(logits, mask=full))
    per_head = torch.rand(2, 3, 6) > 0.5
    shares = double_normalize(logits, mask=per_head)
    torch.testing.assert_close(shares[:, 1], double_normalize(logits[:, 1], mask=per_head[:, 1]))


@pytest.mark.parametrize("num_steps", [1, 2])
@pytest.mark.parametrize("filler", [0.0, math.nan, math.inf])
def test_what_stands_in_a_padded_place_reaches_nothing(num_steps: int, filler: float) -> None:
    mask = torch.tensor([[True, True, False], [False, False, False]])
    logits = torch.randn(2, 3, 4).masked_fill(~mask[..., None], filler).requires_grad_()
    shares = double_normalize(logits, mask=mask, num_steps=num_steps)
    (shares * torch.randn_like(shares)).sum().backward()
    assert logits.grad is not None
    assert (shares[~mask] == 0).all()
    assert (logits.grad[~mask] == 0).all()
    assert logits.grad[mask].isfinite().all()
    assert (logits.grad[mask] != 0).any()


def test_a_slot_at_minus_infinity_takes_no_part() -> None:
    logits = torch.randn(6, 5, dtype=torch.float64)
    closed = logits.clone()
    closed[:, 3] = -torch.inf
    shares = double_normalize(closed)
    assert (shares[:, 3] == 0).all()
    kept = [0, 1, 2, 4]
    torch.testing.assert_close(shares[:, kept], double_normalize(logits[:, kept]))


def test_many_steps_make_the_columns_equal() -> None:
    logits = torch.randn(12, 4, dtype=torch.float64)
    once, often = double_normalize(logits), double_normalize(logits, num_steps=100)
    assert (once.sum(0) - 3).abs().max() > 1e-2
    torch.testing.assert_close(often.sum(0), torch.full((4,), 3.0, dtype=torch.float64))
    torch.testing.assert_close(often.sum(1), torch.ones(12, dtype=torch.float64))


@pytest.mark.parametrize("num_steps", [1, 3])
@pytest.mark.parametrize("masked", [False, True])
def test_gradients(num_steps: int, masked: bool) -> None:
    mask = torch.tensor([[True, False, True, True], [False] * 4]) if masked else None
    logits = torch.randn(2, 2, 4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a: double_normalize(a, mask=mask, num_steps=num_steps), logits)


def test_offsets_of_parts_merge() -> None:
    logits = torch.randn(2, 10, 3, dtype=torch.float64)
    merged = torch.logaddexp(slot_offset(logits[:, :4]), slot_offset(logits[:, 4:]))
    torch.testing.assert_close(merged, slot_offset(logits))
    nothing = slot_offset(logits, mask=torch.zeros(2, 10, dtype=torch.bool))
    assert torch.isneginf(nothing).all()
    torch.testing.assert_close(torch.logaddexp(merged, nothing), merged)
    assert slot_offset(logits.half()).dtype == torch.float32


@pytest.mark.parametrize(
    ("mask", "says"),
    [
        (torch.ones(2, 5), "mask must be boolean"),
        (torch.ones(2, 4).bool(), r"\(2, 4\)"),
        (torch.ones(3, 5).bool(), r"\(3, 5\)"),
        (torch.ones(5).bool(), r"\(5,\)"),
    ],
)
def test_a_mask_that_does_not_fit_is_named(mask: Tensor, says: str) -> None:
    with pytest.raises(UserError, match=says):
        double_normalize(torch.randn(2, 3, 5, 4), mask=mask)


def test_no_step_is_an_error() -> None:
    with pytest.raises(UserError, match="num_steps must be at least 1, got 0"):
        double_normalize(torch.randn(5, 4), num_steps=0)


@pytest.mark.parametrize("scale", [0.01, 1.0, 5.0, 1000.0])
def test_entmax_solves_its_equation(scale: float) -> None:
    logits = (scale * torch.randn(50, 7, dtype=torch.float64)).requires_grad_()
    shares = entmax15(logits)
    torch.testing.assert_close(shares.sum(-1), torch.ones(50, dtype=torch.float64))
    # p = max(a / 2 - tau, 0)^2: all entries of the support give one tau, the others are below it.
    tau = logits / 2 - shares.sqrt()
    highest = tau.masked_fill(shares == 0, -torch.inf).amax(-1, keepdim=True)
    lowest = tau.masked_fill(shares == 0, torch.inf).amin(-1, keepdim=True)
    torch.testing.assert_close(highest, lowest)
    assert bool((tau <= highest + 1e-9).all())
    assert torch.autograd.gradcheck(entmax15, logits)


def test_entmax_of_equal_and_closed_entries() -> None:
    torch.testing.assert_close(entmax15(torch.zeros(2, 4)), torch.full((2, 4), 0.25))
    torch.testing.assert_close(entmax15(torch.tensor([0.0, -torch.inf, 0.0])), torch.tensor([0.5, 0.0, 0.5]))
    torch.testing.assert_close(entmax15(torch.tensor([3.0])), torch.tensor([1.0]))


@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
def test_entmax_is_that_of_its_authors(scale: float) -> None:
    """The package entmax, where it is installed."""
    authors = pytest.importorskip("entmax")
    logits = (scale * torch.randn(20, 6, dtype=torch.float64)).requires_grad_()
    upstream = torch.randn(20, 6, dtype=torch.float64)
    ours, theirs = entmax15(logits), authors.entmax15(logits, dim=-1)
    torch.testing.assert_close(ours, theirs)
    given = (torch.autograd.grad(out, logits, upstream)[0] for out in (ours, theirs))
    torch.testing.assert_close(*given)
