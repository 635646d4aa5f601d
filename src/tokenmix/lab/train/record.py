"""Logs of a run: metrics.csv, TensorBoard, trackers, progress bar; and the check that the loss is finite."""

import csv
import io
import math
import os
import secrets
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from torch import Tensor

from tokenmix.errors import UserError, as_user_error, printable
from tokenmix.files import Values, open_to_append, read_bytes, read_json, replace_file, write_json
from tokenmix.lab.data.fetch import log
from tokenmix.lab.train.config import TrainConfig
from tokenmix.lab.train.distributed import PeerFailure, all_reduce_mean, distributed_info
from tokenmix.lab.train.plan import Progress, TrainingPlan
from tokenmix.lab.train.task import TaskData, TaskModule


class Recorder:
    """Writes a row every `log_every` steps and after each epoch, with the mean loss since the previous row.

    Losses stay on the device until a row is due, so steps never wait for the device. Rank 0 writes the mean over ranks.
    The column that counts samples has the name of the data's unit.
    """

    def __init__(
        self, run: Path, plan: TrainingPlan, progress: Progress, task: TaskModule, data: TaskData, *, quiet: bool
    ) -> None:
        self.path, self.plan, self.progress, self.task = run / "metrics.csv", plan, progress, task
        self.log_every, self.quiet, self.unit = task.config.loop.log_every, quiet, data.unit
        self.pending: dict[str, list[Tensor]] = {}
        self.first = distributed_info().first
        self.started = self.lr = 0.0
        self.row_start = (progress.images, progress.train_seconds)
        if self.first:
            logger = task.config.loop.logger
            self.logger = None if logger is None else _open_tracker(task.config, run, progress.step, quiet=quiet)
            self.columns = _cut(self.path, progress.csv_bytes)
            progress.csv_bytes = self.path.stat().st_size
            self.file = open_to_append(self.path)
        self.latest: dict[str, float] = {}
        self.evaluated = task.numbers() if data.num_validation else []

    def state_dict(self) -> Values:
        """Losses that no row has yet, and the start of the next row's rate."""
        return {"pending": self._columns(), "row_start": list(self.row_start)}

    def load_state_dict(self, state_dict: Values) -> None:
        self.pending = {name: list(column) for name, column in state_dict["pending"].items()}
        self.row_start = (int(state_dict["row_start"][0]), float(state_dict["row_start"][1]))

    def start_clock(self) -> None:
        """Start the clock of training or of evaluation; only one of them runs at a time."""
        self.started = time.perf_counter()

    def record_batch(self, logs: dict[str, Tensor], lr: float) -> None:
        """Record a batch's loss and learning rate; write a row if due. The epoch's row includes the last batch."""
        progress, self.lr = self.progress, lr
        for name, value in logs.items():
            self.pending.setdefault(name, []).append(value)
        if progress.batch == self.plan.batches(progress.epoch):
            self.settle()
        elif progress.batch % self.plan.accumulate == 0 and progress.step % self.log_every == 0:
            self.settle()
            self._write(self._train_values())

    def record_evaluation(self) -> None:
        """Write the epoch's row and print a line; the training clock restarts."""
        progress, results = self.progress, self.task.results
        progress.eval_seconds += time.perf_counter() - self.started
        progress.final = dict(results)
        # Without validation samples the last epoch is the best.
        if not results or progress.best_epoch is None or _as_good(self.task, results, progress.best):
            progress.best_epoch, progress.best = progress.epoch + 1, dict(results)
        values = {**self._train_values(), **{f"val_{name}": results[name] for name in self.evaluated}}
        self._write(values)
        if self.first:
            self.task.draw(self.path.parent / "samples", progress.step)
        if not self.quiet:
            score = f"{self.task.monitor} {results[self.task.monitor]:.4f}  " if self.evaluated else ""
            line = (
                f"epoch {progress.epoch + 1}/{self.plan.epochs}  step {progress.step}/{self.plan.total_steps}  loss "
                f"{values['train_loss']:.4f}  {score}{values[f'{self.unit}_per_second']:,.0f} {self.unit}/s"
            )
            print(printable(line), file=sys.stderr, flush=True)
        self.start_clock()

    def record_test(self) -> None:
        self.progress.eval_seconds += time.perf_counter() - self.started

    def sync(self) -> None:
        """Flush metrics.csv to the disk, before a checkpoint that relies on its rows."""
        if self.first:
            self._check_folder()
            os.fsync(self.file.fileno())

    def close(self) -> None:
        if self.first:
            self.file.close()
            if self.logger is not None:
                self.logger.close(finished=self.progress.epoch == self.plan.epochs)

    def _check_folder(self) -> None:
        """Raise `UserError` if the run folder or a part of it is missing."""
        run = self.path.parent
        board = [self.logger.folder] if isinstance(self.logger, _TensorBoard) else []
        for part in (run, run / "config.json", self.path, *board):
            if not part.exists():
                raise UserError(
                    f"{part} was removed or renamed during the run, so training stopped; "
                    "continue a renamed folder with --resume FOLDER, or start again"
                )

    def settle(self) -> None:
        """Update the clock; `UserError` if a loss since the last row is not finite."""
        now = time.perf_counter()
        self.progress.train_seconds += now - self.started
        self.started = now
        if not self.pending:
            return
        columns = {name: all_reduce_mean(column) for name, column in self._columns().items()}
        self.pending = {name: list(column) for name, column in columns.items()}
        losses = columns["loss"]
        bad = (~losses.isfinite()).nonzero()
        if len(bad):
            first = int(bad[0])
            before = self.progress.step * self.plan.accumulate - len(losses) + first
            raise self.diverged(f"the loss is {losses[first].item()}", before // self.plan.accumulate + 1)

    def diverged(self, what: str, step: int) -> BaseException:
        """The error for numbers that are not finite. All ranks see the numbers; rank 0 reports them."""
        if not self.first:
            return PeerFailure(2)
        if step == 1:
            return UserError(
                f"{what} at step 1, before any update: look at the data and the model; tokenmix doctor tests a layer"
            )
        return UserError(
            f"{what} at step {step} (learning rate {self.lr:.3g}); lower --lr, raise --warmup-steps or set --clip-grad"
        )

    def _columns(self) -> dict[str, Tensor]:
        return {name: torch.stack([value.float().cpu() for value in batches]) for name, batches in self.pending.items()}

    def _train_values(self) -> dict[str, float]:
        progress = self.progress
        means = {f"train_{name}": column.mean().item() for name, column in self._columns().items()}
        images, seconds = (now - then for now, then in zip((progress.images, progress.train_seconds), self.row_start))
        self.row_start = (progress.images, progress.train_seconds)
        self.pending.clear()
        return {f"{self.unit}_per_second": round(images / seconds, 2), "lr": self.lr, **means}

    def _write(self, values: dict[str, float]) -> None:
        progress = self.progress
        self.latest = {**self.latest, **values}
        if not self.first:
            return
        self._check_folder()
        place = {"step": progress.step, "epoch": progress.epoch + 1, self.unit: progress.images}
        row = {**place, "seconds": round(progress.train_seconds, 4), **values}
        text = io.StringIO()
        if not self.columns:
            # The first row is always a training row; the columns of evaluation follow.
            self.columns = list(dict.fromkeys([*row, *(f"val_{name}" for name in self.evaluated)]))
            csv.writer(text, lineterminator="\n").writerow(self.columns)
        csv.DictWriter(text, self.columns, lineterminator="\n").writerow(row)
        self.file.write(text.getvalue())
        self.file.flush()
        progress.csv_bytes = self.file.tell()
        if self.logger is not None:
            self.logger.log({name.replace("_", "/", 1): value for name, value in values.items()}, progress.step)


class ProgressBar:
    """A terminal line per epoch within the context `rich`: number, batches, and latest values of metrics.csv."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.rich = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[values]}"),
            console=Console(stderr=True),
            refresh_per_second=4,
            transient=True,
            disable=recorder.quiet or not sys.stderr.isatty(),
        )
        self.line = self.rich.add_task("", values="")

    def start_epoch(self) -> None:
        plan, progress = self.recorder.plan, self.recorder.progress
        self.rich.reset(
            self.line,
            description=f"epoch {progress.epoch + 1}/{plan.epochs}",
            total=plan.batches(progress.epoch),
            completed=progress.batch,
        )

    def advance(self) -> None:
        if not self.rich.disable:
            latest, monitor = self.recorder.latest, self.recorder.task.monitor
            shown = {"loss": latest.get("train_loss"), monitor: latest.get(f"val_{monitor}")}
            values = "  ".join(f"{name} {value:.4f}" for name, value in shown.items() if value is not None)
            self.rich.update(self.line, advance=1, values=values)


def _as_good(task: TaskModule, results: Values, best: Values) -> bool:
    """Ties go to the later epoch, since few validation samples often give ties; an epoch without a score never wins."""
    now, before = (math.nan if value is None else value for value in (results[task.monitor], best[task.monitor]))
    return math.isnan(before) or (now >= before if task.mode == "max" else now <= before)


def _cut(path: Path, size: int) -> list[str]:
    """Truncate metrics.csv to the checkpoint and return its columns; missing or damaged rows are reported."""
    held = read_bytes(path)[:size] if path.exists() else b""
    lines = held.split(b"\n")[:-1]
    columns = lines[0].split(b",") if lines else []
    whole = [line for line in lines if line.count(b",") == len(columns) - 1 and line.replace(b"\0", b"") == line]
    kept = b"".join(line + b"\n" for line in whole) if whole[:1] == lines[:1] else b""
    if len(kept) < size:
        log(f"{path} has lost rows from before the checkpoint; continuing without them")
    replace_file(path, kept)
    return [column.decode() for column in columns] if kept else []


PROJECT = "tokenmix"
REMEDIES = {
    "wandb": "log in by: wandb login, or set WANDB_MODE=offline",
    "mlflow": "set MLFLOW_TRACKING_URI to a server, such as http://127.0.0.1:5000 of: mlflow server",
}


def _open_tracker(config: TrainConfig, run: Path, step: int, *, quiet: bool) -> "_TensorBoard | _Wandb | _MLflow":
    """The run in the tracker of `config.loop.logger`, with its options; logger.json keeps its id for a resume."""
    kind, file = str(config.loop.logger), run / "logger.json"
    if kind == "tensorboard":
        return _TensorBoard(run, step)
    try:
        known = read_json(file)["id"] if file.exists() else None
    except (LookupError, TypeError, ValueError, RecursionError):
        raise UserError(f"{file} is damaged; remove it, then the tracker gets a new run") from None
    options = {name: str(value) for name, value in config.flat().items()}
    # Each tracker has its own types for a missing login and a missing network.
    with as_user_error(f"--logger {kind} cannot start (", f"); {REMEDIES[kind]}"):
        tracker = {"wandb": _Wandb, "mlflow": _MLflow}[kind](run, known, options, quiet)
        write_json(file, {"logger": kind, "id": tracker.id})
    return tracker


class _TensorBoard:
    def __init__(self, run: Path, step: int) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self.folder = run / "tensorboard"
        # purge_step hides points after the checkpoint, written before a kill.
        self.board = SummaryWriter(str(self.folder), purge_step=step + 1 if step else None)

    def log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self.board.add_scalar(name, value, step)

    def close(self, *, finished: bool) -> None:
        if self.folder.exists():  # Its thread cannot flush into a removed folder.
            self.board.close()


class _Wandb:
    def __init__(self, run: Path, known: str | None, options: dict[str, str], quiet: bool) -> None:
        import wandb

        # wandb's files contain links, and a run folder with links is not resumed.
        self.run = wandb.init(
            name=run.name,
            dir=os.environ.get("WANDB_DIR", run.parent),
            id=known or secrets.token_hex(4),
            resume="allow",
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            config=options if known is None else None,
            settings=wandb.Settings(silent=quiet),
        )
        self.run.define_metric("*", step_metric="step")
        self.id = self.run.id

    def log(self, values: dict[str, float], step: int) -> None:
        self.run.log({**values, "step": step})

    def close(self, *, finished: bool) -> None:
        self.run.finish(exit_code=0 if finished else 1)


class _MLflow:
    def __init__(self, run: Path, known: str | None, options: dict[str, str], quiet: bool) -> None:
        import mlflow

        # MLflow's own default depends on which parts of it are installed.
        where = os.environ.get("MLFLOW_TRACKING_URI") or mlflow.get_tracking_uri()
        self.client = mlflow.tracking.MlflowClient(where)
        if known is None:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
            experiment = self.client.get_experiment_by_name(name)
            where_to = self.client.create_experiment(name) if experiment is None else experiment.experiment_id
            known = self.client.create_run(where_to, run_name=run.name).info.run_id
            for option, value in options.items():
                self.client.log_param(known, option, value)
        self.id = known

    def log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self.client.log_metric(self.id, name, value, step=step)

    def close(self, *, finished: bool) -> None:
        self.client.set_terminated(self.id, "FINISHED" if finished else "FAILED")
