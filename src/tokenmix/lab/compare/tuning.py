"""The learning rate of each variant, chosen on validation samples by short runs."""

import math
from collections.abc import Mapping
from pathlib import Path

from tokenmix.errors import UserError
from tokenmix.files import inside
from tokenmix.lab.grid import Cell
from tokenmix.lab.train.config import CompareConfig
from tokenmix.lab.train.plan import make_plan
from tokenmix.lab.train.schema import fitted

SEED = 0
"""Of all short runs, so that other seeds of a comparison change no choice."""
Trials = dict[tuple[str, float], Cell]
"""The short runs by variant and learning rate."""
Scores = dict[float, float | None]
"""Scores on validation samples by learning rate; None where a run has none."""


def rates_of(config: CompareConfig) -> tuple[float, ...]:
    """The learning rates that are tried, the lowest first; () if none are. `UserError` for text of another form."""
    if config.tune is None:
        return ()
    lr = config.optim.lr
    name, _, listed = config.tune.partition("=")
    try:
        rates = (lr / 2, lr, 2 * lr) if config.tune == "auto" else tuple(map(float, listed.split(",")))
    except ValueError:
        rates = ()
    # Six digits name the folder of a run.
    different = sorted({float(f"{rate:g}") for rate in rates})
    if name not in ("lr", "auto") or len(different) < 2 or not all(0 < rate < math.inf for rate in different):
        raise UserError(
            f"tune={config.tune!r} is not valid; give --tune lr=1e-3,2e-3,4e-3 with two rates or more, or auto"
        )
    return tuple(different)


def plan_trials(config: CompareConfig, first: Mapping[str, Cell], num_train: int, out: Path) -> Trials:
    """A run of half the steps for each variant and rate.

    Args:
        config: with what is tried.
        first: the first run of each variant that is tuned.
        num_train: training samples.
        out: folder of the comparison.
    """
    trials: Trials = {}
    for variant, cell in first.items():
        steps = max(1, make_plan(cell.config, num_train).total_steps // 2)
        for rate in rates_of(config):
            name = f"{variant}-lr{rate:g}-seed{SEED}"
            trial = cell.config.replace(lr=rate, max_steps=steps, seed=SEED, out=inside(out / "tune", name))
            trials[variant, rate] = Cell(f"{cell.name.rpartition('/')[0]}/tune/{name}".removeprefix("/"), trial)
    return trials


def validation_score(cell: Cell, metric: str) -> float | None:
    """The metric of a run's best epoch on validation samples; None if the run has not finished."""
    if not cell.is_finished:
        return None
    return fitted(float | None, cell.run.result["validation"].get(metric), metric)


def trial_scores(trials: Trials, metric: str) -> dict[str, Scores]:
    """The scores on validation samples of each variant."""
    found: dict[str, Scores] = {}
    for (variant, rate), cell in trials.items():
        found.setdefault(variant, {})[rate] = validation_score(cell, metric)
    return found


def best_rate(scores: Scores, lr: float, higher: bool) -> float:
    """The rate of the best score, of equal ones the nearest to `lr`; `lr` if there is no score."""
    sign = 1 if higher else -1
    ranked = [(sign * score, -abs(math.log(rate / lr)), rate) for rate, score in scores.items() if score is not None]
    return max(ranked)[-1] if ranked else lr
