"""Random draws that are a function of (seed, epoch, index), also by other people's transforms.

Those draw from global random states; here they do so under a seed and leave no trace.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor


def hash_indices(seed: int, epoch: int, indices: Tensor, purpose: int = 0) -> np.ndarray:
    """64 random bits for each index, a pure function of (seed, epoch, index); others for each `purpose`.

    The finaliser is splitmix64's (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014).
    """
    words = [abs(seed), epoch, purpose] if purpose else [abs(seed), epoch]
    key = np.random.SeedSequence(words).generate_state(1, np.uint64)
    bits = indices.numpy().astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + key
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


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
