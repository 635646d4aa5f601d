"""The training runs of a comparison: planned, carried out or taken up again, and read back."""

import csv
import json
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from tokenmix.compare.results import Curve, Run
from tokenmix.errors import UserError
from tokenmix.train.config import BudgetConfig, CompareConfig, LoopConfig, TrainConfig
from tokenmix.train.files import LOCKS, make_folder, write_json
from tokenmix.train.sources import read_part

FREE = ("mixers", "seeds", "out", "workers", "threads", "log_every", "checkpoint_every", "logger")
"""Settings that may differ when a comparison is taken up again: they add runs, or leave their results as they are."""


@dataclass(frozen=True)
class RunPlan:
    """One run that the comparison needs."""

    mixer: str
    seed: int
    config: TrainConfig

    @property
    def folder(self) -> Path:
        """Its run folder."""
        assert self.config.loop.out is not None
        return self.config.loop.out


def plan_runs(config: CompareConfig, out: Path) -> list[RunPlan]:
    """One run for each seed and mixer, equal in all but the mixer."""
    shared = {name: getattr(config, name) for name in ("task", "data", "model", "optim", "options")}
    budget = {field.name: getattr(config.loop, field.name) for field in fields(BudgetConfig)}
    return [
        RunPlan(
            mixer,
            seed,
            TrainConfig(
                **shared, loop=LoopConfig(**budget, seed=seed, out=out / "runs" / f"{mixer}-seed{seed}")
            ).replace(model_kwargs={**config.model.model_kwargs, "mixer": mixer}),
        )
        for seed in dict.fromkeys(config.seeds)
        for mixer in dict.fromkeys(config.mixers)
    ]


def claim_folder(out: Path, config: CompareConfig) -> None:
    """Write compare.json, which says what the folder is for; `UserError` if it is for something else."""
    file = out / "compare.json"
    plain = json.loads(json.dumps(config.flat(), default=str))
    if file.exists():
        before = read_part(out, file.name)
        other = [key for key in plain if key not in FREE and plain[key] != before.get(key)]
        if other:
            told = ", ".join(f"{key} {before.get(key)} instead of {plain[key]}" for key in other)
            raise UserError(f"{out} holds a comparison with {told}; give another --out, or the same settings")
    elif out.exists() and (not out.is_dir() or any(entry.name not in LOCKS for entry in out.iterdir())):
        raise UserError(f"{out} is not empty and does not contain a comparison; give another --out")
    make_folder(out)
    write_json(file, plain)


def run_twin(plan: RunPlan) -> str:
    """Train one variant, or continue where it stopped; returns what went wrong, "" if nothing did.

    One variant's failure is reported in its row and does not stop the others. A full disk would, so that is passed on.
    """
    from tokenmix.train.finish import resume_config
    from tokenmix.train.run import train

    if is_finished(plan):
        return ""
    (plan.folder / "error.txt").unlink(missing_ok=True)
    try:
        train(resume_config(plan.config, plan.folder), quiet=True)
    except OSError:
        raise
    except UserError as error:
        return str(error)
    except Exception as error:
        # A bug in one layer must not cost the hours of the others; its traceback is kept.
        plan.folder.mkdir(parents=True, exist_ok=True)
        (plan.folder / "error.txt").write_text(traceback.format_exc())
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'see error.txt'}"
    return ""


def is_finished(plan: RunPlan) -> bool:
    """Whether the run has its result."""
    return (plan.folder / "result.json").exists()


def read_run(plan: RunPlan, failure: str, metric: str, out: Path) -> Run:
    """What a run folder holds: score, times, curves, confusion matrix."""
    try:
        return _read_run(plan, failure, metric, out)
    except (LookupError, TypeError, ValueError, csv.Error, StopIteration) as error:
        reason = error if isinstance(error, UserError) else type(error).__name__
        raise UserError(f"{plan.folder} is damaged ({reason}); remove it to train it again") from None


def _read_run(plan: RunPlan, failure: str, metric: str, out: Path) -> Run:
    rows = _metrics(plan.folder / "metrics.csv")
    run = Run(
        seed=plan.seed,
        folder=plan.folder.relative_to(out).as_posix(),
        status="failed",
        message=failure or "not finished",
        score_curve=_curve(rows, f"val_{metric}"),
        loss_curve=_curve(rows, "train_loss"),
    )
    if not is_finished(plan):
        return run
    result = read_part(plan.folder, "result.json")
    return replace(
        run,
        status="finished",
        message="",
        score=result["final"][metric],
        seconds=result["seconds"],
        images_per_second=result[f"{_unit(result)}_per_second"],
        confusion=result["final"].get("confusion"),
    )


def _metrics(file: Path) -> list[dict[str, str]]:
    if not file.exists():
        return []
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


def _curve(rows: Sequence[dict[str, Any]], column: str) -> Curve:
    kept = [row for row in rows if row.get(column)]
    names = (_unit(kept[0]), "seconds", column) if kept else ()
    return Curve(*([float(row[name]) for row in kept] for name in names))


def _unit(names: Iterable[str]) -> str:
    """What a run counted, from the name of its rate."""
    return next(name.removesuffix("_per_second") for name in names if name.endswith("_per_second"))
