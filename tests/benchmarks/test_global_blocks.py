"""benchmarks/global_blocks.py: counts against formulas, and the table of the page is what the command prints."""

from pathlib import Path

import global_blocks
import pytest

N, D = 128 * 128, 512
COUNTS = {row.name: row.count() for row in global_blocks.ROWS}


@pytest.mark.parametrize("row", global_blocks.ROWS, ids=lambda row: row.name)
def test_parameters_are_those_of_the_paper(row: global_blocks.Row) -> None:
    """To the printed digits, but for external attention: its tied block has 0.53."""
    assert abs(COUNTS[row.name][0] / 2**20 - row.parameters) < (0.025 if row.name == "external" else 0.015)


@pytest.mark.parametrize(
    ("name", "macs"),
    [
        ("self-attention", 4 * N * D**2 + 2 * N**2 * D),
        ("DANet", 18 * N * D**2 + N * D * (D + 2 * D // 8) + N**2 * (D + D // 8) + 2 * N * D**2),
        ("A²", 4 * N * D**2 + 2 * N * D**2),
        ("DM", 8 * N * D**2 + 84 * N * D + (1 + 9 + 25 + 49) * D**2),
        ("ACF", 3 * N * D**2 + 2 * N * D * 21),
        ("Hamburger", 2 * N * D**2 + (2 + 2 * 7) * N * D * 64 + 7 * (2 * N * 64**2 + 2 * D * 64**2)),
        ("external", 2 * N * D**2 + 2 * N * D * 64),
    ],
)
def test_multiply_adds_are_those_of_the_equations(name: str, macs: int) -> None:
    assert COUNTS[name][1] == macs


def test_the_page_has_the_table() -> None:
    page = Path(__file__).parents[2] / "dev" / "first_evidence.md"
    assert global_blocks.table() in page.read_text()
