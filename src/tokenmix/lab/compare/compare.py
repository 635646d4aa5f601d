"""Train variants that differ only in their mixer at equal budget, measure and report them."""

import json
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Literal, Unpack

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from tokenmix.environment import environment
from tokenmix.errors import UserError, printable
from tokenmix.files import Values, latest_complete_checkpoint, make_folder, one_writer, replace_file, to_json
from tokenmix.lab.compare import schedule
from tokenmix.lab.compare.baselines import fit_baselines
from tokenmix.lab.compare.costs import measure_variants, skeleton_of
from tokenmix.lab.compare.grid import choose_cells, copy_runs, merge_settings, split_grid, write_grid
from tokenmix.lab.compare.notes import budget_sentence, failed_runs, finding_sentence, notes, same_sentence, uncertainty
from tokenmix.lab.compare.report import ComparisonResult, ExampleMaps, make_examples, write_report
from tokenmix.lab.compare.results import Results, Run, Variant, differences_of, metric_name, metrics_of, table_of
from tokenmix.lab.compare.variants import (
    claim_folder,
    naming,
    plan_runs,
    plan_variants,
    read_run,
    read_sampling,
    reference_of,
    variant_of,
)
from tokenmix.lab.data.fetch import log, muted
from tokenmix.lab.grid import Cell, Engine, in_turn, make_engine, parallel_runs
from tokenmix.lab.registry import get_task
from tokenmix.lab.train.config import CompareConfig, comparison_config
from tokenmix.lab.train.load import check_own_mixers, load_task, make_model, own_sources, start_and_swap
from tokenmix.lab.train.options import CompareOptions
from tokenmix.lab.train.plan import check_config, make_plan, plan_notes, with_epochs
from tokenmix.lab.train.programs import Batch
from tokenmix.lab.train.run import finish_run
from tokenmix.lab.train.schema import joined
from tokenmix.lab.train.sources import base_comparison, check_call, load_comparison
from tokenmix.lab.train.task import TaskData, TaskModule
from tokenmix.layers.table import get_spec
from tokenmix.profiling.machine import OtherWork
from tokenmix.registry import Arguments, imported_plugins
from tokenmix.swap.registry import find_sites
from tokenmix.trust import from_caller


@dataclass(frozen=True)
class Comparison:
    """Variants of one model on one data set. `name` is "" outside of a grid.

    `measured` are the variants' costs, with so many `threads`. `tuned` are validation scores by variant and learning
    rate. `runs` are the results of the cells after training. `notes` are on the training, `warning` says what disturbed
    the measurement.
    """

    name: str
    config: CompareConfig
    out: Path
    data: TaskData
    variants: dict[str, TaskModule]
    cells: list[Cell]
    pace: schedule.Pace
    notes: list[str]
    measured: list[Variant] = field(default_factory=list)
    threads: int = 0
    tuned: dict[str, schedule.Scores] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    warning: str = ""

    @property
    def task(self) -> TaskModule:
        return next(iter(self.variants.values()))

    @property
    def first(self) -> dict[str, Cell]:
        return _first_of_each(self.cells)


WIDE = 120
Stage = Sequence[tuple[Comparison, str, Cell]]
"""Runs that are trained together: comparison, name of the variant, and run."""


@from_caller
def compare(
    task: str | None = None,
    *,
    config: CompareConfig | str | Path | None = None,
    mixers: Sequence[str] | None = None,
    data: str | None = None,
    model: str | None = None,
    model_kwargs: Arguments | None = None,
    seeds: Sequence[int] | None = None,
    epochs: int | None = None,
    max_steps: int | None = None,
    batch_size: int | None = None,
    lr: float | None = None,
    limit: int | None = None,
    limit_eval: int | None = None,
    swap_where: str | None = None,
    insert_after: str | None = None,
    init_from: str | Path | None = None,
    controls: bool | None = None,
    out: str | Path | None = None,
    device: str | None = None,
    threads: int | None = None,
    jobs: int | Literal["auto"] | None = None,
    quiet: bool = False,
    **options: Unpack[CompareOptions],
) -> ComparisonResult:
    """Train variants of a model that differ only in their mixer at equal budget, measure them, and report.

    A model with an argument `mixer` gets the mixers there. In any other model the mixers replace the attention layers,
    or are inserted after the module `insert_after`. The same call again continues an unfinished comparison: finished
    runs are kept, and mixers or seeds may be added. Several data sets or sizes have a report each, and a common table.

    Args:
        task: a name of `tokenmix.list_tasks()`; default: the config's task, else image classification.
        config: all options in one object, or their TOML file; options given separately override it.
        mixers: names of `tokenmix.list_mixers()`, or "module:Class".
        data: a data set of `tokenmix list data`, or your files, such as "folder:photos"; default: that of `init_from`,
            else Fashion-MNIST for images.
        model: the network; default: the model of `init_from`, else a small model of the task.
        model_kwargs: arguments of the model.
        seeds: each variant has one run per seed.
        epochs, max_steps, batch_size, lr: of every run.
        limit, limit_eval: use this many training and test samples.
        swap_where: glob over the attention layers to replace.
        insert_after: glob over the modules after which a block is inserted.
        init_from: a safetensors file or run folder to start from.
        controls: also train the network without mixing, and fit the task's simplest baselines; True if not given.
        out: folder of the report.
        device, threads: device, and CPU threads.
        jobs: concurrent runs, see `tokenmix compare --help`.
        quiet: print nothing.
        **options: any other option of the command, by its name with underscores.

    Returns:
        `.results`, `.path`, `.best`, `.to_pandas()`, `.plot()`; a notebook shows the table.

    Raises:
        UserError: a mistake that is found before the first training, or no run finished.
    """
    values = {name: value for name, value in locals().items() if name not in ("config", "task", "quiet", "options")}
    check_call("compare", task, None if isinstance(config, str | Path) else config, CompareConfig)
    if isinstance(config, str | Path):
        config = load_comparison(str(config), task)
    given: Values = {name: value for name, value in values.items() if value is not None} | dict(options)
    if isinstance(mixers, str):
        given["mixers"] = [name.strip() for name in mixers.split(",")]
    for name in ("mixers", "seeds"):
        if isinstance(given.get(name), Iterable) and not isinstance(given[name], str):
            given[name] = tuple(given[name])
    if model_kwargs is not None:
        given["model_kwargs"] = dict(model_kwargs)
    if config is None:
        config = base_comparison(task or CompareConfig.task, init_from, model)
    config = config.replace(**given, task=task or config.task)
    # A file has room for every column.
    console = Console(quiet=quiet, width=None if sys.stdout.isatty() else WIDE)
    merged = config if config.merge is None else merge_settings(config, config.merge)
    out, parts = split_grid(merged)
    logs = out.with_name(f"{out.name}-jobs")
    # Before data is read.
    choose_cells([cell for name, (one, folder) in parts.items() for cell in plan_runs(one, folder, name)], config.only)
    with muted(quiet):
        comparisons = [_prepare(name, one, folder) for name, (one, folder) in parts.items()]
    chosen = choose_cells([cell for one in comparisons for cell in one.cells], config.only)
    waiting = [] if config.merge else [cell for cell in chosen if not cell.is_finished]
    jobs = parallel_runs(config, len(waiting))
    engine = make_engine(config.engine, logs, jobs) if waiting else in_turn
    claims = [partial(claim_folder, one.out, one.config) for one in comparisons]
    if len(comparisons) > 1:
        # The folders of its comparisons store the settings that must not differ.
        claims.insert(0, partial(claim_folder, out, merged, "grid.json", tuple(merged.flat())))
    for claim in claims:
        claim(write=False)
    make_folder(out)

    def finish(stage: Stage, part: str = "metrics") -> dict[str, str]:
        if config.merge is None:
            return _train_all(stage, engine, jobs, config, console, part)
        copy_runs(config.merge, [cell for _, _, cell in stage])
        for one in comparisons:
            _check_unchanged(one.cells, one.variants, one.data)
        return {}

    with muted(quiet), one_writer(out):
        for claim in claims:
            claim(write=True)
        for note in dict.fromkeys(note for one in comparisons for note in one.notes):
            log(note)
        # For runs that `--only` leaves out, earlier results are in the report.
        wanted = {cell.name for cell in chosen}
        kept = [[cell for cell in one.cells if cell.name in wanted or cell.folder.exists()] for one in comparisons]
        with _progress(lambda: "measuring speed and memory", console):
            # As if no run were finished, so that a repeated command measures the same.
            together = 0 if config.merge else parallel_runs(config, len(chosen))
            comparisons = [
                _measure(replace(one, cells=cells), together) for one, cells in zip(comparisons, kept) if cells
            ]
        trials = [schedule.plan_trials(one.config, one.first, one.data.num_train, one.out) for one in comparisons]
        stage = [(one, name, cell) for one, some in zip(comparisons, trials) for (name, _), cell in some.items()]
        if stage:
            _check_options(cell for _, _, cell in stage)
            finish(stage, "validation")
            # A cluster connection closes at the end of its runs.
            engine = make_engine(config.engine, logs, jobs) if waiting else in_turn
            comparisons = [_with_rates(one, some) for one, some in zip(comparisons, trials)]
        stage = [(one, variant_of(cell), cell) for one in comparisons for cell in one.cells if cell.name in wanted]
        _check_options(cell for one in comparisons for cell in one.cells)
        failures = finish(stage)
        trained = [_with_runs(one, failures) for one in comparisons]
        results = {one.name: _report(one, console) for one in trained if any(not run.message for run in one.runs)}
        if not results:
            messages = (run.message for one in trained for run in one.runs)
            raise UserError(f"no run finished; the first error: {next(messages, 'no folder holds one')}")
        if len(comparisons) > 1:
            report = write_grid(results, out)
            console.print(printable(f"all of them: {report}"), soft_wrap=True, markup=False)
        for one in trained:
            if one.name not in results and (errors := [failures[c.name] for c in one.cells if c.name in failures]):
                raise UserError(f"no run of {one.name} finished, so it has no report; the first error: {errors[0]}")
    return ComparisonResult(out, results)


def _prepare(name: str, config: CompareConfig, out: Path) -> Comparison:
    """A comparison with its data read and its variants built, so that mistakes are reported before any training."""
    for mixer in config.mixers:
        if mixer != "none":
            get_spec(mixer)
    task = get_task(config.task)
    if task.no_comparison:
        raise UserError(f"compare does not take {config.task}: {task.no_comparison}")
    if not config.seeds:
        raise UserError("a comparison needs at least one seed, for example --seeds 0")
    cells = plan_runs(config, out, name)
    for variant, cell in _first_of_each(cells).items():
        with naming(config, variant):
            check_config(cell.config)
            task.check(cell.config, cell.config.loop.batch_size // cell.config.optim.accumulate)
    start = time.monotonic()
    data = task.load_data(cells[0].config)
    read = time.monotonic() - start
    plan = make_plan(cells[0].config, data.num_train, unit=data.unit)
    notes = plan_notes(cells[0].config, plan, data.num_train, data.unit)
    variants = _new_variants(config, cells, data)
    notes += [same_sentence(name) for name in _first_of_each(cells) if name not in variants]
    planned, folder = {cell.folder for cell in cells}, cells[0].folder.parent
    if others := sorted(path.name for path in folder.glob("*-seed*") if path not in planned):
        notes.append(f"{folder} also has {', '.join(others)}; name their mixers and seeds too, for a report with them")
    cells = [
        replace(cell, config=with_epochs(cell.config, make_plan(cell.config, data.num_train)))
        for cell in cells
        if variant_of(cell) in variants
    ]
    if schedule.rates_of(config) and not data.num_validation:
        raise UserError("tune chooses on validation samples, and none are held out; give --validation N, or more data")
    _check_unchanged(cells, variants, data)
    return Comparison(name, config, out, data, variants, cells, schedule.Pace(read), notes)


def _check_unchanged(cells: Sequence[Cell], variants: Mapping[str, TaskModule], data: TaskData) -> None:
    """`UserError` if runs that are kept had other data, or other code of the user."""
    shape = attrgetter("options", "model.model")  # What a description of the same data depends on.
    description = json.loads(to_json(data.describe()))
    sources = {name: own_sources(task) for name, task in variants.items()}
    for cell in cells:
        if not cell.is_finished and not latest_complete_checkpoint(cell.folder / "checkpoints" / "last").exists():
            continue
        run = cell.run
        try:
            before, _ = run.description, run.setup
        except UserError:
            continue  # Training reports the damage.
        run.check_sources(sources[variant_of(cell)])
        if shape(cell.config) != shape(cells[0].config):
            continue
        free = {"source"}
        if cell.config.loop.seed != cells[0].config.loop.seed:
            # The seed draws the samples of a limit, and the scenes of `composed`.
            free |= description.keys() if cell.config.data.limit is not None else {"mean", "std"}
        for name in sorted((before.keys() & description.keys()) - free):
            if before[name] != description[name]:
                raise UserError(
                    f"the data changed since {cell.folder} ({name} differ); give another --out, or put the old data "
                    "back"
                )


def _check_options(cells: Iterable[Cell]) -> None:
    """`UserError` if a finished run has other options than its variant."""
    for cell in cells:
        if cell.is_finished:
            finish_run(cell.config)


def _with_rates(one: Comparison, trials: schedule.Trials) -> Comparison:
    """The comparison with each variant's best learning rate on the validation samples."""
    tuned, cells = schedule.trial_scores(trials, one.task.monitor), []
    for cell in one.cells:
        scores = tuned.get(variant_of(cell), {})
        rate = schedule.best_rate(scores, cell.config.optim.lr, one.task.mode == "max")
        cells.append(replace(cell, config=cell.config.replace(lr=rate)) if scores else cell)
    return replace(one, cells=cells, tuned=tuned)


def _first_of_each(cells: Iterable[Cell]) -> dict[str, Cell]:
    first: dict[str, Cell] = {}
    for cell in cells:
        first.setdefault(variant_of(cell), cell)
    return first


def _new_variants(config: CompareConfig, cells: Sequence[Cell], data: TaskData) -> dict[str, TaskModule]:
    """A new task for each variant, built and run once before any training, so that mistakes are reported at once.

    A mixer that would make the original model again is left out.
    """
    variants = {}
    description = json.loads(to_json(data.describe()))
    for name, cell in _first_of_each(cells).items():
        run, kind = cell.config, get_task(cell.config.task)
        with naming(config, name):
            task = kind(make_model(run, description, new=True), run, description)
            if run.swap.swap is not None:
                try:
                    find_sites(task.model)
                except UserError as error:
                    raise UserError(
                        f"{error}; give --insert-after MODULE, to insert each mixer there instead"
                    ) from None
            changed = start_and_swap(task, run.loop.init_from)
            if changed.same and name not in config.variants and run.swap.train_only == "all":
                continue
            check_own_mixers(task)
            task.macs()
        variants[name] = task
    return variants


def _device(config: CompareConfig) -> torch.device:
    return torch.device("cuda" if config.loop.device in ("auto", "cuda") and torch.cuda.is_available() else "cpu")


def _measure(one: Comparison, jobs: int) -> Comparison:
    """The comparison with each variant's cost and steps. One thread if `jobs` run concurrently, as in the runs."""
    config, before, data = one.cells[0].config, torch.get_num_threads(), one.data
    size = make_plan(config, data.num_train).batch_size
    torch.set_num_threads(threads := 1 if jobs else config.loop.threads or before)
    others = OtherWork()
    try:
        batch, load = _timed_batch(data.train_batches(batch_size=size, epoch=0, start=0))
        test, load_test = _timed_batch(data.test_batches(batch_size=size))
        # A variant's steps may depend on another variant's costs.
        names = one.variants if one.config.budget != "images" else one.first
        variants = {name: one.variants[name] for name in names}
        measured, evaluate = measure_variants(variants, batch, test, config, _device(one.config))
        warning = others.warning(torch.get_num_threads()) if _device(one.config).type == "cpu" else ""
    finally:
        torch.set_num_threads(before)
    if config.data.workers:
        load = load_test = 0.0
    steps = {v.name: load + (v.step.median if v.step else 0.0) for v in measured}
    pace = schedule.Pace(one.pace.read, steps, {name: seconds + load_test for name, seconds in evaluate.items()})
    total = make_plan(config, data.num_train).total_steps
    equal = schedule.equal_steps(one.config, one.out, total, measured)
    cells = schedule.with_steps(one.cells, equal, data.num_train)
    return replace(one, cells=cells, measured=measured, threads=threads, pace=pace, warning=warning)


def _timed_batch(batches: Iterable[Batch]) -> tuple[Batch, float]:
    """The first batch, and the load time of a later one in seconds: the first batch fills caches."""
    found = iter(batches)
    first, start, number = next(found), time.monotonic(), 0
    for _ in islice(found, 3):
        number += 1
    return first, (time.monotonic() - start) / max(1, number)


def _train_all(
    stage: Stage, engine: Engine, jobs: int, config: CompareConfig, console: Console, part: str
) -> dict[str, str]:
    """Train each run to its end and print a line for each; return error messages by name.

    Short runs train in this process, without the engine. `part` is the part of a result with the printed score.
    """
    cells, failures = [cell for _, _, cell in stage], dict[str, str]()
    waiting = [cell for cell in cells if not cell.is_finished]
    times = [schedule.run_seconds(one.pace, name, cell, one.data) for one, name, cell in stage if not cell.is_finished]
    if jobs and config.engine.jobs is None and sum(times) < schedule.START * len(times):
        engine, jobs = in_turn, 0
    seconds = schedule.side_by_side(times, jobs)
    for i, cell in enumerate(cell for cell in cells if cell.is_finished):
        console.print(f"[{i + 1}/{len(cells)}] {_label(cell)}: done before", highlight=False, markup=False)
    ended = len(cells) - len(waiting)
    if waiting:
        about = "at least" if jobs > 1 else "about"
        line = f"{len(waiting)} runs to train, {about} {_duration(seconds)} on this machine"
        sizes = (make_plan(cell.config, one.data.num_train).batch_size for one, _, cell in stage)
        rates = [size / one.pace.step[name] for (one, name, _), size in zip(stage, sizes)]
        line += f", {min(rates):,.0f} to {max(rates):,.0f} {stage[0][0].data.unit} a second"
        line += f", {jobs} at a time" if jobs > 1 else ""
        console.print(line, highlight=False, markup=False)
    with (
        _progress(lambda: f"{ended} of {len(cells)} runs ended", console),
        closing(engine(waiting)) as trained,
    ):
        try:
            for cell, outcome in trained:
                ended += 1
                if isinstance(outcome, OSError):
                    raise outcome
                told = outcome
                if outcome:
                    failures[cell.name] = outcome
                else:
                    result, metric = cell.run.result, cell.run.result["monitor"]
                    score = result[part].get(metric)
                    told = f"{'validation ' * (part == 'validation')}{metric_name(metric)} "
                    told += "is not defined" if score is None else f"{score:.4f}"
                    told += f" in {result['seconds']:.0f} s of training"
                line = f"[{ended}/{len(cells)}] {_label(cell)}: {told}"
                console.print(printable(line), highlight=False, markup=False)
        except KeyboardInterrupt:
            done = sum(cell.is_finished for cell in cells)
            raise KeyboardInterrupt(
                f"interrupted: {done} of {len(cells)} runs are finished; the same command again continues from here"
            ) from None
    return failures


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} minutes"


@contextmanager
def _progress(line: Callable[[], str], console: Console) -> Iterator[None]:
    """Show progress and elapsed time: with a spinner on a terminal, each minute in a log."""
    start, over, live = time.monotonic(), threading.Event(), console.is_terminal
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    shown = Progress(*columns, console=console, transient=True, disable=console.quiet or not live)
    task = shown.add_task(escape(line()))

    def tell() -> None:
        while not over.wait(1 if live else 60):
            if live:
                shown.update(task, description=escape(line()))
            else:
                after = _duration(time.monotonic() - start)
                console.print(f"{line()}, {after} so far", highlight=False, markup=False)

    thread = threading.Thread(target=tell, daemon=True)
    with shown:
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def _label(cell: Cell) -> str:
    grid = cell.name.rpartition("/")[0]
    return f"{grid}{', ' * bool(grid)}{variant_of(cell)}, seed {cell.config.loop.seed}"


def _with_runs(one: Comparison, failures: Mapping[str, str]) -> Comparison:
    """The comparison with the results of runs that failed or have a folder."""
    cells = [cell for cell in one.cells if cell.name in failures or cell.folder.exists()]
    runs = [read_run(cell, failures.get(cell.name, ""), one.task.monitor, one.out) for cell in cells]
    return replace(one, cells=cells, runs=runs)


def _report(one: Comparison, console: Console) -> Results:
    # The report omits variants without a run.
    first, runs = one.first, list(zip(one.cells, one.runs))
    names = [name for name in one.variants if name in first]
    config, task, description = one.cells[0].config, one.task, one.data.describe()
    finished = _first_of_each(cell for cell, run in runs if not run.message)
    with _progress(lambda: "baselines and pictures", console):
        baselines = fit_baselines(task, one.data) if one.config.controls else {}
        trained = {name: load_task(cell.folder).cpu().float() for name, cell in finished.items()}
        shown = make_examples(trained, one.data)
    plan = make_plan(config, one.data.num_train)
    results = Results(
        command=repeat_command(one.config),
        metric=task.monitor,
        higher=task.mode == "max",
        same=[name for name in plan_variants(one.config) if name not in one.variants],
        reference=reference_of(names, inserted=one.config.insert_after is not None),
        unit=one.data.unit,
        config=one.config.flat() | {"mixers": names, "seeds": list(dict.fromkeys(run.seed for run in one.runs))},
        data=description,
        classes=list(description.get("classes") or []),
        skeleton=skeleton_of(one.variants),
        train=one.data.num_train,
        test=one.data.num_test,
        seen=plan.total_steps * plan.accumulate * plan.batch_size,
        step_batch=plan.batch_size,
        device=str(_device(one.config)),
        environment=environment() | {"threads": one.threads},
        variants=[
            replace(
                variant,
                runs=[run for cell, run in runs if variant_of(cell) == variant.name],
                steps=make_plan(first[variant.name].config, one.data.num_train).total_steps,
                learning_rate=first[variant.name].config.optim.lr,
                tuned={f"{rate:g}": score for rate, score in one.tuned.get(variant.name, {}).items()},
            )
            for variant in one.measured
            if variant.name in first
        ],
        examples=[example.known for example in shown if isinstance(example, ExampleMaps)],
        baselines=baselines,
        warning=one.warning,
        sampling=read_sampling(runs, task.monitor, one.data.unit),
    )
    results.save(one.out / "results.json")
    found, listed = finding_sentence(results), "\n".join(f"- {note}" for note in notes(results))
    apart = differences_of(results)
    parts = [found, budget_sentence(results), table_of(results).markdown()]
    for table in filter(None, (apart, metrics_of(results))):
        parts += [f"{table.title}:", table.markdown()]
    parts += [listed, f"    {results.command}\n"]
    replace_file(one.out / "results.md", "\n\n".join(parts).encode())
    report = write_report(results, one.out / "report.html", shown)
    for table in filter(None, (table_of(results), apart)):
        console.print(table.rich())
    console.print(printable(found), highlight=False, markup=False)
    for note in [*failed_runs(results), *uncertainty(results)]:
        console.print(printable(note), highlight=False, markup=False)
    console.print(printable(f"report: {report}"), soft_wrap=True, markup=False)
    return results


def repeat_command(config: CompareConfig) -> str:
    """The command line that repeats this comparison."""
    own = config.task != CompareConfig.task
    source = config.config
    plugins = [word for name in imported_plugins() for word in ("--import", name)]
    words = ["tokenmix", *plugins, "compare", *([config.task] if own and source is None else [])]
    words += [] if source is None else ["--config", source]
    defaults = (comparison_config(config.task) if source is None else load_comparison(source)).flat()
    for name, value in config.flat().items():
        if name in ("config", "variants") or value == defaults[name]:
            continue
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{'' if value else 'no-'}{option}")
        elif isinstance(value, Mapping):
            words += [f"--{option}", *(f"{key}={item}" for key, item in value.items())]
        else:
            words += [f"--{option}", joined(value) if isinstance(value, tuple) else str(value)]
    return shlex.join(words)
