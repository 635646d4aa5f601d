"""The plateau recipe runs from end to end in its quick form, and its cells are taken up again."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenmix.layers import ExternalAttention, GatedMLP, MultiHeadExternalAttention

ROOT = Path(__file__).parents[2]
DIGITS: dict[str, Any] = {
    "data": "digits",
    "model": "mixer_nano",
    "model_kwargs": {"embed_dim": 16, "depth": 1, "num_heads": 2},
    "limit": 64,
    "batch_size": 16,
    "epochs": 1,
    "validation": 16,
    "limit_eval": 20,
    "threads": 1,
    "device": "cpu",
}


@pytest.fixture(autouse=True)
def _recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


def test_the_quick_form_writes_families_and_ablations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from recipes.classification import plateau

    for part in ("families", "ablations", "emoji"):
        assert plateau.main(plateau.Args(out=tmp_path, part=part, seeds=(0, 1), jobs=0, quick=True))  # type: ignore[arg-type]
    lines = capsys.readouterr().out.splitlines()
    assert any("tune-gating-0.001: validation accuracy" in line and "final accuracy" in line for line in lines)
    found = json.loads((tmp_path / "plateau.json").read_text())
    for family, row in found["rates"].items():
        assert row["lr"] == float(max(row["validation"], key=row["validation"].__getitem__)), family
    assert found["families"].keys() == {"equal images", "equal multiply-adds", "equal time"}
    for rows in found["families"].values():
        assert rows.keys() == {"self", "gating"}
        assert all(len(row["runs"]) == len(row["validation"]) == len(row["curves"]) == 2 for row in rows.values())
    depth = found["ablations"]["depth"]["self, 8 blocks"]["maps"]
    assert [len(blocks) for blocks in depth] == [8, 8]
    assert found["emoji"]["equal images"].keys() == {"self", "gating"}
    table = (tmp_path / "plateau.md").read_text()
    assert "| ablation: gate's start | accuracy |" in table
    assert "| gating | never | never |" in table or "| gating | " in table
    assert (tmp_path / "plateau.png").exists()
    # Nothing is trained a second time.
    plateau.main(plateau.Args(out=tmp_path, part="ablations", seeds=(0, 1), jobs=0, quick=True))
    assert capsys.readouterr().out == ""


def test_the_curves_cross_where_one_stays_above() -> None:
    from recipes.classification.plateau import crossing

    def row(*accuracies: float) -> dict[str, Any]:
        return {"curves": [{"images": [100, 200, 300, 400], "seconds": [1, 2, 3, 4], "accuracy": list(accuracies)}]}

    slow, fast = row(0.4, 0.6, 0.9, 0.95), row(0.6, 0.7, 0.8, 0.9)
    # Straight lines between 200 and 300: 0.6 + 0.3 t = 0.7 + 0.1 t at t = 0.5.
    assert crossing(slow, fast, "images") == pytest.approx(250, abs=3)
    assert crossing(slow, fast, "seconds") == pytest.approx(2.5, abs=0.03)
    assert crossing(fast, slow, "images") is None
    assert crossing(fast, row(0.1, 0.1, 0.1, 0.1), "images") == pytest.approx(0, abs=3)


def test_cells_stop_at_the_deadline_and_go_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from recipes.cells import Cell, Runner

    cells = [Cell(f"cell-{seed}", {**DIGITS, "seed": seed}) for seed in (0, 1)]
    runner, kept = Runner(tmp_path / "runs", 0, time.monotonic()), tmp_path / "kept.json"
    assert runner.results(cells) == {}
    assert not runner.complete
    assert not any(tmp_path.iterdir())
    found = Runner(tmp_path / "runs", 0, kept=kept).results(cells)
    assert found.keys() == {"cell-0", "cell-1"}
    assert "[2/2] cell-1: validation accuracy" in capfd.readouterr().out
    # On another machine, without the run folders: nothing is trained, unless the settings are others.
    shutil.rmtree(tmp_path / "runs")
    assert Runner(tmp_path / "runs", 0, time.monotonic(), kept).results(cells) == found
    other = Runner(tmp_path / "runs", 0, time.monotonic(), kept)
    assert other.results([Cell("cell-0", {**DIGITS, "seed": 2}), cells[1]]) == {"cell-1": found["cell-1"]}
    assert not other.complete


@pytest.mark.slow
def test_ctrl_c_saves_the_cells_and_the_same_command_goes_on(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "from pathlib import Path\n"
        "from recipes.cells import Cell, Runner\n"
        f"SETTINGS = {DIGITS | {'epochs': 400, 'checkpoint_every': 5}!r}\n"
        "if __name__ == '__main__':\n"
        f"    cells = [Cell(f'cell-{{seed}}', SETTINGS | {{'seed': seed}}) for seed in (0, 1)]\n"
        f"    Runner(Path({str(tmp_path / 'runs')!r}), 2).results(cells)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    process = subprocess.Popen([sys.executable, str(program)], env=environment, start_new_session=True)
    checkpoints = [tmp_path / "runs" / f"cell-{seed}" / "checkpoints" / "last" / "meta.json" for seed in (0, 1)]
    while not all(file.exists() for file in checkpoints):
        assert process.poll() is None
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=300) != 0
    steps = [json.loads(file.read_text())["progress"]["step"] for file in checkpoints]
    assert all(0 < step < 400 * 4 for step in steps)
    assert subprocess.run([sys.executable, str(program)], env=environment, check=False).returncode == 0
    for seed in (0, 1):
        assert json.loads((tmp_path / "runs" / f"cell-{seed}" / "result.json").read_text())["steps"] == 1600


def test_variants_differ_from_their_layers_in_one_thing() -> None:
    from recipes.classification.variants import HeadMemories, LinearStart, Unnormalized

    torch.manual_seed(0)
    x = torch.randn(2, 5, 16)
    shared = MultiHeadExternalAttention(16, num_heads=2, expansion=2, num_slots=3, memory_bias=True)
    own = HeadMemories(16, num_heads=2, expansion=2, num_slots=3)
    own.query.load_state_dict(shared.query.state_dict())
    own.out.load_state_dict(shared.out.state_dict())
    assert shared.memory.value_memory is not None
    with torch.no_grad():
        own.keys.copy_(shared.memory.key_memory.expand_as(own.keys))
        own.values.copy_(shared.memory.value_memory.expand_as(own.values))
    torch.testing.assert_close(own(x), shared(x))
    assert own.macs(5) == shared.macs(5)

    plain = Unnormalized(16, num_slots=3)
    assert plain.state_dict().keys() == ExternalAttention(16, num_slots=3).state_dict().keys()
    changed = x.clone()
    changed[:, 0] += 1
    torch.testing.assert_close(plain(changed)[:, 1:], plain(x)[:, 1:])

    started, near = LinearStart(16, 64), GatedMLP(16, 64)
    assert started.gating.weight.std().item() == pytest.approx(1 / 8, rel=0.1)
    assert near.gating.weight.std().item() < 1e-5
