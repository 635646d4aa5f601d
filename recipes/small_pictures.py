"""Pictures for the docs, which take no more than 100 kB each."""

import io
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image


def save_small(figure: Figure, file: Path, *, dpi: int = 80, colors: int = 64) -> None:
    """Save a figure as a PNG of few colours."""
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=dpi)
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.open(buffer).convert("RGB").quantize(colors).save(file, optimize=True)
