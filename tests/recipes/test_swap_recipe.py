"""The recipe of swaps: every cell once at a tiny size, taken up again, and what its table says."""

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

from tokenmix.train.config import SwapConfig
from tokenmix.train.sources import saved_config

ROOT = Path(__file__).parents[2]


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("recipes.classification.swap_nano")


def test_equal_steps_in_every_way(recipe: ModuleType, tmp_path: Path) -> None:
    plan = recipe.FULL
    cells = list(recipe.cells(plan, (0, 1)))
    assert len(cells) == len(set(cells)) == len({cell.folder for cell in cells})
    for cell in cells:
        parts = recipe.stages(cell, plan, tmp_path)
        assert sum(part["max_steps"] for part in parts) == cell.steps
        uses_labels = any(part.get("distill_from") != "layers" and part.get("distill") != 1.0 for part in parts)
        assert uses_labels == (cell.labels != "none")
        assert {part.get("limit") for part in parts} <= ({None, plan.few} if cell.labels == "few" else {None})
    assert {cell.seed for cell in cells[: len(cells) // 2]} == {0}, "the first seed is finished first"
    longest = max(plan.steps) * plan.student["batch_size"] / 60_000
    assert max(longest, max(plan.apart) * plan.student["batch_size"] / plan.few) <= plan.student["epochs"]


@pytest.mark.slow
def test_a_quick_run_is_taken_up_again(recipe: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe.main(recipe.Args(out=tmp_path, seeds=(0,), quick=True, hours=0.0))
    assert "0 of 20 cells; the same command continues" in capsys.readouterr().out
    recipe.main(recipe.Args(out=tmp_path, seeds=(0,), quick=True))
    first = json.loads((tmp_path / "swap_nano.json").read_text())
    runs = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("result.json")}
    recipe.main(recipe.Args(out=tmp_path, seeds=(0,), quick=True))
    assert json.loads((tmp_path / "swap_nano.json").read_text())["rows"] == first["rows"]
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("result.json")} == runs
    assert len(first["rows"]) == 20
    for folder in tmp_path.glob("*-8-0"):
        only = "mixers" if "mixers_first" in folder.name else "all"
        assert saved_config(folder / "0").swap == SwapConfig(swap=folder.name.split("-")[0], train_only=only)
    table = (tmp_path / "swap_nano.md").read_text()
    value = next(r for r in first["rows"] if (r["mixer"], r["labels"], r["way"]) == ("gating", "none", "logits"))
    assert f"| `gating` | logits | {value['mean']:.3f} |" in table
    assert "</svg>" in (tmp_path / "swap_nano.svg").read_text()
