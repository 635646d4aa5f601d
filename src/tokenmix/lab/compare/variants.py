"""Variants of a comparison: names, run options that differ, and results of their runs."""

import csv
import inspect
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated

import torch
from torch import Tensor

from tokenmix.errors import UserError, one_line
from tokenmix.files import Values, inside, is_unused, make_folder, read_text, to_json, write_json
from tokenmix.lab.compare.results import IDENTITY, NONE, OF, ORIGINAL, Curve, Run, Sampling
from tokenmix.lab.compare.statistics import covariance_of_means, covariance_of_resamples, resample
from tokenmix.lab.grid import Cell
from tokenmix.lab.registry import get_task
from tokenmix.lab.train.config import (
    BudgetConfig,
    CompareConfig,
    DataConfig,
    EngineConfig,
    LoopConfig,
    TrainConfig,
    comparison_config,
)
from tokenmix.lab.train.folder import read_part
from tokenmix.lab.train.metrics import FILE, INDEX, LABEL, Metric, read_predictions
from tokenmix.lab.train.schema import Range, fitted
from tokenmix.registry import MODELS, TORCHVISION, import_object, is_foreign, load_object

START = ("init_from", "precision", "grad_checkpointing")
"""Loop options that a variant may change; the others set device, data and length for all."""
SHARED = {field.name for kind in (DataConfig, LoopConfig) for field in fields(kind)} - {*START} | {"task", "loop"}
"""Options that all variants share."""
ADDING = ("mixers", "variants", "seeds", "sizes", "config", "controls", "only", "merge", "out")
HARMLESS = ("workers", "threads", "log_every", "checkpoint_every", "logger")
FREE = (*ADDING, *HARMLESS, *(field.name for field in fields(EngineConfig)))
"""Settings that may differ when a comparison continues: they add runs, or do not change results."""

Amount = Annotated[float, Range(least=0)]
Confusion = tuple[tuple[Annotated[int, Range(least=0)], ...], ...] | None
Share = Annotated[float | None, Range(least=0, most=1)]
MOST_CLASSES = 10
"""Up to this number of classes a report has the metric of each."""
SHARES = ("accuracy", "balanced_accuracy", "macro_f1", "f1", "auc", "miou", "instance_miou", "exact_match")
"""Metrics in [0, 1]."""


def plan_variants(config: CompareConfig) -> dict[str, Values]:
    """The `TrainConfig` options of each variant that differ from the others', by variant.

    With `insert_after` the mixers are inserted, and the model without a block comes first. A model with an argument
    `mixer` gets the mixers there. In any other model the mixers replace the attention layers, and the unchanged model
    comes first. The control without mixing comes last. The rows of `config.variants` follow; their model arguments are
    added to the shared ones. `UserError` for a mistake in these options.
    """
    shared, own = config.model.model_kwargs, dict[str, Values]()
    rows = _mixer_variants(config) if config.mixers or not config.variants else {}
    for name, options in config.variants.items():
        with naming(config, name):
            if not re.fullmatch(r"[\w.+-]{1,64}", name) or not isinstance(options, dict):
                raise UserError("it must be a table [variants.NAME]; NAME is of letters, digits and -._+")
            if name in rows:
                raise UserError("one of the mixers has this name; give the variant another one, or leave the mixer out")
            taken = next((key for key in options if key in SHARED), None)
            if taken is not None:
                raise UserError(f"{taken} must be equal for all variants; leave it out of this table")
            kwargs = options.get("model_kwargs", {})
            own[name] = {**options, "model_kwargs": {**shared, **kwargs}} if isinstance(kwargs, dict) else options
    return rows | own


@contextmanager
def naming(config: CompareConfig, name: str) -> Iterator[None]:
    """Prefix errors in the block with the variant's name and, for a row of a file, the file."""
    try:
        yield
    except UserError as error:
        if name not in config.variants:
            raise
        place = f" of {config.config}" if config.config else ""
        raise UserError(f"[variants.{name}]{place}: {error}") from None


def _mixer_variants(config: CompareConfig) -> dict[str, Values]:
    mixers = tuple(dict.fromkeys(config.mixers))
    if not mixers:
        raise UserError("a comparison needs at least one mixer, for example --mixers self,external")
    control = [IDENTITY] if config.controls and NONE not in mixers else []
    if config.insert_after:
        names = dict.fromkeys(name for name in (*mixers, *control) if name != NONE)
        place = {"insert_after": config.insert_after, "train_only": config.train_only}
        return {NONE: {}, **{name: {"insert": name, **place} for name in names}}
    if takes_mixer(config.model.model):
        for name, usual in (("swap_where", "*"), ("swap_drop", None), ("train_only", "all")):
            if (value := getattr(config, name)) != usual:
                raise UserError(
                    f"{name}={value!r} is for layers that are replaced, and {config.model.model} has an argument "
                    "mixer; leave it out"
                )
        names = dict.fromkeys((*mixers, *control))
        return {name: {"model_kwargs": {**config.model.model_kwargs, "mixer": name}} for name in names}
    names = dict.fromkeys(name for name in (*mixers, *control) if name not in (NONE, ORIGINAL))
    # A layer without weights cannot be trained alone, so all layers are, as in the unchanged model.
    trained = {name: "all" if name == IDENTITY else config.train_only for name in names}
    where = {"swap_where": config.swap_where, "swap_drop": config.swap_drop}
    return {ORIGINAL: {}, **{name: {"swap": name, **where, "train_only": trained[name]} for name in names}}


def takes_mixer(model: str) -> bool:
    """Whether the model of that name has an argument `mixer`."""
    if is_foreign(model) and not model.startswith(TORCHVISION):
        return "mixer" in inspect.signature(import_object(model)).parameters
    return model in MODELS and "mixer" in inspect.signature(load_object(MODELS[model].build)).parameters


def reference_of(names: list[str], *, inserted: bool = False) -> str:
    """The reference variant: self-attention, else the unchanged model, else the first; of blocks the model without."""
    order = (NONE, "self", ORIGINAL) if inserted else ("self", ORIGINAL, NONE)
    return next((name for name in order if name in names), names[0])


def plan_runs(config: CompareConfig, out: Path, name: str = "") -> list[Cell]:
    """One run per seed and variant, equal except for its options; `name` is the comparison's name in a grid."""
    shared = {name: getattr(config, name) for name in ("task", "data", "model", "optim", "options")}
    budget = {field.name: getattr(config.loop, field.name) for field in fields(BudgetConfig)}
    cells, variants = [], plan_variants(config)
    for seed in dict.fromkeys(config.seeds):
        for variant, options in variants.items():
            loop = LoopConfig(**budget, seed=seed, out=inside(out / "runs", f"{variant}-seed{seed}"))
            with naming(config, variant):
                run = TrainConfig(**shared, loop=loop).replace(**options)
            cells.append(Cell(f"{name}{'/' * bool(name)}{variant}-seed{seed}", run))
    return cells


def variant_of(cell: Cell) -> str:
    return cell.folder.name.rpartition("-seed")[0]


def claim_folder(
    out: Path, config: CompareConfig, name: str = "compare.json", free: Sequence[str] = FREE, *, write: bool
) -> None:
    """`UserError` if a folder's settings, except `free`, differ from the comparison's; `write` stores them, locked."""
    file = out / name
    if file.exists():
        plain = json.loads(to_json(config.flat()))
        # A folder of an older version lacks newer settings, which had their defaults.
        before = json.loads(to_json(comparison_config(config.task).flat())) | read_part(out, file.name)
        other = [key for key in plain if key not in free and plain[key] != before.get(key)]
        if other:
            told = ", ".join(f"{key} {before.get(key)} instead of {plain[key]}" for key in other)
            raise UserError(f"{out} holds a comparison with {told}; give another --out, or the same settings")
    elif out.exists() and not (out.is_dir() and is_unused(out)):
        other = next((file.stem for file in (out / "compare.json", out / "grid.json") if file.exists()), None)
        if other is not None:
            what = "single comparison" if other == "compare" else "grid of comparisons"
            raise UserError(f"{out} holds a {what}; give another --out, then join both with --merge")
        what = "not empty and does not contain a comparison" if out.is_dir() else "a file, not a folder"
        raise UserError(f"{out} is {what}; give another --out")
    if write:
        make_folder(out)
        write_json(file, config.flat())


NOT_FINISHED = "not finished"
"""Message of a run that stopped, or that another machine trains."""


def read_run(cell: Cell, failure: str, metric: str, out: Path) -> Run:
    """Content of a run folder: score, times, curves, confusion matrix."""
    with _damage_told(cell, "its results"):
        file = cell.folder / "metrics.csv"
        rows = list(csv.DictReader(read_text(file).splitlines())) if file.exists() else []
        run = Run(
            seed=cell.config.loop.seed,
            folder=cell.folder.relative_to(out).as_posix(),
            status="failed",
            message=failure or NOT_FINISHED,
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
            metrics={name: value for name, value in _numbers(metrics) if name != metric},
        )


def _numbers(metrics: Values) -> Iterator[tuple[str, float]]:
    """Defined numbers among a run's metrics, also one of each class if there are at most ten."""
    for name, value in metrics.items():
        parts = {f"{name}{OF}{part}": one for part, one in value.items()} if isinstance(value, dict) else {name: value}
        for label, one in parts.items():
            # COCO has -1 where the data has no such object.
            if len(parts) <= MOST_CLASSES and isinstance(one, float) and math.isfinite(one) and one != -1:
                yield label, one


def read_sampling(runs: Sequence[tuple[Cell, Run]], metric: str, unit: str) -> Sampling | None:
    """Covariance of the runs' scores under the draw of common test samples; None if predictions do not give it."""
    scored = [(cell, run) for cell, run in runs if run.score is not None]
    found = list[tuple[Cell, Metric, dict[str, Tensor], Tensor | None]]()
    for cell, _ in scored:
        with _damage_told(cell, FILE):
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
    labels = [(cell, rows[LABEL][torch.isin(rows[INDEX], common)]) for cell, _, rows, _ in found if LABEL in rows]
    for cell, own in labels:
        if not torch.equal(own, labels[0][1]):
            raise UserError(
                f"{cell.folder} was tested on other samples than {labels[0][0].folder}: their labels differ; make the "
                "data set the same at each call, such as with a seed, and remove the runs of the other samples"
            )
    scores: list[Tensor] = []
    means = all(values is not None for *_, values in found)
    for cell, known, rows, values in found:
        with _damage_told(cell, FILE):
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
    stacked = torch.stack(scores).numpy()
    covariance = covariance_of_means(stacked) if means else covariance_of_resamples(stacked, number)
    if not math.isfinite(covariance.sum()):
        return None  # The metric is undefined without one sample or another.
    return Sampling(number, unit, [run.folder for _, run in scored], covariance.tolist())


@contextmanager
def _damage_told(cell: Cell, what: str) -> Iterator[None]:
    try:
        yield
    except (LookupError, RuntimeError, StopIteration, TypeError, ValueError, csv.Error) as error:
        reason = error if isinstance(error, UserError) else f"{what}: {one_line(error)}"
        raise UserError(f"{cell.folder} is damaged ({reason}); remove it to train it again") from None


def _curve(rows: Sequence[Mapping[str, str]], column: str) -> Curve:
    kept = [row for row in rows if row.get(column)]
    names = (_unit(kept[0]), "seconds", column) if kept else ()
    return Curve(*([float(row[name]) for row in kept] for name in names))


def _unit(names: Iterable[str]) -> str:
    return next(name.removesuffix("_per_second") for name in names if name.endswith("_per_second"))
