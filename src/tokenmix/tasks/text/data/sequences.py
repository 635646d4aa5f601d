"""What the text tasks read in batches."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tokenmix.data.indexed import IndexedDataset

__all__ = ["Batch", "Sequences", "padded", "token_batch"]

Batch = dict[str, Tensor]


class Sequences(IndexedDataset):
    """Sequences of token ids.

    A batch holds input_ids and attention_mask int64 (B, N), what is to be learnt from them, and index int64 (B,).
    """

    unit = "sequences"


def padded(rows: list[np.ndarray], fill: int) -> Tensor:
    """int64 (B, N) with N that of the longest row; the others end in `fill`."""
    out = np.full((len(rows), max((len(row) for row in rows), default=0)), fill, dtype=np.int64)
    for target, row in zip(out, rows):
        target[: len(row)] = row
    return torch.from_numpy(out)


def token_batch(ids: Sequence[np.ndarray], segments: Sequence[np.ndarray], indices: Tensor, pad: int) -> Batch:
    """The chosen rows of tokens with their segments, padded, and which they are: what a model takes, and index."""
    places = indices.tolist()
    return {
        "input_ids": padded([ids[i] for i in places], pad),
        "attention_mask": padded([np.ones(len(ids[i]), np.int64) for i in places], 0),
        "token_type_ids": padded([segments[i] for i in places], 0),
        "index": indices,
    }
