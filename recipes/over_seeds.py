"""Runs that differ in their seed alone: their results, what these have in common, and how far they lie apart."""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def read_result(run: Path) -> dict[str, Any]:
    """A finished run's result.json, with the commit that it was started at."""
    result = json.loads((run / "result.json").read_text())
    commit = json.loads((run / "config.json").read_text())["environment"]["commit"]
    result["commit"] = "no git checkout" if commit is None else commit[:7]
    return result


def over_seeds(scores: Sequence[float]) -> dict[str, Any]:
    """Mean and sample standard deviation over the seeds, and each of them; one seed has no deviation."""
    deviation = statistics.stdev(scores) if len(scores) > 1 else None
    return {"mean": statistics.mean(scores), "deviation": deviation, "runs": list(scores)}


def commits(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """The commits at which the runs were made."""
    return sorted({result["commit"] for result in results})


def shown(found: Mapping[str, Any], digits: int) -> str:
    """A mean with its spread."""
    spread = "" if found["deviation"] is None else f" ± {found['deviation']:.{digits}f}"
    return f"{found['mean']:.{digits}f}{spread}"
