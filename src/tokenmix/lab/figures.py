"""Figures whose text may come from files: names of classes and parts, names of files, sentences."""

from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.text import Text

from tokenmix.errors import printable
from tokenmix.files import replacing


def save_figure(figure: Figure, file: Path, dpi: float) -> None:
    """Write a figure with its text as it is: a dollar begins no formula, and control characters are escaped."""
    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        text.set_parse_math(False)
        text.set_text("\n".join(map(printable, text.get_text().split("\n"))))
    with replacing(file) as partial:
        figure.savefig(partial, dpi=dpi)
