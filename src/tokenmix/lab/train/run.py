"""Training, evaluating and predicting by run folder.

A run folder holds config.json, data.json, metrics.csv, tensorboard/, checkpoints/, model.safetensors and, once training
is done, predictions.safetensors, what these weights say of each test sample, and result.json:

    monitor      the metric that chose the best epoch
    metrics      on the test samples, of the weights in model.safetensors, which are those of the best epoch
    final        the same of the weights after the last epoch
    validation   on the samples held out to choose the best epoch by, of its weights; empty if there are none
    validation_final  the same of the weights after the last epoch
    best_epoch, epochs, steps, images
    seconds      of training, without evaluation; eval_seconds, images_per_second or what the data's unit is
    parameters, macs, peak_memory (bytes: `process` since it started, `cuda` on the device)
    environment
"""

import contextlib
import dataclasses
import json
import resource
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tokenmix.environment import environment, keep_freed_memory
from tokenmix.errors import UserError, printable
from tokenmix.files import (
    DISK_ERRORS,
    DiskError,
    check_no_writer,
    is_unused,
    latest_complete_checkpoint,
    make_folder,
    one_writer,
    read_json,
    remove_partial,
    to_json,
    user_path,
    write_json,
)
from tokenmix.lab.data.fetch import log
from tokenmix.lab.data.loader import worker_errors
from tokenmix.lab.data.lookup import short_name, with_absolute_paths
from tokenmix.lab.registry import get_task
from tokenmix.lab.train.checkpoint import Checkpoint, put_weights, read_latest_checkpoint
from tokenmix.lab.train.checks import check_config, check_device, device_type, distills_layers, fit_to_ranks
from tokenmix.lab.train.config import TrainConfig
from tokenmix.lab.train.distillation import DistillingTask
from tokenmix.lab.train.distributed import (
    PeerFailure,
    data_parallel_rank,
    distributed_info,
    process_group,
    raise_on_all_ranks,
)
from tokenmix.lab.train.load import check_own_mixers, freeze_all_but, load_task, start_and_swap, stored_types
from tokenmix.lab.train.plan import (
    Progress,
    make_plan,
    seed_everything,
    warmup_note,
)
from tokenmix.lab.train.sources import ID, edited_files, identity_of, read_config, read_description
from tokenmix.lab.train.task import TaskData, TaskModule, input_sizes, size_note
from tokenmix.lab.train.trainer import Interrupted, Session, finite_outputs, fit, validate
from tokenmix.layers.base import count_parameters
from tokenmix.trust import from_caller


@from_caller
def train(config: TrainConfig, *, quiet: bool = False) -> Path:
    """Train a model, or continue with a run, and return the run folder.

    Args:
        config: the run.
        quiet: print nothing.

    Raises:
        UserError: a setting, the data or the disk does not allow it, or the loss is NaN or infinite; the last good
            checkpoint is kept.
        KeyboardInterrupt: Ctrl-C or SIGTERM; the run has been saved, and the message says how to continue.
    """
    if not isinstance(config, TrainConfig):
        raise UserError(f"train takes a TrainConfig, got {config!r}; make one with tokenmix.lab.train.make_config")
    try:
        check_device(config)
        with process_group(config.loop.device):
            quiet = quiet or not distributed_info().first
            kind = get_task(config.task)
            config = kind.with_absolute_paths(config)
            run = config.loop.resume
            if run is None:
                return _start(kind, config, quiet)
            with _held(run):
                return _resume(run, kind, config, quiet)
    except PeerFailure as stop:
        raise SystemExit(stop.code) from None


@from_caller
def evaluate(
    run: Path,
    data: str | None = None,
    *,
    device: str = "auto",
    limit: int | None = None,
    options: Mapping[str, Any] | None = None,
    change: Callable[[TaskModule, TaskData], None] | None = None,
) -> dict[str, Any]:
    """Metrics of a run's model on the test samples of its own data, or of other data with the same classes.

    Args:
        run: the run folder.
        data: another data set, prepared as the run's own was.
        device: auto, cpu, cuda or mps.
        limit: use this many test samples.
        options: options of the task's evaluation, by name, that replace the run's own.
        change: called with the task and the data before the evaluation, for example to put another form of the model
            there.
    """
    task, config, description = load_task(run, options)
    config = config.replace(data=data or config.data.data, device=device, limit_eval=limit or config.data.limit_eval)
    check_device(config)
    if device_type(config) == "cpu":
        keep_freed_memory()
    # Nothing is chosen here, and other data may have fewer training samples than the run held out.
    read = config.replace(data=with_absolute_paths(config.data.data), validation=0)
    source = type(task).load_data(read, like=description)
    if change is not None:
        change(task, source)
    # Batches as in the run, so that its own figures come back to the last bit.
    results = validate(task, source, config, config.loop.batch_size // config.optim.accumulate)
    return {"data": config.data.data, "source": source.describe().get("source"), "samples": source.num_test, **results}


def predict(
    run: Path,
    inputs: Sequence[str | Path],
    out: Path | None = None,
    *,
    options: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Predictions of a run's model for files, of a text task also for texts; what cannot be read is a `UserError`.

    With `out`, a folder, a task whose predictions are masks or boxes writes them there as files and images. `options`
    are as in `evaluate`.
    """
    if not inputs:
        raise UserError("no files to predict; name at least one")
    task, _, _ = load_task(run, options)
    with finite_outputs(task):
        return task.predict(inputs) if out is None else _predict_into(task, inputs, out)


def _predict_into(task: TaskModule, inputs: Sequence[str | Path], out: Path) -> list[dict[str, Any]]:
    if not task.writes:
        return task.predict_into(inputs, out)
    made = [folder for folder in (out, *out.parents) if not folder.exists()]
    make_folder(out)
    try:
        return task.predict_into(inputs, out)
    except BaseException:
        with contextlib.suppress(OSError):  # What has got a file is not empty and stays.
            for folder in made:
                folder.rmdir()
        raise


def run_folder(config: TrainConfig) -> Path:
    """The folder of a run: the config's, or one named by model, data and seed."""
    name = f"{config.model.model.replace(':', '-')}-{short_name(config.data.data)}-{config.loop.seed}"
    return config.loop.out or Path("runs") / name


@contextmanager
def _held(run: Path) -> Iterator[None]:
    """Lock the run folder: one process group at a time works in it, and its first process holds the lock."""
    with contextlib.ExitStack() as stack:
        with raise_on_all_ranks():
            if distributed_info().first and run.is_dir():
                stack.enter_context(one_writer(run))
                for folder in (run, run / "checkpoints"):
                    remove_partial(folder)
        yield


def _start(kind: type[TaskModule], config: TrainConfig, quiet: bool) -> Path:
    run = run_folder(config)
    with raise_on_all_ranks():
        config = _checked(kind, config)
        if distributed_info().first:
            _check_empty(run)
            make_folder(run)
    with _held(run):
        with raise_on_all_ranks():
            if distributed_info().first:
                _check_empty(run)
        try:
            with raise_on_all_ranks():
                session = _prepare(kind, config, config.loop.init_from)
                if distributed_info().first:
                    _write_setup(run, config, session)
            for note in () if quiet else session.notes:
                log(note)
            return _work(run, session, Progress(), None, quiet)
        except BaseException:
            if distributed_info().first and not _has_begun(run):
                shutil.rmtree(run, ignore_errors=True)
            raise


def _check_empty(run: Path) -> None:
    if run.exists() and not (run.is_dir() and is_unused(run)):
        check_no_writer(run)
        raise UserError(
            f"{run} exists already; continue it with --resume {run}, remove it, or give another folder with --out"
        )


def _write_setup(run: Path, config: TrainConfig, session: Session) -> None:
    with _one_line_errors(run):
        setup = {
            ID: secrets.token_hex(16),
            "config": dataclasses.asdict(config),
            "command": sys.argv,
            "environment": environment(),
        }
        write_json(run / "config.json", setup)
        write_json(run / "data.json", session.task.data)
        session.data.save(run)


def _resume(run: Path, kind: type[TaskModule], given: TrainConfig, quiet: bool) -> Path:
    with raise_on_all_ranks():
        session, checkpoint = _restored(run, kind, given)
    progress, plan = Progress.from_dict(checkpoint.meta["progress"]), session.plan
    if not (progress.epoch <= plan.epochs and progress.batch <= plan.batches(0) and progress.step <= plan.total_steps):
        raise UserError(f"{run} stopped at a step beyond its config; restore config.json and meta.json from a copy")
    if not quiet:
        batch = f"{plan.processes} x {session.task.config.loop.batch_size} {session.data.unit}"
        log(f"{run} continues from step {progress.step} of {plan.total_steps}, {batch} a step")
    return _work(run, session, progress, checkpoint.state, quiet)


def _restored(run: Path, kind: type[TaskModule], given: TrainConfig) -> tuple[Session, Checkpoint]:
    config = fit_to_ranks(_merged(given, read_config(run), run))
    if (run / "result.json").exists():
        raise UserError(
            f"{run} is finished; evaluate it with: tokenmix eval {run}, or start from it with --init-from {run}"
        )
    last = run / "checkpoints" / "last"
    if not any(latest_complete_checkpoint(last.with_name(name)).exists() for name in ("last", "best")):
        raise UserError(f"{run} was stopped before its first checkpoint; remove the folder and start again")
    # Before gigabytes of a checkpoint are read.
    config = _checked(kind, config)
    checkpoint, own = read_latest_checkpoint(run), identity_of(run)
    if own and checkpoint.run.get(ID) != own[ID]:
        raise UserError(f"the checkpoint in {run} is of another run; put the run's own back, or start a new run")
    for edited in edited_files(checkpoint.run, own):
        raise UserError(
            f"{run / edited} is not as it was when the run was started; put it back, or start a new run with "
            f"--init-from {run}"
        )
    session = _prepare(kind, config)
    if session.task.data != read_description(run):
        raise UserError(f"the data {config.data.data!r} is not what {run} was started with; see its data.json")
    put_weights(session.task.model, checkpoint.weights, last, stored_types(config))
    return session, checkpoint


def _checked(kind: type[TaskModule], config: TrainConfig) -> TrainConfig:
    """The config with the number of processes that run, if there are several; `UserError` if it cannot be."""
    check_config(config)
    kind.check(config, config.loop.batch_size // config.optim.accumulate)
    here = distributed_info()
    if here.world_size == 1:
        return config
    return config.replace(devices=here.local_world_size, num_nodes=here.num_nodes)


def _prepare(kind: type[TaskModule], config: TrainConfig, start: Path | None = None) -> Session:
    """Read the data, draw the first weights, which depend on the seed alone or are those of `start`, and swap."""
    if config.loop.threads is not None:
        torch.set_num_threads(config.loop.threads)
    if device_type(config) == "cpu":
        keep_freed_memory()
    data = kind.load_data(config)
    rank, parts = data_parallel_rank(config)
    plan = make_plan(config, data.num_train, parts, data.unit)
    # As JSON would give it back, so that a run that continues sees what its first start saw.
    description = json.loads(to_json(data.describe()))
    seed_everything(config.loop.seed, 0, 0)
    task = kind(kind.model_from_config(config, description), config, description)
    changed = start_and_swap(task, start)
    check_own_mixers(task)
    if isinstance(task, DistillingTask) and task.options.teacher is not None:
        task.learn_from(_load_teacher(task), data, changed.swapped)
    if config.swap.train_only == "mixers" or distills_layers(config):
        freeze_all_but(task, changed.mixers)
    if config.loop.grad_checkpointing:
        _checkpoint_blocks(task.model)
    data = data if parts == 1 else data.part(rank, parts)
    if (shared := config.loop.token_parallel) > 1:
        from tokenmix.parallel import check_token_parallel

        check_token_parallel(task.model, shared)
    # What its settings do not allow is reported here, by one process and before anything is written.
    data.train_batches(batch_size=plan.batch_size, epoch=0, start=0)
    # Counted while the model is whole: fsdp will cut it into parts.
    sizes = input_sizes(task.model, task.data.get("img_size"))
    counts = {"parameters": count_parameters(task.model), "macs": task.macs(), **sizes}
    warmup = warmup_note(config, plan)
    notes = [*([size_note(sizes)] if sizes else []), *changed.notes, *([warmup] if warmup else [])]
    return Session(task, data, plan, counts, notes)


def _load_teacher(task: DistillingTask) -> DistillingTask:
    name, kind = task.options.teacher, type(task)
    if not user_path(name).is_dir():
        return kind.named_teacher(name, task.config, task.data)
    teacher = load_task(user_path(name))[0]
    if not isinstance(teacher, kind):
        raise UserError(f"the teacher {name} is a run of {teacher.config.task}; give one of {task.config.task}")
    return teacher


def _checkpoint_blocks(model: nn.Module) -> None:
    # transformers' models have a switch of their own, whose name its version 6 changes.
    for name in ("activation_checkpointing_enable", "gradient_checkpointing_enable"):
        if hasattr(model, name):
            getattr(model, name)()
            return
    switch = getattr(model, "set_grad_checkpointing", None)
    if switch is None:
        raise UserError(f"{type(model).__name__} has no gradient checkpointing; leave --grad-checkpointing out")
    try:
        switch(True)
    except (AssertionError, NotImplementedError) as error:
        raise UserError(
            f"{type(model).__name__} has no gradient checkpointing ({error}); leave --grad-checkpointing out"
        ) from None


def _work(run: Path, session: Session, progress: Progress, state: dict[str, Any] | None, quiet: bool) -> Path:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with _one_line_errors(run), worker_errors():
        identity = identity_of(run)
        best, final = fit(session, run, progress, state, identity, quiet=quiet)
        result = _result(session, progress, best, final, identity.get(ID))
        with raise_on_all_ranks():
            if distributed_info().first:
                write_json(run / "result.json", result)
    if not quiet:
        monitor, unit = session.task.monitor, session.data.unit
        line = (
            f"test {monitor} {result['metrics'][monitor]:.4f} "
            f"(epoch {result['best_epoch']} of {session.plan.epochs}), {result['seconds']:.1f} s of training, "
            f"{result[f'{unit}_per_second']:,.0f} {unit}/s; run folder {run}"
        )
        print(printable(line))
    return run


def _result(
    session: Session, progress: Progress, best: dict[str, Any], final: dict[str, Any], run_id: str | None
) -> dict[str, Any]:
    config, unit = session.task.config, session.data.unit
    # ru_maxrss counts bytes on macOS and KiB elsewhere.
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    cuda = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    return {
        ID: run_id,
        "task": config.task,
        "model": config.model.model,
        "data": config.data.data,
        "seed": config.loop.seed,
        "monitor": session.task.monitor,
        "metrics": best,
        "final": final,
        "validation": progress.best,
        "validation_final": progress.final,
        "best_epoch": progress.best_epoch,
        "epochs": progress.epoch,
        "steps": progress.step,
        unit: progress.images,
        "seconds": round(progress.train_seconds, 3),
        "eval_seconds": round(progress.eval_seconds, 3),
        f"{unit}_per_second": round(progress.images / progress.train_seconds, 2),
        **session.counts,
        "peak_memory": {"process": memory, "cuda": cuda},
        "environment": environment(),
    }


def _merged(given: TrainConfig, saved: TrainConfig, run: Path) -> TrainConfig:
    """The saved config, with what may be changed; anything else that differs is refused."""
    own, changes, may = saved.flat(), {}, given.marked("resumable")
    for name, value in given.flat().items():
        if value == own.get(name) or name == "resume" or (name == "out" and value == run):
            continue
        if name not in may:
            raise UserError(
                f"--resume continues with the run's own {name}={own.get(name)!r}; "
                f"leave {value!r} out, or start a new run with --init-from {run}"
            )
        changes[name] = value
    return saved.replace(**changes)


def _has_begun(run: Path) -> bool:
    """Whether a row or a checkpoint was written; a folder without is removed, so that the command can be repeated."""
    rows = run / "metrics.csv"
    return (run / "checkpoints").exists() or (rows.exists() and rows.stat().st_size > 0)


@contextmanager
def _one_line_errors(run: Path) -> Iterator[None]:
    """External causes that stop a run, as one line that says what is kept and how to continue."""
    try:
        yield
    except (Interrupted, KeyboardInterrupt):
        if not distributed_info().first:
            raise PeerFailure(130) from None
        raise KeyboardInterrupt(f"tokenmix: interrupted; {_kept(run)}") from None
    except DiskError:
        raise
    except UserError as error:
        raise UserError(f"{error}; {_kept(run)}" if (run / "config.json").exists() else str(error)) from None
    except RuntimeError as error:
        # On a CPU the allocator's error has no class of its own.
        if not isinstance(error, torch.OutOfMemoryError) and "DefaultCPUAllocator" not in str(error):
            raise
        raise UserError(
            "out of memory; lower --batch-size, raise --accumulate, or split each image over several processes with "
            f"--token-parallel; {_kept(run)}"
        ) from None
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        raise DiskError(
            f"{error.strerror}: {error.filename or run}; {DISK_ERRORS[error.errno]}; {_kept(run)}"
        ) from None


def _kept(run: Path) -> str:
    last = latest_complete_checkpoint(run / "checkpoints" / "last")
    if not (last / "meta.json").is_file():
        return "no checkpoint was written yet"
    try:
        step = read_json(last / "meta.json")["progress"]["step"]
    except (LookupError, TypeError, ValueError, RecursionError):
        return f"{last} is damaged"
    return f"the checkpoint of step {step} is kept, continue with: tokenmix train --resume {run}"
