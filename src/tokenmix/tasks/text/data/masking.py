"""Which tokens are hidden, and behind what: a function of (seed, epoch, sequence, place) and of nothing else."""

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from tokenmix.data.seeding import hash_indices

__all__ = ["IGNORED", "Masking", "mask_tokens"]

Masking = Literal["token", "whole-word"]
IGNORED = -100
"""The label of a place that is not to be predicted; cross-entropy's own `ignore_index`."""
SEQUENCE, CHOICE, ACTION, RANDOM = 11, 12, 13, 14


def mask_tokens(
    ids: Tensor,
    units: Tensor,
    *,
    share: float,
    mask_id: int,
    ordinary: Tensor,
    seed: int,
    epoch: int,
    indices: Tensor,
) -> tuple[Tensor, Tensor]:
    """Inputs and labels of masked language modelling.

    Each unit, a token or a word, is chosen with probability `share`. Of the tokens of chosen units 80 % become the
    mask, 10 % an ordinary token drawn evenly, and 10 % stay; labels are the ids at chosen places and -100 elsewhere.

    Paper: Devlin et al., "BERT", arXiv:1810.04805, section 3.1. Shapes: ids and units int64 (B, N), units -1 where a
    place is never chosen; ordinary (V,); indices (B,). BERT hides exactly 15 % of a sequence, here it is so on average.
    """
    batch, tokens = ids.shape
    rows = hash_indices(seed, epoch, indices, SEQUENCE)[:, None]
    chosen = (_uniform(seed, epoch, rows, units.numpy(), CHOICE) < share) & (units >= 0).numpy()
    places = np.broadcast_to(np.arange(tokens), (batch, tokens))
    action = _uniform(seed, epoch, rows, places, ACTION)
    drawn = (_uniform(seed, epoch, rows, places, RANDOM) * len(ordinary)).astype(np.int64)
    picked = torch.from_numpy(chosen)
    labels = torch.where(picked, ids, IGNORED)
    inputs = torch.where(picked & torch.from_numpy(action < 0.8), mask_id, ids)
    return torch.where(picked & torch.from_numpy(action >= 0.9), ordinary[torch.from_numpy(drawn)], inputs), labels


def _uniform(seed: int, epoch: int, rows: np.ndarray, places: np.ndarray, purpose: int) -> np.ndarray:
    """A number in [0, 1) for each (row, place)."""
    keys = (rows + places.astype(np.uint64)).astype(np.int64)
    bits = hash_indices(seed, epoch, torch.from_numpy(keys), purpose)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
