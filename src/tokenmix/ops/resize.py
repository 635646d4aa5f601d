"""Resize weights learned over a token grid: gates, and the transforms of less-attention."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from tokenmix.errors import UserError
from tokenmix.ops.checks import check_tensors


def resize_gate(
    weight: Tensor, bias: Tensor, old_grid: Sequence[int], new_grid: Sequence[int], *, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Resize a gate to another number of tokens, by interpolation over the token grid.

        W'[q', k'] = N/N' sum_(q, k) R[q', q] R[k', k] W[q, k],      b' = R b

    W maps a key grid to a query grid, so both sides are interpolated; N/N' keeps the size of the sum over tokens. R is
    Keys' cubic interpolation along each axis, with repeated edge values, widened when the grid shrinks. Equal grids
    return W and b.

    Test case: a Gaussian kernel of standard deviation 0.2 of the image, from 14 x 14 to 16 x 16 tokens. The relative
    error is 0.6 %, against 3.1 % for bilinear and 2.1 % for torch's bicubic (a = -0.75).

    Args:
        weight: (N, N) with tokens row by row; or (2N-1,), Toeplitz, for grids of one axis.
        bias: (N,).
        old_grid: (h, w), or (n,) for text; the product is N.
        new_grid: the new grid, with as many axes.
        causal: only the lower triangle of W counts; it is mirrored before, so that the diagonal stays an edge.

    Returns:
        weight and bias for new_grid, in the dtypes of the inputs, without gradients.
    """
    check_tensors(weight=weight, bias=bias)
    old, new, n = tuple(old_grid), tuple(new_grid), prod(old_grid)
    axes = _axis_matrices(old, new)
    if weight.dim() == 1 and len(old) != 1:
        raise UserError(f"a Toeplitz gate has tokens in a line, got grids {old} and {new}; give (n,) and (m,)")
    expected = (2 * n - 1,) if weight.dim() == 1 else (n, n)
    if tuple(weight.shape) != expected or tuple(bias.shape) != (n,):
        raise UserError(
            f"old_grid {old} has {n} tokens, so weight must be {expected} and bias {(n,)}; "
            f"got {tuple(weight.shape)} and {tuple(bias.shape)}; give the grid that the weights were made for"
        )
    if causal:
        past = weight[n - 1 :] if weight.dim() == 1 else weight.tril()
        weight = torch.cat([past[1:].flip(0), past]) if weight.dim() == 1 else past + past.tril(-1).T
    scale = n / prod(new)
    new_bias = _resample(bias, old, axes).flatten()
    if weight.dim() == 1:
        before, after = old[0], new[0]
        lags = torch.arange(1 - after, after, dtype=torch.float64) * (before / after) + (before - 1)
        new_weight = _resample(weight, weight.shape, [_cubic_matrix(lags, 2 * before - 1, before / after)])
    else:
        new_weight = _resample(weight, (*old, *old), axes * 2).reshape(prod(new), prod(new))
    return new_weight * scale, new_bias


def resize_score_transform(
    weight: Tensor, bias: Tensor, old_grid: Sequence[int], new_grid: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Resize Theta or Psi to another number of tokens, by interpolation over the token grid.

    As in `resize_gate`, the matrix is scaled by N_old / N_new, so that the sum over tokens keeps its size.

    Args:
        weight: (n, n), or (H, n, n).
        bias: (n,), or (H, n).
        old_grid: (h, w) with h * w = n.
        new_grid: (h', w').

    Returns:
        (n', n') and (n',), or (H, n', n') and (H, n'), with n' = h' * w'.
    """
    check_tensors(weight=weight, bias=bias)
    old, new = tuple(old_grid), tuple(new_grid)
    if weight.dim() == 2:
        return resize_gate(weight, bias, old, new)
    heads = [resize_gate(w, b, old, new) for w, b in zip(weight, bias, strict=True)]
    return torch.stack([w for w, _ in heads]), torch.stack([b for _, b in heads])


def resize_rows(rows: Tensor, old_grid: Sequence[int], new_grid: Sequence[int]) -> Tensor:
    """Rows (R, N) of values over the token grid, interpolated to (R, N') as the bias in `resize_gate`."""
    axes = _axis_matrices(old_grid, new_grid)
    return _resample(rows.T, (*old_grid, len(rows)), axes).reshape(len(rows), prod(new_grid))


def _axis_matrices(old: Sequence[int], new: Sequence[int]) -> list[Tensor]:
    """R of `resize_gate` for each axis."""
    if len(old) != len(new) or min(*old, *new) < 1:
        raise UserError(
            f"grids must have equally many positive axes, got {tuple(old)} and {tuple(new)}; give (h, w) twice"
        )
    # Centres of the new cells on the old axis.
    centres = [(torch.arange(n, dtype=torch.float64) + 0.5) * (o / n) - 0.5 for o, n in zip(old, new)]
    return [_cubic_matrix(middle, o, o / n) for middle, o, n in zip(centres, old, new)]


def _cubic_matrix(positions: Tensor, size: int, step: float) -> Tensor:
    """(P, size) weights that read a signal of `size` samples at P positions, `step` samples apart."""
    width = max(1.0, step)
    reach = int(2 * width) + 2
    samples = torch.arange(-reach, size + reach, dtype=positions.dtype)
    t = (positions[:, None] - samples).abs() / width
    near, far = (1.5 * t - 2.5) * t * t + 1, ((2.5 - 0.5 * t) * t - 4) * t + 2
    taps = torch.where(t <= 1, near, torch.where(t < 2, far, 0.0))
    matrix = positions.new_zeros(positions.shape[0], size).index_add_(1, samples.long().clamp(0, size - 1), taps)
    return matrix / matrix.sum(1, keepdim=True)


@torch.no_grad()
def _resample(values: Tensor, shape: Sequence[int], matrices: Sequence[Tensor]) -> Tensor:
    grid = values.to(torch.promote_types(values.dtype, torch.float32)).reshape(tuple(shape))
    for matrix in matrices:
        # Contracting the first axis puts the new axis last, so each axis comes first in turn.
        grid = torch.einsum("a...,pa->...p", grid, matrix.to(grid))
    return grid.to(values.dtype)
