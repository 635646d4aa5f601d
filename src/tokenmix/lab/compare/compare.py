"""Variants that differ only in their mixer, trained at equal budget, measured side by side, reported."""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from tokenmix.environment import environment
from tokenmix.errors import UserError, printable
from tokenmix.files import make_folder, one_writer, replace_file
from tokenmix.lab.compare.columns import markdown_table, rich_table
from tokenmix.lab.compare.examples import make_examples
from tokenmix.lab.compare.grid import choose_cells, copy_runs, merge_settings, split_grid, write_grid
from tokenmix.lab.compare.notes import budget_sentence, failed_runs, finding_sentence, notes, uncertainty
from tokenmix.lab.compare.report import write_report
from tokenmix.lab.compare.results import Results, Run
from tokenmix.lab.compare.variant_costs import measure_steps, measure_variants
from tokenmix.lab.compare.variant_runs import (
    check_folder,
    claim_folder,
    mixer_of,
    plan_runs,
    read_run,
    read_sampling,
)
from tokenmix.lab.grid.cells import Cell, Engine
from tokenmix.lab.grid.engines import in_turn, make_engine
from tokenmix.lab.registry import get_task
from tokenmix.lab.train.config import CompareConfig
from tokenmix.lab.train.identity import read_result
from tokenmix.lab.train.plan import check_config, make_plan
from tokenmix.lab.train.swapping import check_own_mixers
from tokenmix.lab.train.task import TaskData, TaskModule, input_sizes
from tokenmix.layers.table import get_spec
from tokenmix.trust import from_caller


@dataclass(frozen=True)
class Comparison:
    """Variants of one size on one data set: what is known before they are trained. `name` is "" outside of a grid."""

    name: str
    config: CompareConfig
    out: Path
    data: TaskData
    variants: dict[str, TaskModule]
    cells: list[Cell]

    @property
    def metric(self) -> str:
        """The metric that all variants monitor, and that is reported."""
        return next(iter(self.variants.values())).monitor


@from_caller
def compare(config: CompareConfig, *, quiet: bool = False, baseline: Mapping[str, float] | None = None) -> Path:
    """Train, measure and report; returns the folder of report.html, results.json and results.md.

    With several data sets or sizes it has such a folder for each of them, and a table of all in report.html and
    results.md. `baseline` is the score of something simpler on the same data, by its name, which reports show as well.
    The same call again continues where it stopped: finished runs are not repeated, and mixers or seeds may be added.

    Raises:
        UserError: a mistake that is known before the first training; or no run finished.
    """
    if not isinstance(config, CompareConfig):
        raise UserError(
            f"compare takes a CompareConfig, got {config!r}; for example CompareConfig().replace(data='digits')"
        )
    console = Console(quiet=quiet)
    merged = config if config.merge is None else merge_settings(config, config.merge)
    out, parts = split_grid(merged)
    comparisons = [_prepare(name, one, folder) for name, (one, folder) in parts.items()]
    cells = choose_cells([cell for one in comparisons for cell in one.cells], config.only)
    train = config.merge is None and not all(cell.is_finished for cell in cells)
    engine = make_engine(config.engine, out.with_name(f"{out.name}-jobs")) if train else in_turn
    claims: list[tuple[Any, ...]] = [(one.out, one.config) for one in comparisons]
    if len(comparisons) > 1:
        # The folders of the comparisons in it hold what may not differ.
        claims.insert(0, (out, merged, "grid.json", tuple(merged.flat())))
    for claim in claims:
        check_folder(*claim)
    make_folder(out)

    with one_writer(out):
        for claim in claims:
            claim_folder(*claim)
        if config.merge is None:
            failures = _train_all(cells, engine, console)
        else:
            failures = {}
            copy_runs(config.merge, cells)
        found = {one.name: _read_runs(one, failures) for one in comparisons}
        if not any(run.status == "finished" for runs in found.values() for _, run in runs):
            first = next((run.message for runs in found.values() for _, run in runs), "no folder holds one")
            raise UserError(f"no run finished; the first error: {first}")
        results = {}
        for one in comparisons:
            if any(run.status == "finished" for _, run in found[one.name]):
                results[one.name] = _report(one, found[one.name], baseline or {}, console)
        if len(comparisons) > 1:
            report = write_grid(results, out)
            console.print(printable(f"all of them: {report}"), soft_wrap=True, markup=False)
    return out


def _prepare(name: str, config: CompareConfig, out: Path) -> Comparison:
    """A comparison with its data read and its variants built, so that mistakes are reported before any training."""
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
    cells = plan_runs(config, out, name)
    check_config(cells[0].config)
    data = task.load_data(cells[0].config)
    make_plan(cells[0].config, data.num_train)
    return Comparison(name, config, out, data, _new_variants(cells, data), cells)


Runs = Sequence[tuple[Cell, Run]]


def _read_runs(one: Comparison, failures: Mapping[str, str]) -> Runs:
    """What there is of the runs; of those that `--only` leaves out there may be nothing."""
    metric = one.metric
    there = [cell for cell in one.cells if cell.name in failures or cell.folder.exists()]
    return [(cell, read_run(cell, failures.get(cell.name, ""), metric, one.out)) for cell in there]


def _report(one: Comparison, runs: Runs, baseline: Mapping[str, float], console: Console) -> Results:
    """Measure the variants that were trained, and write and print what was found."""
    with _spinner("measuring", console):
        results, examples = _measure(one, runs, baseline)
    results.save(one.out / "results.json")
    replace_file(one.out / "results.md", _markdown(results).encode())
    report = write_report(results, one.out / "report.html", examples)
    console.print(rich_table(results))
    for note in [*failed_runs(results), *uncertainty(results)]:
        console.print(printable(note), highlight=False, markup=False)
    console.print(printable(f"report: {report}"), soft_wrap=True, markup=False)
    return results


@from_caller
def predict_steps(config: CompareConfig, threads: Sequence[int]) -> tuple[int, dict[str, float]]:
    """The number of threads with which the first variant trains fastest here, and the seconds of a step of each."""
    cells = plan_runs(config, Path())
    first, before = cells[0].config, torch.get_num_threads()
    data = get_task(config.task).load_data(first)
    batch = next(iter(data.train_batches(batch_size=config.loop.batch_size, epoch=0, start=0)))
    variants = _new_variants(cells, data)
    mixer = next(iter(variants))

    def measured(number: int, some: Mapping[str, TaskModule]) -> dict[str, float]:
        torch.set_num_threads(number)
        return measure_steps(some, batch, first, _device(config))

    try:
        # One variant is enough to choose by: where another program runs, threads that wait for each other take long.
        best = min(threads, key=lambda number: measured(number, {mixer: variants[mixer]})[mixer])
        return best, measured(best, variants)
    finally:
        torch.set_num_threads(before)


def _device(config: CompareConfig) -> torch.device:
    return torch.device("cuda" if config.loop.device in ("auto", "cuda") and torch.cuda.is_available() else "cpu")


def _first_of_each(cells: Iterable[Cell]) -> dict[str, Cell]:
    first: dict[str, Cell] = {}
    for cell in cells:
        first.setdefault(mixer_of(cell), cell)
    return first


def _new_variants(cells: Sequence[Cell], data: TaskData) -> dict[str, TaskModule]:
    """A fresh variant for each mixer, built and counted before any training so that a mistake is reported at once."""
    variants = {}
    for mixer, cell in _first_of_each(cells).items():
        config, task, description = cell.config, get_task(cell.config.task), data.describe()
        model = task.model_from_config(config, description)
        if getattr(model, "mixer_name", None) != mixer:
            raise UserError(
                f"{config.model.model!r} does not take a mixer; compare in mixer_nano or another isotropic skeleton"
            )
        variants[mixer] = task(model, config, description)
        check_own_mixers(variants[mixer])
        variants[mixer].macs()
    return variants


def _train_all(cells: Sequence[Cell], engine: Engine, console: Console) -> dict[str, str]:
    """Each run to its end, with a line for each; returns by name what went wrong."""
    waiting, failures = [cell for cell in cells if not cell.is_finished], dict[str, str]()
    for i, cell in enumerate(cell for cell in cells if cell.is_finished):
        console.print(f"[{i + 1}/{len(cells)}] {_label(cell)}: done before", highlight=False, markup=False)
    ended = len(cells) - len(waiting)
    with _spinner(f"{len(waiting)} of {len(cells)} runs to train", console), closing(engine(waiting)) as trained:
        try:
            for cell, outcome in trained:
                ended += 1
                if isinstance(outcome, OSError):
                    raise outcome
                line = f"[{ended}/{len(cells)}] {_label(cell)}: {outcome or _score(cell)}"
                console.print(printable(line), highlight=False, markup=False)
                if outcome:
                    failures[cell.name] = outcome
        except KeyboardInterrupt:
            done = sum(cell.is_finished for cell in cells)
            raise KeyboardInterrupt(
                f"interrupted: {done} of {len(cells)} runs are finished; the same command again continues from here"
            ) from None
    return failures


def _label(cell: Cell) -> str:
    grid = cell.name.rpartition("/")[0]
    return f"{grid}{', ' * bool(grid)}{mixer_of(cell)}, seed {cell.config.loop.seed}"


def _spinner(label: str, console: Console) -> AbstractContextManager[Any]:
    """Shows on a terminal that something runs, and for how long; gone when it is done."""
    if not console.is_terminal or console.quiet:
        return nullcontext()
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    shown = Progress(*columns, console=console, transient=True)
    shown.add_task(escape(label))
    return shown


def _score(cell: Cell) -> str:
    metric = read_result(cell.folder)["monitor"]
    run = read_run(cell, "", metric, cell.folder.parent)
    score = "is not defined" if run.score is None else f"{run.score:.4f}"
    return f"{metric} {score} in {run.seconds:.0f} s of training"


def _measure(one: Comparison, runs: Runs, baseline: Mapping[str, float]) -> tuple[Results, list[Any]]:
    from tokenmix.lab.train.load import load_run

    # What was not trained is not in the report.
    seeds = tuple(dict.fromkeys(cell.config.loop.seed for cell, _ in runs))
    first = _first_of_each(cell for cell, _ in runs)
    config = one.config.replace(mixers=tuple(first), seeds=seeds)
    device, train_config = _device(config), runs[0][0].config
    if config.loop.threads is not None:
        torch.set_num_threads(config.loop.threads)
    variants = {mixer: one.variants[mixer] for mixer in first}
    batch_size = max(1, config.loop.batch_size // config.optim.accumulate)
    batch = next(iter(one.data.train_batches(batch_size=batch_size, epoch=0, start=0)))
    measured = measure_variants(variants, batch, train_config, device)
    finished = _first_of_each(cell for cell, run in runs if run.status == "finished")
    trained = {mixer: load_run(cell.folder)[0] for mixer, cell in finished.items()}
    images = getattr(one.data, "images", None)
    description = one.data.describe()
    examples, shown = make_examples(trained, images, description) if images is not None else ([], [])
    task = next(iter(variants.values()))
    model: Any = task.model
    results = Results(
        command=repeat_command(config),
        metric=one.metric,
        higher=task.mode == "max",
        config=config.flat(),
        data=description,
        classes=list(description.get("classes", [])),
        skeleton={
            "tokens": model.num_tokens,
            "dim": model.embed_dim,
            "depth": len(model.blocks),
            **input_sizes(model),
        },
        images=make_plan(train_config, one.data.num_train).total_steps * config.loop.batch_size,
        step_batch=batch_size,
        device=str(device),
        environment=environment(),
        variants=[
            replace(variant, runs=[run for cell, run in runs if mixer_of(cell) == variant.mixer])
            for variant in measured
        ],
        examples=examples,
        baseline=dict(baseline),
        sampling=read_sampling(runs, one.metric, one.data.unit),
    )
    return results, shown


def _markdown(results: Results) -> str:
    listed = "\n".join(f"- {note}" for note in notes(results))
    text = f"{finding_sentence(results)}\n\n{budget_sentence(results)}"
    return f"{text}\n\n{markdown_table(results)}\n\n{listed}\n\n    {results.command}\n"


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
