"""Which side a text lies on: decided by its contents, so that copies stay together and no seed changes it."""

import hashlib
import math
from collections.abc import Iterable

__all__ = ["TEST_SHARE", "choose_test", "is_test"]

TEST_SHARE = 10
"""One in so many is held out."""


def is_test(key: str, share: int = TEST_SHARE) -> bool:
    """Whether what has this key is held out; one in `share` is, for single items in a stream."""
    words = " ".join(key.lower().split())
    return int.from_bytes(hashlib.sha256(words.encode()).digest()[:8], "big") % share == 0


def choose_test(keys: Iterable[str], share: int = TEST_SHARE) -> set[str]:
    """The keys that are held out: one in `share` of the different ones, and at least one."""
    ordered = sorted(set(keys), key=lambda key: hashlib.sha256(key.encode()).digest())
    return set(ordered[: math.ceil(len(ordered) / share)])
