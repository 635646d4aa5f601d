"""The diagonality loss in both forms."""

import pytest
import torch

from tokenmix.errors import UserError
from tokenmix.losses import diagonality_loss
from tokenmix.ops.less import Scores


def loop_loss(scores, form, margin):
    """The two forms pair by pair."""
    total, n = 0.0, scores.shape[-1]
    for sample in scores.tolist():
        for a in sample:
            pairs = [(i, j) for i in range(n) for j in range(n) if i != j]
            asymmetry = sum(abs(a[i][j] - a[j][i]) for i, j in pairs)
            if form == "printed":
                total += asymmetry + sum((n - 1) * a[i][i] - sum(a[i][j] for j in range(n) if j != i) for i in range(n))
            else:
                excess = sum(max(0.0, margin + a[i][j] - a[i][i]) for i, j in pairs)
                total += (asymmetry + excess) / len(pairs) / scores.shape[1]
    return total / scores.shape[0]


@pytest.mark.parametrize(("form", "margin"), [("hinge", 0.0), ("hinge", 0.7), ("printed", 0.0)])
def test_equals_the_loops(form, margin):
    scores = torch.randn(2, 3, 5, 5, dtype=torch.float64)
    expected = loop_loss(scores, form, margin)
    torch.testing.assert_close(diagonality_loss(scores, form, margin).item(), expected)


def hand_made():
    """Symmetric, and row 0 has an entry above its diagonal."""
    return torch.tensor([[[[1.0, 2.0, 0.0], [2.0, 3.0, 0.0], [0.0, 0.0, 1.0]]]], requires_grad=True)


def test_the_hinge_lifts_a_low_diagonal_and_lowers_what_stands_above_it():
    scores = hand_made()
    (gradient,) = torch.autograd.grad(diagonality_loss(scores), scores)
    # Descending the gradient: A_00 rises, A_01 falls; what is in order already stays.
    assert gradient[0, 0, 0, 0] < 0
    assert gradient[0, 0, 0, 1] > 0
    assert gradient[0, 0, 1, 1] == 0
    assert gradient[0, 0, 2, 2] == 0


def test_the_printed_form_lowers_every_diagonal():
    scores = hand_made()
    (gradient,) = torch.autograd.grad(diagonality_loss(scores, "printed"), scores)
    assert (gradient[0, 0].diagonal() == 2).all()
    assert gradient[0, 0, 0, 1] < 0


def test_asymmetry_is_pulled_together_by_both():
    scores = torch.tensor([[[[9.0, 3.0], [1.0, 9.0]]]], requires_grad=True)
    (gradient,) = torch.autograd.grad(diagonality_loss(scores), scores)
    assert gradient[0, 0, 0, 1] > 0 > gradient[0, 0, 1, 0]
    assert diagonality_loss(scores, "printed") == 2 * 2 + 9 - 3 + 9 - 1


def test_the_hinge_is_bounded_below_and_the_printed_form_is_not():
    ordered = torch.eye(4).expand(2, 3, 4, 4)
    assert diagonality_loss(100 * ordered) == 0
    assert diagonality_loss(100 * ordered, margin=1.0) == 0
    assert diagonality_loss(0 * ordered, margin=1.0) == 1
    values = [diagonality_loss(-scale * ordered, "printed").item() for scale in (1, 100, 10_000)]
    assert values == [-36, -3600, -360_000]


def test_one_token_has_no_pairs():
    scores = torch.randn(2, 3, 1, 1)
    assert diagonality_loss(scores, margin=1.0) == 0
    assert diagonality_loss(scores, "printed") == 0


def test_the_number_of_samples_does_not_matter():
    scores = torch.randn(1, 2, 4, 4)
    for form in ("hinge", "printed"):
        torch.testing.assert_close(diagonality_loss(scores.expand(5, 2, 4, 4), form), diagonality_loss(scores, form))


@pytest.mark.parametrize("dense", [False, True])
def test_factors_are_multiplied_in_float32(dense):
    query, key, extra = 300 * torch.randn(2, 3, 6, 4), 300 * torch.randn(2, 3, 6, 4), torch.randn(2, 3, 6, 6)
    scores = Scores(query.half(), key.half(), extra.half() if dense else None)
    wide = scores.query.float() @ scores.key.float().mT + (scores.dense.float() if scores.dense is not None else 0)
    assert not wide.half().isfinite().all(), "float16 would not hold them"
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(diagonality_loss(scores), diagonality_loss(wide))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: diagonality_loss(torch.zeros(2, 3, 4, 5)), r"takes scores \(B, H, N, N\), got \(2, 3, 4, 5\)"),
        (lambda: diagonality_loss(torch.zeros(4, 4)), "Scores.matrix"),
        (lambda: diagonality_loss(torch.zeros(1, 1, 4, 4), "hing"), "did you mean hinge"),
        (lambda: diagonality_loss(torch.zeros(1, 1, 4, 4), "printed", 0.5), "has no margin, got margin=0.5"),
    ],
)
def test_errors(call, message):
    with pytest.raises(UserError, match=message):
        call()


def test_half_precision_is_summed_in_float32():
    scores = torch.randn(4, 8, 64, 64).half()
    for form in ("hinge", "printed"):
        wanted = diagonality_loss(scores.float(), form)
        torch.testing.assert_close(diagonality_loss(scores, form), wanted)
