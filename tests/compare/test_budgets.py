"""What is equal for all variants, and learning rates chosen on validation samples."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tokenmix.errors import UserError
from tokenmix.lab.compare.compare import compare
from tokenmix.lab.compare.notes import budget_sentence, uncertainty
from tokenmix.lab.compare.results import Variant, load_results
from tokenmix.lab.compare.schedule import (
    SETUP,
    START,
    Pace,
    best_rate,
    equal_steps,
    rates_of,
    run_seconds,
    side_by_side,
)
from tokenmix.lab.compare.variants import plan_runs
from tokenmix.lab.registry import get_task
from tokenmix.lab.train.config import CompareConfig
from tokenmix.profiling.machine import Timing
from verbs import refused

pytestmark = pytest.mark.usefixtures("few_tokens")


def small(out: Path, **changes: Any) -> CompareConfig:
    settings = {
        "data": "digits",
        "limit": 64,
        "limit_eval": 20,
        "validation": 16,
        "batch_size": 16,
        "epochs": 2,
        "device": "cpu",
        "controls": False,
        "jobs": 0,
        "mixers": ("self", "gating"),
        "model_kwargs": {"embed_dim": 16, "depth": 1, "num_heads": 2},
        "out": out,
    }
    return CompareConfig().replace(**{**settings, **changes})


def of_costs(**costs: tuple[int | None, float]) -> list[Variant]:
    return [Variant(n, "", 1, macs, step=Timing.of([seconds])) for n, (macs, seconds) in costs.items()]


def test_steps_make_the_budget_equal_and_are_kept(tmp_path: Path) -> None:
    variants = of_costs(self=(400, 0.02), external=(100, 0.03), gating=(300, 0.01))
    by_macs, by_seconds = (CompareConfig().replace(budget=budget) for budget in ("macs", "seconds"))
    assert equal_steps(CompareConfig(), tmp_path, 90, variants) == {}
    (tmp_path / "macs").mkdir()
    assert equal_steps(by_macs, tmp_path / "macs", 90, variants) == {"self": 90, "external": 360, "gating": 120}
    assert equal_steps(by_seconds, tmp_path, 90, variants[:2]) == {"self": 90, "external": 60}
    # Measured again, all are twice as slow and external more: what was trained keeps its steps.
    again = of_costs(gating=(300, 0.02), self=(400, 0.04), external=(100, 0.08))
    assert equal_steps(by_seconds, tmp_path, 90, again) == {"self": 90, "external": 60, "gating": 180}
    assert json.loads((tmp_path / "steps.json").read_text()) == {"self": 90, "external": 60, "gating": 180}
    with pytest.raises(UserError, match="macs of self are not known; give --budget images"):
        equal_steps(by_macs, tmp_path, 90, of_costs(self=(None, 0.1)))
    (tmp_path / "steps.json").write_text('{"self": "many"}')
    with pytest.raises(UserError, match="steps of self='many' must be a whole number"):
        equal_steps(by_seconds, tmp_path, 90, variants)


def test_rates_are_read_and_the_best_is_chosen() -> None:
    config = CompareConfig().replace(lr=3e-3)
    assert rates_of(config) == ()
    assert rates_of(config.replace(tune="auto")) == pytest.approx((1.5e-3, 3e-3, 6e-3))
    assert rates_of(config.replace(tune="lr=4e-3,1e-3,1e-3")) == (1e-3, 4e-3)
    for wrong in ("lr=1", "lr=a,b", "lr=0,1", "lr=nan,1", "wd=1,2", "1,2", ""):
        with pytest.raises(UserError, match="is not valid; give --tune lr=1e-3,2e-3,4e-3"):
            rates_of(config.replace(tune=wrong))
    scores = {1e-3: 0.5, 3e-3: 0.7, 6e-3: 0.7, 9e-3: None}
    assert best_rate(scores, 3e-3, higher=True) == 3e-3
    assert best_rate(scores, 3e-3, higher=False) == 1e-3
    assert best_rate({1e-3: None}, 3e-3, higher=True) == 3e-3


def test_each_variant_is_trained_with_its_best_rate_for_equal_multiply_adds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small(tmp_path / "out", tune="lr=1e-9,0.01", budget="macs", seeds=(1,))
    compare(config=config)
    printed = capsys.readouterr().out
    assert "[1/4] tune, self-lr1e-09, seed 0: validation accuracy 0." in printed
    results = load_results(tmp_path / "out/results.json")
    steps = {variant.name: variant.steps for variant in results.variants}
    assert steps["self"] == 8
    for variant in results.variants:
        assert variant.macs
        assert results.variants[0].macs
        assert variant.steps == round(8 * results.variants[0].macs / variant.macs)
        trials = {f"{rate:g}": tmp_path / f"out/tune/{variant.name}-lr{rate:g}-seed0" for rate in (1e-9, 0.01)}
        found = {rate: json.loads((run / "result.json").read_text()) for rate, run in trials.items()}
        assert variant.tuned == {rate: result["validation"]["accuracy"] for rate, result in found.items()}
        best = max(variant.tuned.items(), key=lambda pair: (pair[1] or 0, -abs(math.log(float(pair[0]) / 2e-3))))
        assert f"{variant.learning_rate:g}" == best[0]
        run = json.loads((tmp_path / "out" / variant.runs[0].folder / "config.json").read_text())["config"]
        assert (run["optim"]["lr"], run["loop"]["max_steps"]) == (variant.learning_rate, variant.steps)
        trial = json.loads((trials["0.01"] / "config.json").read_text())["config"]
        assert trial["loop"]["max_steps"] == (variant.steps or 0) // 2
    told = budget_sentence(results)
    assert "equal multiply-adds of training (steps: self 8, gating " in told
    assert "chosen on validation samples" in told
    assert any("lowest or highest that was tried: self, gating" in note for note in uncertainty(results))
    page = (tmp_path / "out/report.html").read_text()
    assert "chosen on validation samples" in page
    assert "which are equal for all" not in page
    # Another seed needs no more short runs, and nothing is chosen anew.
    compare(config=config.replace(seeds=(1, 2)))
    printed = capsys.readouterr().out
    assert printed.count("done before") == 4 + 2
    assert "[4/4] gating, seed 2: accuracy" in printed
    compare(config=CompareConfig().replace(merge=(tmp_path / "out",), out=tmp_path / "merged"), quiet=True)
    merged = load_results(tmp_path / "merged/results.json")
    assert [variant.tuned for variant in merged.variants] == [variant.tuned for variant in results.variants]


def test_equal_seconds_use_the_measured_step_and_stay(tmp_path: Path) -> None:
    config = small(tmp_path / "out", budget="seconds")
    compare(config=config, quiet=True)
    kept = json.loads((tmp_path / "out/steps.json").read_text())
    results = load_results(tmp_path / "out/results.json")
    assert {variant.name: variant.steps for variant in results.variants} == kept
    step = {variant.name: variant.step.median for variant in results.variants if variant.step}
    assert kept == {"self": 8, "gating": max(1, round(8 * step["self"] / step["gating"]))}
    assert "equal seconds of training by the time of a step, measured before" in budget_sentence(results)
    compare(config=config.replace(seeds=(0, 1)), quiet=True)
    assert json.loads((tmp_path / "out/steps.json").read_text()) == kept
    with pytest.raises(UserError, match="--merge takes no comparisons with --budget seconds"):
        compare(config=CompareConfig().replace(merge=(tmp_path / "out",), out=tmp_path / "merged"), quiet=True)


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compare", "--data", "digits", "--limit", "64", "--batch-size", "16", "--out", str(tmp_path / "x")]
    assert "--budget cannot be 'time'" in refused(capsys, *words, "--budget", "time")
    assert "tune='fast' is not valid" in refused(capsys, *words, "--tune", "fast")
    assert "none are held out; give --validation" in refused(capsys, *words, "--tune", "auto", "--validation", "0")
    assert not (tmp_path / "x").exists()


def test_runs_side_by_side_begin_as_soon_as_a_process_is_free() -> None:
    assert side_by_side([3.0, 4.0, 5.0], 0) == 12.0
    # Three runs in two processes: the third waits for the first.
    assert side_by_side([3.0, 4.0, 5.0], 2) == 3.0 + 5.0 + 2 * START
    assert side_by_side([], 2) == 0.0


def test_a_run_takes_its_steps_its_evaluations_and_the_reading_of_its_data(tmp_path: Path) -> None:
    cell = plan_runs(small(tmp_path, mixers=("self",)), tmp_path)[0]
    data = get_task(cell.config.task).load_data(cell.config)
    pace = Pace(read=7.0, step={"self": 0.5}, evaluate={"self": 0.25})
    # Two epochs of four steps; after each one batch for validation; one and a half times two test batches.
    assert run_seconds(pace, "self", cell, data) == 7.0 + SETUP + 8 * 0.5 + (2 * 1 + 1.5 * 2) * 0.25
