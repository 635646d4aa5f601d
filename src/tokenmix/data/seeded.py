"""Other people's transforms draw from global random states; here they do so under a seed and leave no trace."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

__all__ = ["restored_random_state", "seed_all"]


def seed_all(bits: int) -> None:
    """Seed python, numpy and torch on the CPU."""
    random.seed(bits)
    np.random.seed(bits & 0xFFFFFFFF)
    # Not torch.manual_seed, which notes a call for each GPU of a process that has not used one yet.
    torch.default_generator.manual_seed(bits & 0x7FFFFFFFFFFFFFFF)


@contextmanager
def restored_random_state() -> Iterator[None]:
    """Python's, numpy's and torch's random states as they were, once the block is over."""
    python, numpy, torches = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.default_generator.set_state(torches)
