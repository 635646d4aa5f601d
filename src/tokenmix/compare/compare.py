"""Variants that differ only in their mixer, trained at equal budget, measured side by side, reported."""

import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from torch import nn

from tokenmix.compare.columns import markdown_table, rich_table
from tokenmix.compare.examples import make_examples
from tokenmix.compare.notes import budget_sentence, failed_runs, notes, uncertainty
from tokenmix.compare.report import write_report
from tokenmix.compare.results import Growth, Results, Run, Twin
from tokenmix.compare.twin_costs import TwinCost, measure_growth, measure_steps, measure_twins
from tokenmix.compare.twin_runs import RunPlan, claim_folder, is_finished, plan_runs, read_run, run_twin
from tokenmix.cost.crossover import find_crossover
from tokenmix.environment import environment
from tokenmix.errors import UserError
from tokenmix.layers.table import get_spec
from tokenmix.registry import get_task
from tokenmix.train.config import CompareConfig, TrainConfig
from tokenmix.train.files import one_writer, replace_file
from tokenmix.train.plan import check_config, make_plan
from tokenmix.train.task import TaskData, TaskModule


def compare(config: CompareConfig, *, quiet: bool = False, baseline: Mapping[str, float] | None = None) -> Path:
    """Train, measure and report; returns the folder of report.html, results.json and results.md.

    `baseline` is the score of something simpler on the same data, by its name, which the report shows as well.
    The same call again continues where it stopped: finished runs are not repeated, and mixers or seeds may be added.

    Raises:
        UserError: a mistake that is known before the first training; or no run finished.
    """
    console = Console(quiet=quiet)
    for mixer in config.mixers:
        get_spec(mixer)
    task = get_task(config.task)
    if task.comparison is not None:
        raise UserError(
            f"compare works on image classifiers, got --task {config.task}; train the variants one by "
            f"one, for example tokenmix train {config.task} {task.comparison}"
        )
    if not config.mixers or not config.seeds:
        raise UserError(
            "a comparison needs at least one mixer and one seed, for example --mixers self,external --seeds 0"
        )
    out = config.out or Path("runs") / f"compare-{config.data.data.replace(':', '-').replace('/', '-')}"
    plans = plan_runs(config, out)
    check_config(plans[0].config)
    data = task.load_data(plans[0].config)
    make_plan(plans[0].config, data.num_train)
    twins = {mixer: _new_twin(plan.config, data) for mixer, plan in _first_of_each(plans).items()}
    claim_folder(out, config)

    with one_writer(out):
        failures = _train_all(plans, console)
        runs = [(plan, read_run(plan, failures.get(plan.folder, ""), task.headline, out)) for plan in plans]
        if all(run.status != "finished" for _, run in runs):
            raise UserError(f"no run finished; the first error: {runs[0][1].message}")
        with _spinner("measuring", console):
            results, examples = _measure(config, twins, data, runs, baseline or {})
        results.save(out / "results.json")
        replace_file(out / "results.md", _markdown(results).encode())
        report = write_report(results, out / "report.html", examples)
        console.print(rich_table(results))
        for note in [*failed_runs(results), *uncertainty(results)]:
            console.print(note, highlight=False, markup=False)
        console.print(f"report: {report}", soft_wrap=True, markup=False)
    return out


def predict_steps(config: CompareConfig, threads: Sequence[int]) -> tuple[int, dict[str, float]]:
    """The number of threads with which the first variant trains fastest here, and the seconds of a step of each."""
    plans = plan_runs(config, Path())
    first, before = plans[0].config, torch.get_num_threads()
    data = get_task(config.task).load_data(first)
    batch = next(iter(data.train_batches(batch_size=config.loop.batch_size, epoch=0, start=0)))
    twins = {mixer: _new_twin(plan.config, data) for mixer, plan in _first_of_each(plans).items()}
    mixer = next(iter(twins))

    def measured(number: int, some: Mapping[str, TaskModule]) -> dict[str, float]:
        torch.set_num_threads(number)
        return measure_steps(some, batch, first, _device(config))

    try:
        # One variant is enough to choose by: where another program runs, threads that wait for each other take long.
        best = min(threads, key=lambda number: measured(number, {mixer: twins[mixer]})[mixer])
        return best, measured(best, twins)
    finally:
        torch.set_num_threads(before)


def _device(config: CompareConfig) -> torch.device:
    return torch.device("cuda" if config.loop.device in ("auto", "cuda") and torch.cuda.is_available() else "cpu")


def _first_of_each(plans: Sequence[RunPlan]) -> dict[str, RunPlan]:
    first: dict[str, RunPlan] = {}
    for plan in plans:
        first.setdefault(plan.mixer, plan)
    return first


def _new_twin(config: TrainConfig, data: TaskData) -> TaskModule:
    """A fresh variant, built before any training so that a wrong argument is reported at once."""
    task, description = get_task(config.task), data.describe()
    model = task.model_from_config(config, description)
    if getattr(model, "mixer_name", None) != config.model.model_kwargs["mixer"]:
        raise UserError(
            f"{config.model.model!r} does not take a mixer; compare in mixer_nano or another isotropic skeleton"
        )
    return task(model, config, description)


def _train_all(plans: Sequence[RunPlan], console: Console) -> dict[Path, str]:
    """Each run in turn, with a line for each; returns what went wrong."""
    failures: dict[Path, str] = {}
    for i, plan in enumerate(plans):
        label = f"[{i + 1}/{len(plans)}] {plan.mixer}, seed {plan.seed}"
        if is_finished(plan):
            console.print(f"{label}: done before", highlight=False, markup=False)
            continue
        start = time.perf_counter()
        try:
            with _spinner(label, console):
                failure = run_twin(plan)
        except KeyboardInterrupt:
            done = sum(map(is_finished, plans))
            raise KeyboardInterrupt(
                f"interrupted: {done} of {len(plans)} runs are finished; the same command again continues from here"
            ) from None
        told = failure or f"{_last_score(plan)}in {time.perf_counter() - start:.0f} s"
        console.print(f"{label}: {told}", highlight=False, markup=False)
        if failure:
            failures[plan.folder] = failure
    return failures


def _spinner(label: str, console: Console) -> AbstractContextManager[Any]:
    """Shows on a terminal that something runs, and for how long; gone when it is done."""
    if not console.is_terminal or console.quiet:
        return nullcontext()
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    shown = Progress(*columns, console=console, transient=True)
    shown.add_task(escape(label))
    return shown


def _last_score(plan: RunPlan) -> str:
    metric = get_task(plan.config.task).headline
    run = read_run(plan, "", metric, plan.folder.parent)
    return "" if run.score is None else f"{metric} {run.score:.4f} "


def _measure(
    config: CompareConfig,
    twins: Mapping[str, TaskModule],
    data: TaskData,
    runs: Sequence[tuple[RunPlan, Run]],
    baseline: Mapping[str, float],
) -> tuple[Results, list[Any]]:
    from tokenmix.train.load import load_run

    first = runs[0][0].config
    device = _device(config)
    batch_size = max(1, config.loop.batch_size // config.optim.accumulate)
    batch = next(iter(data.train_batches(batch_size=batch_size, epoch=0, start=0)))
    costs = measure_twins(twins, batch, first, device)
    growth = measure_growth({mixer: module.model for mixer, module in twins.items()}, device)
    finished = _first_of_each([plan for plan, run in runs if run.status == "finished"])
    trained = {mixer: load_run(plan.folder)[0] for mixer, plan in finished.items()}
    images = getattr(data, "images", None)
    description = data.describe()
    examples, shown = make_examples(trained, images, description) if images is not None else ([], [])
    task = get_task(config.task)
    results = Results(
        command=repeat_command(config),
        metric=task.headline,
        higher=task.direction == "max",
        config=config.flat(),
        data=description,
        classes=list(description.get("classes", [])),
        skeleton=_skeleton(next(iter(twins.values())).model),
        images=make_plan(first, data.num_train).total_steps * config.loop.batch_size,
        step_batch=batch_size,
        device=str(device),
        environment=environment(),
        twins=[_twin(mixer, module.model, costs[mixer], growth[mixer], runs) for mixer, module in twins.items()],
        examples=examples,
        baseline=dict(baseline),
    )
    return results, shown


def _skeleton(model: nn.Module) -> dict[str, int]:
    return {"tokens": model.num_tokens, "dim": model.embed_dim, "depth": len(model.blocks)}  # type: ignore[dict-item, arg-type]


def _twin(mixer: str, model: nn.Module, cost: TwinCost, growth: Growth, runs: Sequence[tuple[RunPlan, Run]]) -> Twin:
    layer = model.blocks[-1].mixer  # type: ignore[index, union-attr]
    heads = getattr(layer, "num_heads", None)
    crossover = None if mixer == "self" else str(find_crossover(mixer, layer.dim, num_heads=heads))
    return Twin(
        mixer=mixer,
        about=get_spec(mixer).about,
        crossover=crossover,
        growth=growth,
        runs=[run for plan, run in runs if plan.mixer == mixer],
        **{field.name: getattr(cost, field.name) for field in fields(TwinCost)},
    )


def _markdown(results: Results) -> str:
    listed = "\n".join(f"- {note}" for note in notes(results))
    return f"{budget_sentence(results)}\n\n{markdown_table(results)}\n\n{listed}\n\n    {results.command}\n"


def repeat_command(config: CompareConfig) -> str:
    """The command line that runs this comparison again."""
    words, defaults = ["tokenmix", "compare"], CompareConfig().flat()
    for name, value in config.flat().items():
        if value != defaults[name]:
            words += [f"--{name.replace('_', '-')}", *_words(value)]
    return shlex.join(words)


def _words(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        return [f"{key}={item}" for key, item in value.items()]
    if isinstance(value, tuple):
        return [",".join(map(str, value))]
    return [str(value)]
