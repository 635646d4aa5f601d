"""The training runs of a comparison: planned, and read back."""

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from tokenmix.errors import UserError, one_line
from tokenmix.files import inside, is_unused, make_folder, read_text, to_json, write_json
from tokenmix.lab.compare.results import Curve, Run, Sampling
from tokenmix.lab.compare.statistics import covariance_of_means, covariance_of_resamples, resample
from tokenmix.lab.compare.variants import naming, plan_variants
from tokenmix.lab.grid import Cell
from tokenmix.lab.registry import get_task
from tokenmix.lab.train.config import (
    BudgetConfig,
    CompareConfig,
    EngineConfig,
    LoopConfig,
    TrainConfig,
    comparison_config,
)
from tokenmix.lab.train.folder import read_part
from tokenmix.lab.train.metrics import FILE, INDEX, Metric, read_predictions
from tokenmix.lab.train.schema import Range, fitted

FREE = (
    "mixers",
    "variants",
    "seeds",
    "sizes",
    "config",
    "controls",
    "only",
    "merge",
    "out",
    "workers",
    "threads",
    "log_every",
    "checkpoint_every",
    "logger",
    *(field.name for field in fields(EngineConfig)),
)
"""Settings that may differ when a comparison is taken up again: they add runs, or leave their results as they are."""

Amount = Annotated[float, Range(least=0)]
Confusion = tuple[tuple[Annotated[int, Range(least=0)], ...], ...] | None
Share = Annotated[float | None, Range(least=0, most=1)]
SHARES = ("accuracy", "balanced_accuracy", "macro_f1", "f1", "auc", "miou", "instance_miou", "exact_match")
"""Metrics that are shares."""


def plan_runs(config: CompareConfig, out: Path, name: str = "") -> list[Cell]:
    """One run for each seed and variant, equal in all but its options; `name` is that of the comparison in a grid."""
    shared = {name: getattr(config, name) for name in ("task", "data", "model", "optim", "options")}
    budget = {field.name: getattr(config.loop, field.name) for field in fields(BudgetConfig)}
    cells = []
    variants = plan_variants(config)
    for seed in dict.fromkeys(config.seeds):
        for variant, options in variants.items():
            loop = LoopConfig(**budget, seed=seed, out=inside(out / "runs", f"{variant}-seed{seed}"))
            with naming(config, variant):
                run = TrainConfig(**shared, loop=loop).replace(**options)
            cells.append(Cell(f"{name}{'/' * bool(name)}{variant}-seed{seed}", run))
    return cells


def variant_of(cell: Cell) -> str:
    """The name of the variant that a run trains."""
    return cell.folder.name.rpartition("-seed")[0]


def claim_folder(out: Path, config: CompareConfig, name: str = "compare.json", free: Sequence[str] = FREE) -> None:
    """Write the file that says what a locked folder is for; raises as `check_folder`."""
    check_folder(out, config, name, free)
    make_folder(out)
    write_json(out / name, config.flat())


def check_folder(out: Path, config: CompareConfig, name: str = "compare.json", free: Sequence[str] = FREE) -> None:
    """Raise `UserError` if a folder is for something else than this comparison; nothing is written.

    `free` are the settings that may differ from those in the file.
    """
    file = out / name
    if file.exists():
        plain = json.loads(to_json(config.flat()))
        # A folder of an older version does not name a newer setting, which was at its default.
        before = json.loads(to_json(comparison_config(config.task).flat())) | read_part(out, file.name)
        other = [key for key in plain if key not in free and plain[key] != before.get(key)]
        if other:
            told = ", ".join(f"{key} {before.get(key)} instead of {plain[key]}" for key in other)
            raise UserError(f"{out} holds a comparison with {told}; give another --out, or the same settings")
    elif out.exists() and not (out.is_dir() and is_unused(out)):
        raise UserError(f"{out} is not empty and does not contain a comparison; give another --out")


def read_run(cell: Cell, failure: str, metric: str, out: Path) -> Run:
    """What a run folder holds: score, times, curves, confusion matrix."""
    try:
        return _read_run(cell, failure, metric, out)
    except (LookupError, TypeError, ValueError, csv.Error, StopIteration) as error:
        reason = error if isinstance(error, UserError) else type(error).__name__
        raise UserError(f"{cell.folder} is damaged ({reason}); remove it to train it again") from None


def _read_run(cell: Cell, failure: str, metric: str, out: Path) -> Run:
    file = cell.folder / "metrics.csv"
    rows = list(csv.DictReader(read_text(file).splitlines())) if file.exists() else []
    run = Run(
        seed=cell.config.loop.seed,
        folder=cell.folder.relative_to(out).as_posix(),
        status="failed",
        message=failure or "not finished",
        score_curve=_curve(rows, f"val_{metric}"),
        loss_curve=_curve(rows, "train_loss"),
    )
    if not cell.is_finished:
        return run
    result = cell.run.result
    metrics, rate = result["metrics"], f"{_unit(result)}_per_second"
    confusion = fitted(Confusion, metrics.get("confusion"), "confusion")
    return replace(
        run,
        status="finished",
        message="",
        score=fitted(Share if metric in SHARES else float | None, metrics[metric], metric),
        seconds=fitted(Amount, result["seconds"], "seconds"),
        rate=fitted(Amount, result[rate], rate),
        confusion=None if confusion is None else [list(row) for row in confusion],
    )


def read_sampling(runs: Sequence[tuple[Cell, Run]], metric: str, unit: str) -> Sampling | None:
    """How the scores of the finished runs vary together under the draw of the test samples that all of them have.

    None if a run kept no predictions, or the metric cannot be had from them.

    Raises:
        UserError: damaged predictions.
    """
    scored = [(cell, run) for cell, run in runs if run.score is not None]
    found = list[tuple[Cell, Metric, dict[str, Tensor], Tensor | None]]()
    for cell, _ in scored:
        with _damage_told(cell):
            rows = read_predictions(cell.folder)
            known = get_task(cell.config.task).make_metrics(cell.config, cell.run.description).get(metric)
            if rows is None or known is None:
                return None
            found.append((cell, known, rows, None if known.values is None else known.values(rows)))
    if not found:
        return None
    common = found[0][2][INDEX]
    for _, _, rows, _ in found[1:]:
        common = common[torch.isin(common, rows[INDEX])]
    number = len(common)
    if number < 2:
        return None
    scores: list[Tensor] = []
    means = all(values is not None for *_, values in found)
    for cell, known, rows, values in found:
        with _damage_told(cell):
            place = torch.searchsorted(rows[INDEX], common)
            if means and values is not None:
                scores.append(values[place])
                continue
            parts = list[Tensor]()
            for drawn in resample(number):
                weights = torch.zeros(len(drawn), len(rows[INDEX]), dtype=torch.float64)
                weights[:, place] = torch.from_numpy(drawn)
                parts.append(known.measure(rows, weights))
            scores.append(torch.cat(parts))
    covariance = (covariance_of_means if means else covariance_of_resamples)(torch.stack(scores).numpy())
    return Sampling(number, unit, [run.folder for _, run in scored], covariance.tolist())


@contextmanager
def _damage_told(cell: Cell) -> Iterator[None]:
    try:
        yield
    except (LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = error if isinstance(error, UserError) else f"{FILE}: {one_line(error)}"
        raise UserError(f"{cell.folder} is damaged ({reason}); remove it to train it again") from None


def _curve(rows: Sequence[dict[str, Any]], column: str) -> Curve:
    kept = [row for row in rows if row.get(column)]
    names = (_unit(kept[0]), "seconds", column) if kept else ()
    return Curve(*([float(row[name]) for row in kept] for name in names))


def _unit(names: Iterable[str]) -> str:
    """What a run counted, from the name of its rate."""
    return next(name.removesuffix("_per_second") for name in names if name.endswith("_per_second"))
