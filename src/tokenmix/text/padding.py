"""Masks of padded batches, and rows rotated so that each begins with its first unpadded token."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tokenmix.errors import UserError


def read_mask(attention_mask: Tensor | None, size: int, length: int) -> Tensor | None:
    """transformers' `attention_mask`, 1 for a token and 0 for padding, as a boolean (B, N); None if nothing is masked.

    Raises:
        UserError: another shape, such as a map of pairs of tokens; a mask of floats, which may be one to be added.
    """
    if attention_mask is None:
        return None
    if tuple(attention_mask.shape) != (size, length):
        raise UserError(
            f"attention_mask must be (B, N) = {(size, length)}, got {tuple(attention_mask.shape)}; a gate cannot take "
            "masks of pairs of tokens, use config.causal for causal models"
        )
    if attention_mask.is_floating_point():
        raise UserError(
            f"attention_mask must hold 1 for tokens and 0 for padding as integers or booleans, got "
            f"{attention_mask.dtype}; use (attention_mask > 0.5)"
        )
    mask = attention_mask != 0
    # Whether it leaves out nothing is looked at where that is cheap: not in a graph, whose masks may leave out other
    # tokens than the example's, and not where a GPU must be awaited. A training step of gmlp_text_nano takes 231 ms
    # with such a mask and 180 without (B 32, N 128, 2 CPU cores).
    in_graph = torch.compiler.is_compiling() or torch.jit.is_tracing()
    return None if not in_graph and mask.device.type == "cpu" and bool(mask.all()) else mask


def rotate(x: Tensor, places: Tensor | None, dims: Sequence[int] = (1,)) -> Tensor:
    """x with row b rotated along each of `dims` so that the element at `places[b]` comes first; x itself for None.

        out[b, .., i, ..] = x[b, .., (i + places[b]) mod N, ..]

    Shape:
        x (B, ...), places (B,) to the shape of x.
    """
    if places is None:
        return x
    for dim in dims:
        n = x.shape[dim]
        index = (torch.arange(n, device=x.device) + places[:, None]) % n
        shape = [1] * x.dim()
        shape[0], shape[dim] = x.shape[0], n
        x = x.gather(dim, index.view(shape).expand_as(x))
    return x


def rotate_back(x: Tensor, places: Tensor | None, dims: Sequence[int] = (1,)) -> Tensor:
    """Undo `rotate`."""
    return rotate(x, None if places is None else -places, dims)
