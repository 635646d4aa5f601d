"""Training, evaluation and prediction by run folder; docs/guides/runs.md lists the files of a run folder."""

import contextlib
import dataclasses
import json
import resource
import secrets
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

import tokenmix
from tokenmix.environment import environment
from tokenmix.errors import UserError, as_user_error, printable
from tokenmix.files import (
    DISK_ERRORS,
    DiskError,
    Values,
    check_no_writer,
    is_unused,
    latest_complete_checkpoint,
    make_folder,
    one_writer,
    read_json,
    remove_partial,
    to_json,
    write_json,
)
from tokenmix.lab.data.fetch import log
from tokenmix.lab.data.indexed import worker_errors
from tokenmix.lab.data.lookup import short_name, with_absolute_paths
from tokenmix.lab.train.checkpoint import Checkpoint, put_weights, read_latest_checkpoint
from tokenmix.lab.train.config import TrainConfig
from tokenmix.lab.train.distillation import DistillingTask
from tokenmix.lab.train.distributed import (
    PeerFailure,
    all_gather,
    distributed_info,
    process_group,
    raise_on_all_ranks,
)
from tokenmix.lab.train.folder import ID, RunFolder
from tokenmix.lab.train.load import (
    check_own_mixers,
    freeze_all_but,
    load_task,
    make_model,
    own_sources,
    start_and_swap,
    stored_types,
)
from tokenmix.lab.train.metrics import num_rows
from tokenmix.lab.train.plan import (
    batch_norm_errors,
    check_config,
    check_device,
    distills_layers,
    fit_to_ranks,
    make_plan,
    plan_notes,
    seed_everything,
    with_epochs,
)
from tokenmix.lab.train.task import input_sizes, size_note
from tokenmix.lab.train.trainer import Engine, Session, finite_outputs, training
from tokenmix.registry import Arguments, is_transformers
from tokenmix.trust import from_caller

CALIBRATION = 128
"""Training images that calibrate the ranges; 16 images gave the same accuracy to 0.001 (dev/LOG.md, 2026-11-21)."""


@from_caller
def train(config: TrainConfig, *, quiet: bool = False) -> Path:
    """Train a model, or continue a run, and return the run folder.

    Raises:
        UserError: a setting, the data or the disk does not allow the run, or the loss is not finite; the last good
            checkpoint is kept.
        KeyboardInterrupt: Ctrl-C or SIGTERM; the run is saved, and the message says how to continue.
    """
    if not isinstance(config, TrainConfig):
        raise UserError(f"train takes a TrainConfig, got {config!r}; make one with tokenmix.lab.train.make_config")
    with process_group(config.loop.device):
        with raise_on_all_ranks():
            config = _resolve(config)
        run, quiet = RunFolder(run_folder(config)), quiet or not distributed_info().first
        with _held(run.path, new=config.loop.resume is None):
            with raise_on_all_ranks():
                session = _prepare(config, run)
            for note in () if quiet else session.notes:
                log(note)
            with _one_line_errors(run.path), worker_errors(), training(session, run, quiet=quiet) as loop:
                loop.fit()
                best, final = loop.test()
                with raise_on_all_ranks():
                    line = _write_result(session, run, best, final)
        if not quiet:
            print(printable(line))
        return run.path


@from_caller
def finish_run(config: TrainConfig, *, quiet: bool = False) -> Path:
    """Train the run in the folder `config.loop.out` to its end, whatever its state: for programs that make many runs.

    A finished run stays unchanged, a stopped run continues bit for bit, a run without a checkpoint starts again.

    Raises:
        UserError: no folder is given, the folder holds a run with other options, or another process writes to it;
            otherwise as `train`.
    """
    if (out := config.loop.out) is None:
        raise UserError("a run that can be resumed needs a folder; give out")
    run, finished = RunFolder(out), False
    with process_group(config.loop.device):
        # Rank 0 decides, since rank 0 also removes files.
        with raise_on_all_ranks():
            if distributed_info().first and (out / "config.json").exists():
                configs = config.task_class.with_absolute_paths(config), run.saved_config
                # Options by name, as JSON returns them.
                wanted, before = (json.loads(json.dumps(one.flat(), default=str)) for one in configs)
                # Without --epochs the run has chosen a number.
                wanted["epochs"] = wanted["epochs"] or before["epochs"]
                for name, value in wanted.items():
                    if name not in config.marked("free") and value != before.get(name):
                        raise UserError(
                            f"{out} holds a run with {name}={before.get(name)!r} instead of {value!r}; remove it, or "
                            "give another folder"
                        )
                finished = run.is_finished
                if not finished and latest_complete_checkpoint(out / "checkpoints" / "last").exists():
                    own = {name: config.flat()[name] for name in ("device", "workers", "threads")}
                    config = run.config.replace(resume=out, **own)
                elif not finished:
                    with one_writer(out):
                        shutil.rmtree(out)
        finished, config = all_gather((finished, config))[0]
        return out if finished else train(config, quiet=quiet)


@from_caller
def evaluate(
    run: Path | RunFolder,
    data: str | None = None,
    *,
    device: str = "auto",
    limit: int | None = None,
    options: Arguments | None = None,
    optimized: Literal["float32", "bfloat16", "int8"] | None = None,
) -> Values:
    """Metrics of a run's model on the test samples of its own data, or of other data with the same classes.

    Args:
        run: the run folder.
        data: another data set, preprocessed like the run's.
        device: auto, cpu, cuda or mps.
        limit: use this many test samples.
        options: options of the task's evaluation, by name; they override the run's.
        optimized: evaluate the CPU copy of `tokenmix.optimize` in this dtype, with training images as its example; only
            for models that take a batch of images.
    """
    task = load_task(run, options)
    config = task.config.replace(data=data or task.config.data.data, limit_eval=limit or task.config.data.limit_eval)
    # A CPU copy computes in its own dtype.
    config = config.replace(device=device) if optimized is None else config.replace(device="cpu", precision="32")
    check_device(config)
    # No epoch is chosen here, and other data may have fewer training samples than the run held out.
    read = config.replace(data=with_absolute_paths(config.data.data), validation=0)
    source = type(task).load_data(read, like=task.data)
    engine = Engine(config, task)
    if optimized is not None:
        batch = next(iter(source.batches_of("train", CALIBRATION)))
        images = batch.get("image") if isinstance(batch, dict) else None
        if not isinstance(images, Tensor):
            raise UserError(f"{type(task).__name__} is not trained on batches of images; leave --optimize out")
        task.model = tokenmix.optimize(task.model, images, optimized, measure=False)
    # Batches as in the run, so that the run's figures are reproduced bit for bit.
    with finite_outputs(task.model), worker_errors():
        engine.evaluate(source.test_batches(batch_size=config.loop.batch_size // config.optim.accumulate))
    told = {} if optimized is None else {"optimize": optimized}
    told |= {
        "data": config.data.data,
        "source": source.describe().get("source"),
        "samples": num_rows(task.samples) if task.samples else source.num_test,
    }
    return {**told, **input_sizes(task.model, task.data.get("img_size")), **task.results}


def predict(
    run: Path | RunFolder,
    inputs: Sequence[str | Path],
    out: Path | None = None,
    *,
    options: Arguments | None = None,
) -> list[Values]:
    """Predictions of a run's model for files, or for texts if the task reads texts.

    With a folder `out`, a task that predicts masks or boxes also writes files and images. `options` as in `evaluate`.

    Raises:
        UserError: an input cannot be read.
    """
    if not inputs:
        raise UserError("no files to predict; name at least one")
    task = load_task(run, options)
    with finite_outputs(task.model), torch.no_grad():
        if out is None:
            return task.predict(inputs)
        made = [folder for folder in (out, *out.parents) if not folder.exists()]
        make_folder(out)
        try:
            return task.predict_into(inputs, out)
        except BaseException:
            with contextlib.suppress(OSError):  # Folders with files are not empty and stay.
                for folder in made:
                    folder.rmdir()
            raise


def run_folder(config: TrainConfig) -> Path:
    """The run's folder: the one to continue, the config's, or one named by model, data and seed."""
    model = config.model.model
    model = short_name(model) if is_transformers(model) else model.replace(":", "-")
    name = f"{model}-{short_name(config.data.data)}-{config.loop.seed}"
    return config.loop.resume or config.loop.out or Path("runs") / name


def _resolve(given: TrainConfig) -> TrainConfig:
    """The config with absolute paths and the number of processes; a resumed run may change only a few options."""
    config, here = given.task_class.with_absolute_paths(given), distributed_info()
    if (run := config.loop.resume) is not None:
        folder = RunFolder(run)
        saved = folder.config
        own = saved.flat()
        changes = {name: value for name, value in config.flat().items() if value != own.get(name)}
        if changes.get("out") == run:
            del changes["out"]
        for name in (name for name in changes if name not in {*given.marked("resumable"), "resume"}):
            raise UserError(
                f"--resume continues with the run's own {name}={own.get(name)!r}; "
                f"leave {name}={changes[name]!r} out, or start a new run with --init-from {run}"
            )
        config = fit_to_ranks(saved.replace(**changes), folder.setup.get("step_size"))
        if folder.is_finished:
            raise UserError(
                f"{run} is finished; evaluate it with: tokenmix eval {run}, or start from it with --init-from {run}"
            )
    check_device(config)
    check_config(config)
    config.task_class.check(config, config.loop.batch_size // config.optim.accumulate)
    several = {"devices": here.local_world_size, "num_nodes": here.num_nodes}
    return config if here.world_size == 1 else config.replace(**several)


@contextmanager
def _held(run: Path, *, new: bool) -> Iterator[None]:
    """Lock the run folder for one process group; rank 0 holds the lock.

    A `new` folder is created, and removed if the block fails before training, so that the command can be repeated.
    """
    first = distributed_info().first
    with contextlib.ExitStack() as stack:
        with raise_on_all_ranks():
            if first:
                if new:
                    _check_empty(run)
                    make_folder(run)
                stack.enter_context(one_writer(run))
                if new:
                    _check_empty(run)
                for folder in (run, run / "checkpoints"):
                    remove_partial(folder)
        try:
            yield
        except BaseException:
            if new and first and not _has_rows(run) and not _checkpoints(run):
                shutil.rmtree(run, ignore_errors=True)
            raise


def _check_empty(run: Path) -> None:
    if run.exists() and not (run.is_dir() and is_unused(run)):
        check_no_writer(run)
        raise UserError(
            f"{run} exists already; continue it with --resume {shlex.quote(str(run))}, remove it, or give another "
            "folder with --out"
        )


def _prepare(config: TrainConfig, run: RunFolder) -> Session:
    """Read the data, and build the model with initial weights or those of the run's last checkpoint.

    Initial weights depend on the seed alone, or come from `init_from`; mixers are swapped in afterwards.
    """
    checkpoint = None if config.loop.resume is None else _last_checkpoint(run)
    kind, shared = config.task_class, config.loop.token_parallel
    if config.loop.threads is not None:
        torch.set_num_threads(config.loop.threads)
    data = kind.load_data(config)
    rank, parts = distributed_info().data_parallel(shared)
    plan = make_plan(config, data.num_train, parts, data.unit)
    notes = [*data.notes, *plan_notes(config, plan, data.num_train, data.unit)]
    config = with_epochs(config, plan)
    # As JSON returns it, so that a run that continues reads the same values as its first start.
    description = json.loads(to_json(data.describe()))
    seed_everything(config.loop.seed, 0, 0)
    task = kind(make_model(config, description, new=checkpoint is None), config, description)
    changed = start_and_swap(task, config.loop.init_from if checkpoint is None else None)
    check_own_mixers(task)
    if isinstance(task, DistillingTask) and task.options.teacher is not None:
        task.learn_from(task.find_teacher(), data, changed.swapped)
    if config.swap.train_only == "mixers" or distills_layers(config):
        freeze_all_but(task, changed.mixers)
    if config.loop.grad_checkpointing:
        _checkpoint_blocks(task.model)
    data = data if parts == 1 else data.part(rank, parts)
    if shared > 1:
        from tokenmix.parallel import check_token_parallel

        check_token_parallel(task.model, shared)
    # Settings that the data does not allow are reported here, by one process and before anything is written.
    data.train_batches(batch_size=plan.batch_size, epoch=0, start=0)
    # Counted before fsdp shards the model.
    sizes = input_sizes(task.model, task.data.get("img_size"))
    session = Session(task, data, plan)
    session.counts |= {"parameters": task.num_parameters(), "macs": task.macs(), **sizes}
    if checkpoint is None:
        session.notes += [*([size_note(sizes)] if sizes else []), *changed.notes, *notes]
        if distributed_info().first:
            setup: Values = {"config": dataclasses.asdict(config), "monitor": task.monitor, "command": sys.argv}
            setup["step_size"] = plan.batch_size * plan.accumulate * distributed_info().world_size
            setup["sources"] = own_sources(task)
            with _one_line_errors(run.path):
                write_json(run.path / "config.json", {ID: secrets.token_hex(16), **setup, "environment": environment()})
                write_json(run.path / "data.json", description)
                data.save(run.path)
    else:
        run.check_sources(own_sources(task))
        # Older runs describe less.
        if any(description.get(name) != value for name, value in run.description.items()):
            raise UserError(
                f"the data {config.data.data!r} is not what {run.path} was started with; put that back, or start a new "
                f"run with --init-from {run.path}"
            )
        # A later version may have another default.
        task.watch(run.setup.get("monitor", task.monitor))
        put_weights(task.model, checkpoint.weights, run.path / "checkpoints" / "last", stored_types(config))
        at = checkpoint.progress
        chosen = at.best_epoch is not None and data.num_validation
        if chosen and not isinstance(at.best.get(task.monitor, ""), int | float | None):
            raise UserError(f"{run.path} has no {task.monitor} of its best epoch; restore meta.json from a copy")
        if max(at.epoch, at.best_epoch or 0) > plan.epochs or at.batch > plan.batches(0) or at.step > plan.total_steps:
            raise UserError(
                f"{run.path} stopped at a step beyond its config; restore config.json and meta.json from a copy"
            )
        batch = f"{plan.processes} x {config.loop.batch_size} {data.unit}"
        session.notes.append(f"{run.path} continues from step {at.step} of {plan.total_steps}, {batch} a step")
        session.progress, session.state = at, checkpoint.state
    return session


def _last_checkpoint(run: RunFolder) -> Checkpoint:
    """The checkpoint to continue from; `UserError` if it belongs to another run or other options."""
    places = (run.path / "checkpoints" / name for name in ("last", "best"))
    if not any(latest_complete_checkpoint(place).exists() for place in places):
        raise UserError(f"{run.path} was stopped before its first checkpoint; remove the folder and start again")
    checkpoint = read_latest_checkpoint(run.path)
    if run.identity and checkpoint.run.get(ID) != run.identity[ID]:
        raise UserError(f"the checkpoint in {run.path} is of another run; put the run's own back, or start a new run")
    for edited in run.edited(checkpoint.run):
        raise UserError(
            f"{edited} is not as it was when the run was started; put it back, or start a new run with "
            f"--init-from {run.path}"
        )
    return checkpoint


def _checkpoint_blocks(model: nn.Module) -> None:
    # transformers' models have their own switch, whose name changes in version 6.
    switches = {
        "activation_checkpointing_enable": (),
        "gradient_checkpointing_enable": (),
        "set_grad_checkpointing": (True,),
    }
    name = next((name for name in switches if hasattr(model, name)), None)
    what, remedy = f"{type(model).__name__} has no gradient checkpointing", "; leave --grad-checkpointing out"
    if name is None:
        raise UserError(what + remedy)
    with as_user_error(f"{what} (", f"){remedy}", AssertionError, NotImplementedError):
        getattr(model, name)(*switches[name])


def _write_result(session: Session, run: RunFolder, best: Values, final: Values) -> str:
    """Write result.json on rank 0; return a summary line."""
    task, progress, unit = session.task, session.progress, session.data.unit
    config, rate = task.config, round(progress.images / progress.train_seconds, 2)
    # ru_maxrss counts bytes on macOS and KiB elsewhere.
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    cuda = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    result = {
        ID: run.identity.get(ID),
        "task": config.task,
        "model": config.model.model,
        "data": config.data.data,
        "seed": config.loop.seed,
        "monitor": task.monitor,
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
        f"{unit}_per_second": rate,
        **session.counts,
        "peak_memory": {"process": memory, "cuda": cuda},
        "environment": environment(),
    }
    if distributed_info().first:
        write_json(run.path / "result.json", result)
    return (
        f"test {task.monitor} {best[task.monitor]:.4f} (epoch {progress.best_epoch} of {session.plan.epochs}), "
        f"{progress.train_seconds:.1f} s of training, {rate:,.0f} {unit}/s; run folder {run.path}"
    )


@contextmanager
def _one_line_errors(run: Path) -> Iterator[None]:
    """Report external causes that stop a run in one line: what is kept, and how to continue."""
    try:
        with batch_norm_errors():
            yield
    except KeyboardInterrupt:
        if not distributed_info().first:
            raise PeerFailure(130) from None
        raise KeyboardInterrupt(f"tokenmix: interrupted; {_kept(run)}") from None
    except DiskError:
        raise
    except UserError as error:
        raise UserError(f"{error}; {_kept(run)}" if (run / "config.json").exists() else str(error)) from None
    except RuntimeError as error:
        # The CPU allocator's error has no class of its own.
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


def _has_rows(run: Path) -> bool:
    file = run / "metrics.csv"
    return file.exists() and file.stat().st_size > 0


def _checkpoints(run: Path) -> list[Path]:
    """The complete ones, the last before the best."""
    places = (latest_complete_checkpoint(run / "checkpoints" / name) for name in ("last", "best"))
    return [place for place in places if (place / "meta.json").is_file()]


def _kept(run: Path) -> str:
    last = next(iter(_checkpoints(run)), None)
    if last is None:
        return "no checkpoint was written yet" + (f"; remove {run} to start again" if _has_rows(run) else "")
    try:
        step = read_json(last / "meta.json")["progress"]["step"]
    except (LookupError, TypeError, ValueError, RecursionError):
        return f"{last} is damaged"
    return f"the checkpoint of step {step} is kept, {RunFolder(run).to_continue}"
