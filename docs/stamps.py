"""What each picture of the pages was made from: `docs/figures.json`, which tests/test_figures.py compares.

A drawing of numbers keeps the numbers. A picture of measurements or of trained networks keeps a digest of the JSON, the
recipe or the settings behind it. Comments, prose and the style of a drawing are no part of it.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from tokenmix.files import to_json

__all__ = ["DOCS", "FILE", "digest", "numbers", "stamp"]

DOCS = Path(__file__).parent
FILE = DOCS / "figures.json"


def digest(*values: Any) -> str:
    """A short SHA-256 of data, in whatever order its keys are."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def numbers(figure: Figure) -> list[list[float]]:
    """The heights of all lines of a drawing."""
    return [[float(f"{y:.3g}") for y in line.get_ydata()] for axes in figure.axes for line in axes.lines]


def stamp(name: str, value: object) -> None:
    """Note what a picture was made from."""
    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    FILE.write_text(to_json(dict(sorted({**known, name: value}.items()))))
