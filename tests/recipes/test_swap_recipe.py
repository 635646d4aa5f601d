"""The recipe of swaps: every cell once at a tiny size, taken up again, and what its table says."""

import importlib
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

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
    assert [cell.steps for cell in cells] == sorted(cell.steps for cell in cells), "short cells of all seeds come first"
    longest = max(plan.steps) * plan.student["batch_size"] / 60_000
    assert max(longest, max(plan.apart) * plan.student["batch_size"] / plan.few) <= plan.student["epochs"]


@pytest.mark.slow
def test_a_quick_run_is_resumed(
    recipe: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe.main(recipe.Args(out=tmp_path, seeds=(0,), quick=True, hours=0.0))
    assert "0 of 20 cells; the same command continues" in capsys.readouterr().out
    finish = recipe.finish_run

    def stop_at_gating(config: Any, **more: Any) -> Path:
        if "gating" in str(config.loop.out):
            raise KeyboardInterrupt
        only = "mixers" if "mixers_first-8-0/0" in str(config.loop.out) else "all"
        assert config.swap.train_only == only
        return finish(config, **more)

    monkeypatch.setattr(recipe, "finish_run", stop_at_gating)
    with pytest.raises(KeyboardInterrupt):
        recipe.main(recipe.Args(out=tmp_path, seeds=(0,), quick=True))
    monkeypatch.setattr(recipe, "finish_run", finish)
    kept = json.loads((tmp_path / "swap_nano_cells.json").read_text())["cells"]
    assert 0 < len(kept) < 20
    recipe.main(recipe.Args(out=tmp_path, seeds=(0,), quick=True))
    cells = json.loads((tmp_path / "swap_nano_cells.json").read_text())["cells"]
    assert cells[: len(kept)] == kept
    first = json.loads((tmp_path / "swap_nano.json").read_text())
    recipe.main(recipe.Args(out=tmp_path, seeds=(0,), quick=True, hours=0.0))
    assert json.loads((tmp_path / "swap_nano.json").read_text())["rows"] == first["rows"]
    assert len(first["rows"]) == 20
    table = (tmp_path / "swap_nano.md").read_text()
    value = next(r for r in first["rows"] if (r["mixer"], r["labels"], r["way"]) == ("gating", "none", "logits"))
    assert f"| `gating` | logits | {value['mean']:.3f} |" in table
    assert "</svg>" in (tmp_path / "swap_nano.svg").read_text()


def test_the_guide_says_what_was_measured() -> None:
    measured = (ROOT / "recipes/classification/swap_nano.md").read_text().splitlines()
    guide = (ROOT / "docs/guides/swap.md").read_text().splitlines()
    rows = [line for line in guide if re.search(r"\| \d\.\d\d\d", line)]
    assert rows
    assert set(rows) <= set(measured)
