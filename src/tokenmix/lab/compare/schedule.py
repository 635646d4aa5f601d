"""Length and learning rate of each variant's training, set before the training.

The number of steps makes samples, multiply-adds or seconds equal. Short runs choose learning rates on validation
samples.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from tokenmix.errors import UserError
from tokenmix.files import inside, write_json
from tokenmix.lab.compare.results import Variant
from tokenmix.lab.compare.variants import variant_of
from tokenmix.lab.grid import Cell
from tokenmix.lab.train.config import CompareConfig
from tokenmix.lab.train.folder import read_part
from tokenmix.lab.train.plan import make_plan
from tokenmix.lab.train.schema import Range, fitted
from tokenmix.lab.train.task import TaskData

FILE = "steps.json"
"""File with the steps of each variant, because a repeated time measurement differs."""
SEED = 0
"""Seed of all short runs, so that other seeds of a comparison change no choice."""
Trials = dict[tuple[str, float], Cell]
"""Short runs by variant and learning rate."""
Scores = dict[float, float | None]
"""Validation scores by learning rate; None without a score."""
START = 10.0
"""Seconds that a process takes to start; shorter runs train in turn."""
SETUP = 1.0
"""Seconds of a run besides data, steps and evaluations: building the model, the first step, writing files."""


@dataclass(frozen=True)
class Pace:
    """Measured seconds for the data, and per training and test batch by variant."""

    read: float
    step: Mapping[str, float] = field(default_factory=dict)
    evaluate: Mapping[str, float] = field(default_factory=dict)


def run_seconds(pace: Pace, variant: str, cell: Cell, data: TaskData) -> float:
    """Estimated seconds of a run, with its evaluations.

        read + setup + batches * step + (epochs * validation + 1.5 * test) / batch * evaluate

    The test samples are evaluated once, or twice if an earlier epoch was better.
    """
    plan = make_plan(cell.config, data.num_train)
    size = min(plan.batch_size, getattr(data, "test_batch", None) or plan.batch_size)
    tested = math.ceil(data.num_validation / size) * plan.epochs + 1.5 * math.ceil(data.num_test / size)
    batches = plan.total_steps * plan.accumulate
    return pace.read + SETUP + batches * pace.step.get(variant, 0.0) + tested * pace.evaluate.get(variant, 0.0)


def side_by_side(seconds: Sequence[float], jobs: int) -> float:
    """Total time of runs that start in this order as `jobs` processes become free; 0: one after another."""
    ends = [0.0] * max(1, jobs)
    for one in seconds:
        ends[ends.index(min(ends))] += one + (START if jobs else 0.0)
    return max(ends)


def equal_steps(config: CompareConfig, out: Path, total: int, measured: Sequence[Variant]) -> dict[str, int]:
    """Steps of each variant, {} if all have the same. The folder stores them for later calls.

        steps_v = total * cost_1 / cost_v

    with the cost of a sample or a step. The first variant has `total` steps. `UserError` for unknown multiply-adds.
    """
    if config.budget == "images":
        return {}
    seconds = {v.name: v.step.median if v.step else None for v in measured}
    costs: Mapping[str, float | None] = {v.name: v.macs for v in measured} if config.budget == "macs" else seconds
    unknown = next((name for name, cost in costs.items() if not cost), None)
    if unknown is not None:
        raise UserError(f"the {config.budget} of {unknown} are not known; give --budget images")
    known = {name: cost for name, cost in costs.items() if cost}
    before = read_part(out, FILE) if (out / FILE).exists() else {}
    kept = {name: fitted(Annotated[int, Range(least=1)], steps, f"steps of {name}") for name, steps in before.items()}
    base, steps = next(((name, n) for name, n in kept.items() if name in known), (next(iter(known)), total))
    scaled = {name: max(1, round(steps * known[base] / cost)) for name, cost in known.items()}
    write_json(out / FILE, scaled | kept)
    return scaled | kept


def with_steps(cells: Sequence[Cell], steps: Mapping[str, int], num_train: int) -> list[Cell]:
    """The runs with these steps, in as many epochs as needed."""
    found = []
    for cell in cells:
        number = steps.get(variant_of(cell))
        if number is None:
            found.append(cell)
            continue
        epochs = math.ceil(number / make_plan(cell.config, num_train).steps_per_epoch)
        config = cell.config.replace(max_steps=number, epochs=max(epochs, cell.config.loop.epochs or 0))
        found.append(replace(cell, config=config))
    return found


def rates_of(config: CompareConfig) -> tuple[float, ...]:
    """Learning rates to try, lowest first; () for none. `UserError` for text of another form."""
    if config.tune is None:
        return ()
    lr = config.optim.lr
    name, _, listed = config.tune.partition("=")
    try:
        rates = (lr / 2, lr, 2 * lr) if config.tune == "auto" else tuple(map(float, listed.split(",")))
    except ValueError:
        rates = ()
    if own := next((name for name, row in config.variants.items() if "lr" in row), None):
        raise UserError(f"tune chooses each variant's learning rate, and {own} has one; leave one of them out")
    # Six digits name a run's folder.
    different = sorted({float(f"{rate:g}") for rate in rates})
    if name not in ("lr", "auto") or len(different) < 2 or not all(0 < rate < math.inf for rate in different):
        raise UserError(
            f"tune={config.tune!r} is not valid; give --tune lr=1e-3,2e-3,4e-3 with two rates or more, or auto"
        )
    return tuple(different)


def plan_trials(config: CompareConfig, first: Mapping[str, Cell], num_train: int, out: Path) -> Trials:
    """A run of half the steps for each rate and variant; `first` has each variant's first run."""
    trials: Trials = {}
    for variant, cell in first.items():
        steps = max(1, make_plan(cell.config, num_train).total_steps // 2)
        for rate in rates_of(config):
            name = f"{variant}-lr{rate:g}-seed{SEED}"
            trial = cell.config.replace(lr=rate, max_steps=steps, seed=SEED, out=inside(out / "tune", name))
            trials[variant, rate] = Cell(f"{cell.name.rpartition('/')[0]}/tune/{name}".removeprefix("/"), trial)
    return trials


def trial_scores(trials: Trials, metric: str) -> dict[str, Scores]:
    """Validation scores of each variant's best epochs; None for an unfinished run."""
    found: dict[str, Scores] = {}
    for (variant, rate), cell in trials.items():
        score = cell.run.result["validation"].get(metric) if cell.is_finished else None
        found.setdefault(variant, {})[rate] = fitted(float | None, score, metric)
    return found


def best_rate(scores: Scores, lr: float, higher: bool) -> float:
    """The rate with the best score, for ties the nearest to `lr`; `lr` without a score."""
    sign = 1 if higher else -1
    ranked = [(sign * score, -abs(math.log(rate / lr)), rate) for rate, score in scores.items() if score is not None]
    return max(ranked)[-1] if ranked else lr
