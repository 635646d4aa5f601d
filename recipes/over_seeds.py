"""Runs that differ in their seed alone: what they have in common, and how far they lie apart."""

import statistics
from collections.abc import Sequence
from typing import Any


def over_seeds(scores: Sequence[float]) -> dict[str, Any]:
    """Mean and sample standard deviation over the seeds, and each of them; one seed has no deviation."""
    deviation = statistics.stdev(scores) if len(scores) > 1 else None
    return {"mean": statistics.mean(scores), "deviation": deviation, "runs": list(scores)}
