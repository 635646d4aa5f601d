"""Less-attention: the scores of a layer made from the scores of the layer before. maths.md sections 3 to 5."""

from typing import NamedTuple

from torch import Tensor

__all__ = ["Scores"]


class Scores(NamedTuple):
    """Pre-softmax attention scores A = query @ key^T (+ dense), handed from layer to layer.

    query, key: (B, H, N, r), the scale already in the query. dense: (B, H, N, N) or None, the part that has no factors.
    """

    query: Tensor
    key: Tensor
    dense: Tensor | None = None
