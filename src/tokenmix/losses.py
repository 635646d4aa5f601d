"""Losses of individual mechanisms."""

from typing import Literal, get_args

import torch
from torch import Tensor

from tokenmix.errors import UserError
from tokenmix.ops.checks import check_choice, check_numbers, check_tensor
from tokenmix.ops.less import Scores
from tokenmix.ops.normalize import full_precision, widen

__all__ = ["diagonality_loss"]

DiagonalityForm = Literal["hinge", "printed"]


def diagonality_loss(scores: Tensor | Scores, form: DiagonalityForm = "hinge", margin: float = 0.0) -> Tensor:
    """Penalty that keeps transformed scores symmetric with a dominant diagonal, like query-key scores.

        hinge    mean_(i != j) |A_ij - A_ji| + mean_(i != j) relu(margin + A_ij - A_ii)
        printed  sum_ij |A_ij - A_ji| + sum_i ((N - 1) A_ii - sum_(j != i) A_ij)

    Minimising the paper's second term lowers the diagonal, against its purpose, and has no lower bound. `"hinge"` is
    bounded below by 0; `"printed"` is for study.

    Args:
        scores: A before the softmax, (B, H, N, N), or its factors. Half precision is computed in float32, also the
            product of factors under autocast: sums of scores exceed the float16 range.
        form: see above. Means are over samples, heads and pairs. The printed sums are over heads and tokens, averaged
            over samples.
        margin: minimum excess of the diagonal over its row; hinge only.

    Returns:
        A scalar; 0 for one token.

    Raises:
        UserError: scores are not square maps, the form is unknown, or a margin is given with `"printed"`.

    Reference: Zhang et al., arXiv 2406.00427, diagonality-preserving loss.
    """
    check_choice("form", form, get_args(DiagonalityForm))
    check_numbers(margin=margin)
    if isinstance(scores, Scores):
        wide = (None if part is None else widen(part) for part in scores)
        with full_precision(scores.query):
            scores = Scores(*wide).matrix()  # pyrefly: ignore[bad-argument-type]
    check_tensor("scores of diagonality_loss", scores)
    if scores.dim() != 4 or scores.shape[-1] != scores.shape[-2]:
        raise UserError(f"diagonality_loss takes scores (B, H, N, N), got {tuple(scores.shape)}; use Scores.matrix()")
    scores = widen(scores)
    diagonal = scores.diagonal(dim1=-2, dim2=-1)
    asymmetry = (scores - scores.transpose(-1, -2)).abs()
    if form == "printed":
        if margin:
            raise UserError(f"the printed form has no margin, got margin={margin}; use form='hinge'")
        size = scores.shape[-1]
        lift = size * diagonal.sum((-2, -1)) - scores.sum((-3, -2, -1))
        return (asymmetry.sum((-3, -2, -1)) + lift).mean()
    # Exclude the diagonal, which would add a constant margin.
    excess = torch.relu(margin + scores - diagonal.unsqueeze(-1))
    others = 1 - torch.eye(scores.shape[-1], dtype=scores.dtype, device=scores.device)
    pairs = scores.shape[:-2].numel() * max(scores.shape[-1] * (scores.shape[-1] - 1), 1)
    return ((asymmetry + excess) * others).sum() / pairs
