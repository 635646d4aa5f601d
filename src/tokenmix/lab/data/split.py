"""Which samples of a set are used: a limit on them, and a part of the training samples held out for validation."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokenmix.errors import UserError

# By fewer than ten samples epochs cannot be distinguished.
SHARE, LEAST, MOST = 10, 10, 10_000


def choose(labels: Tensor, limit: int | None, seed: int) -> Tensor | None:
    """Indices of `limit` samples that keep the shares of the classes; None if all are kept.

    A larger limit under the same seed contains the smaller one's samples.
    """
    if limit is not None and limit < 1:
        raise UserError(f"a limit of {limit} leaves no images; give 1 or more, or none for all of them")
    if limit is None or limit >= len(labels):
        return None
    rng = np.random.default_rng(abs(seed))
    order = rng.permutation(len(labels))
    shuffled = labels.numpy()[order]
    share = np.empty(len(order))
    for label in np.unique(shuffled):
        places = np.flatnonzero(shuffled == label)
        share[places] = (np.arange(len(places)) + rng.random()) / len(places)
    return torch.from_numpy(np.sort(order[np.argsort(share, kind="stable")[:limit]]))


def limited(samples: Any, labels: Tensor, limit: int | None, seed: int) -> Any:
    """The `subset` of these samples that `choose` keeps."""
    kept = choose(labels, limit, seed)
    return samples if kept is None else samples.subset(kept)


def validation_size(count: int, asked: int | None, limit: int | None = None) -> int:
    """How many of `count` training samples are held out: as many as asked for, else a tenth of those that are used,
    10,000 at most, and none where that is fewer than 10.

    Raises:
        UserError: none would be left to train on.
    """
    if asked is None:
        tenth = min(count, limit or count) // SHARE
        return min(MOST, tenth) if tenth >= LEAST else 0
    if asked >= count:
        raise UserError(
            f"--validation {asked} leaves none of the {count} samples to train on; give {count // SHARE} or less, or "
            "0 for none"
        )
    return asked


def hold_out(labels: Tensor, asked: int | None, limit: int | None = None) -> tuple[Tensor, Tensor]:
    """Indices of the samples to train on, and of those held out for validation, in the shares of the classes.

    A function of labels and number alone: runs with other seeds hold out the same, and a larger part contains a
    smaller one.
    """
    size = validation_size(len(labels), asked, limit)
    held = torch.zeros(len(labels), dtype=torch.bool)
    if size:
        held[choose(labels, size, 0)] = True
    return (~held).nonzero().flatten(), held.nonzero().flatten()
