"""`make demo`: five token mixers compared on real images in a few minutes on two CPU cores."""

import sys
from pathlib import Path
from typing import Any

from tokenmix.errors import UserError, needs

__all__ = ["main"]

# Sized so that installing, fetching and all five twins stay under ten minutes on two cores. One thread, since models
# this small gain little from a second one and lose much when another program wants it; no augmentation, since in three
# epochs it only slows learning (LOG.md, 2026-11-21, for both).
SHARED: dict[str, Any] = {
    "mixers": ("self", "external", "multihead-external", "gating", "less"),
    "batch_size": 64,
    "lr": 3e-3,
    "augment": "none",
    "threads": 1,
    "out": Path("demo"),
}
FASHION: dict[str, Any] = {"data": "fashion-mnist", "epochs": 3, "limit": 8_000}
DIGITS: dict[str, Any] = {"data": "digits", "epochs": 20}


def main() -> int:
    """Compare on Fashion-MNIST, or on the embedded digits where it cannot be had; returns the exit code."""
    try:
        with needs("the demo"):
            from tokenmix.compare.compare import compare
            from tokenmix.data import fetch_data
            from tokenmix.train.config import CompareConfig
    except UserError as error:
        print(f"tokenmix: {error}", file=sys.stderr)
        return 2
    try:
        print(fetch_data("fashion-mnist"), file=sys.stderr)
        budget = FASHION
    except UserError as reason:
        print(f"tokenmix: {reason}", file=sys.stderr)
        print("tokenmix: going on with scikit-learn's embedded digits (real 8 x 8 scans) instead", file=sys.stderr)
        budget = DIGITS
    try:
        compare(CompareConfig().replace(**SHARED, **budget))
    except UserError as error:
        print(f"tokenmix: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
