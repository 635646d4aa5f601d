"""What the text tasks read in batches."""

import numpy as np
import torch
from torch import Tensor

from tokenmix.data.numbered import Numbered

__all__ = ["Batch", "Sequences", "padded"]

Batch = dict[str, Tensor]


class Sequences(Numbered):
    """Numbered sequences of token ids.

    A batch holds input_ids and attention_mask int64 (B, N), what is to be learnt from them, and index int64 (B,).
    """

    unit = "sequences"


def padded(rows: list[np.ndarray], fill: int) -> Tensor:
    """int64 (B, N) with N that of the longest row; the others end in `fill`."""
    out = np.full((len(rows), max((len(row) for row in rows), default=0)), fill, dtype=np.int64)
    for target, row in zip(out, rows):
        target[: len(row)] = row
    return torch.from_numpy(out)
