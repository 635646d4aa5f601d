"""docs/guides/cost.md: its table is that of the committed results."""

import importlib.util
import re
import statistics
from pathlib import Path

import pytest

from suite.results import read_results

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tables():
    pytest.importorskip("matplotlib")
    spec = importlib.util.spec_from_file_location("docs_benchmarks", ROOT / "docs" / "benchmarks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_has_the_committed_numbers(tables) -> None:
    """`python docs/benchmarks.py` would change nothing."""
    text = tables.PAGE.read_text()
    assert tables.page(text) == text
    dates = re.findall(r"`, (\d{4}-\d\d-\d\d) \|", text)
    assert dates == sorted(dates, reverse=True)


def test_losses_are_bold_and_none_is_left_out(tables) -> None:
    name, results = tables.machines()[0]
    rows = tables.against_packages(results)
    read = [read_results(file) for file in (ROOT / "dev" / "benchmarks" / name / "results").glob("*.json")]
    packages = {v.name for r in read for row in r.rows for v in row.variants if v.role == "peer"}
    assert {other for _, other in rows} == packages
    lines = tables.table().splitlines()
    for (case, other), (ratio, _, _) in rows.items():
        cell = next(line for line in lines if line.startswith(f"| {case} | {other} |")).split("|")[3]
        assert cell.strip().startswith("**") == (ratio.q1 > 1)


def test_every_loop_is_shown_with_the_losses_in_bold(tables) -> None:
    found = tables.latest("end_to_end")
    ratios = [median for row in found["rows"] for median, _, _ in row["ratios"].values()]
    cells = [line.split("|")[4] for line in tables.loops().splitlines() if line.startswith("|")][2:]
    shown = [bold for cell in cells for bold in re.findall(r": (\*\*)?[\d.]+(?:\*\*)? \(", cell)]
    assert [bold == "**" for bold in shown] == [median < 1 for median in ratios]


def test_start_up_is_shown_with_what_is_added(tables) -> None:
    found = tables.latest("startup")
    lines = tables.start().splitlines()
    for row in found["rows"]:
        added = round(statistics.median(a - b for a, b in zip(row["ours"], row["bare"], strict=True)), 2)
        assert any(line.startswith(f"| {row['name']} |") and f"| {added:z.1f} (" in line for line in lines)


def test_large_inputs_are_shown_with_their_memory(tables) -> None:
    found = tables.latest("large_inputs")
    lines = tables.large().splitlines()
    for row in found["rows"]:
        assert any(f"{row['memory'][-1] / 2**20:,.0f} | {row['growth']:.2f}" in line for line in lines)
