"""The training loop: which batch, step and epoch comes next. A run that continues in mid-epoch does so bit for bit."""

import copy
import itertools
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tokenmix.errors import UserError, one_line
from tokenmix.lab.data.loader import worker_errors
from tokenmix.lab.train.checkpoint import Checkpoint, read_weights, save_run
from tokenmix.lab.train.config import TrainConfig
from tokenmix.lab.train.distributed import (
    all_reduce_max,
    broadcast_buffers,
    data_parallel_rank,
    distributed_info,
    full_state_dict,
    load_full_state_dict,
    raise_on_all_ranks,
    sharded_state_dict,
)
from tokenmix.lab.train.engine import Engine
from tokenmix.lab.train.optimizer import WeightEMA, optimizers_and_schedules
from tokenmix.lab.train.plan import Progress, TrainingPlan, seed_everything
from tokenmix.lab.train.predictions import collected, save_predictions
from tokenmix.lab.train.record import ProgressBar, Recorder
from tokenmix.lab.train.task import TaskData, TaskModule


class Interrupted(Exception):
    """The run was asked to stop and has been saved."""


class StopRequest:
    """Whether Ctrl-C was pressed, or SIGTERM came."""

    def __init__(self) -> None:
        self.asked, self.owner = False, os.getpid()
        self.before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def ask(self) -> Callable[[], bool]:
        """Begin to ask all processes whether one of them has a request; what is returned waits for their answers.

        Between the two a step is computed, so that no process waits for this. Of a single process it is its request by
        then.
        """
        if not dist.is_initialized():
            return lambda: self.asked
        asked = torch.tensor(int(self.asked))
        work = dist.all_reduce(asked, dist.ReduceOp.MAX, async_op=True)

        def answer() -> bool:
            work.wait()
            return bool(asked)

        return answer

    def note(self, signum: int, frame: Any) -> None:
        """Request a stop once. A second Ctrl-C interrupts; SIGTERM often comes twice, to a process and to its group."""
        signal.signal(signal.SIGINT, self.before[signal.SIGINT])
        # Processes that load images inherit this handler, and get the same Ctrl-C.
        here = distributed_info()
        if not self.asked and here.first and os.getpid() == self.owner:
            step = "this step" if here.world_size == 1 else "this step or the next"
            print(f"\nstopping after {step}; Ctrl-C now stops without saving", file=sys.stderr, flush=True)
        self.asked = True


@contextmanager
def listen() -> Iterator[StopRequest]:
    """Turn the first Ctrl-C, and SIGTERM, into a request to stop after the current step."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    for number in request.before:
        signal.signal(number, request.note)
    try:
        yield request
    finally:
        for number, handler in request.before.items():
            signal.signal(number, handler)


@dataclass(frozen=True)
class Session:
    """What a run works with.

    Attributes:
        task: what is learned, with the run's config; its `configure_optimizers` is called once it is on its device.
        data: this process's part of the data.
        plan: how many batches make a step and an epoch.
        counts: parameters, multiply-adds and sizes, as in the run's result.
        notes: lines to print before the first step.
    """

    task: TaskModule
    data: TaskData
    plan: TrainingPlan
    counts: dict[str, Any]
    notes: list[str]


def fit(
    session: Session,
    run: Path,
    progress: Progress,
    state: dict[str, Any] | None,
    identity: dict[str, str],
    *,
    quiet: bool,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train from the position `progress` to the end of the plan, leaving checkpoints and logs in the run folder.

    Returns the metrics on the test samples, which are read here for the first time: of the best epoch's weights, and of
    the last one's. What the best ones said of each sample is left in the run folder.
    """
    with raise_on_all_ranks():
        recorder = Recorder(run, session.plan, progress, session.task, session.data, quiet=quiet)
    with closing(recorder), _expected_warnings_ignored(), listen() as request:
        loop = TrainingLoop(session, run, progress, recorder, request, identity)
        if state is not None:
            loop.load_state_dict(state)
        with ProgressBar(recorder, shown=not quiet and sys.stderr.isatty()) as bar:
            loop.run(bar)
        return loop.test()


def validate(task: TaskModule, data: TaskData, config: TrainConfig, batch_size: int) -> dict[str, Any]:
    """Metrics of the task's model on the test samples; the task is on the CPU afterwards."""
    with _expected_warnings_ignored():
        engine = Engine(config, task, alone=True)
        with finite_outputs(task), worker_errors():
            _evaluate(engine, task, ((batch, True) for batch in data.test_batches(batch_size=batch_size)))
        task.cpu()
    return task.results


class TrainingLoop:
    """One process's part of a run: epochs of batches, each followed by a validation and a checkpoint; then the test.

    Args:
        session: task, data and plan.
        run: its folder, for checkpoints.
        progress: position of the run, which is updated.
        recorder: writes metrics.csv.
        request: whether the run was asked to stop.
        identity: of the run folder, for what is written there.
    """

    def __init__(
        self,
        session: Session,
        run: Path,
        progress: Progress,
        recorder: Recorder,
        request: StopRequest,
        identity: dict[str, str],
    ) -> None:
        task, config = session.task, session.task.config
        self.task, self.data, self.plan, self.config = task, session.data, session.plan, config
        self.folder, self.progress, self.recorder, self.request = run, progress, recorder, request
        task.total_steps = self.plan.total_steps
        self.engine = Engine(config, task)
        self.optimizers, self.schedules = optimizers_and_schedules(task.configure_optimizers())
        self.engine.use(self.optimizers)
        self.ema = None if config.optim.ema is None else WeightEMA(task.model, config.optim.ema)
        self.identity = identity

    def run(self, bar: ProgressBar) -> None:
        """Train to the end of the plan."""
        while self.progress.epoch < self.plan.epochs:
            bar.start_epoch()
            self.recorder.start_clock()
            for batch in self._batches():
                self.start_batch()
                stopping = self.request.ask()
                rate = self.optimizers[0].param_groups[0]["lr"]
                logs = self._train(batch)
                self.advance()
                self._finish_batch(logs, rate, stopping)
                bar.advance()
            self.evaluate()
            self.end_epoch()
            self.save_epoch()

    def _batches(self) -> Iterator[Any]:
        """The rest of the current epoch, on the device, each with its `part_weight`."""
        progress, plan = self.progress, self.plan
        batches = self.data.train_batches(batch_size=plan.batch_size, epoch=progress.epoch, start=progress.batch)
        rest = itertools.islice(batches, plan.batches(progress.epoch) - progress.batch)
        # Of the parts of a step each weighs as much as it counts, so all are read before the first is learned.
        together = 1 if type(self.task).count is TaskModule.count else plan.accumulate
        while parts := list(itertools.islice(rest, together)):
            for batch, weight in zip(parts, self.task.part_weights(parts)):
                self.task.part_weight = weight
                yield self.engine.move(batch)

    def start_batch(self) -> None:
        """Seed: dropout, mixup and the like of this batch depend on (seed, epoch, batch, part of the data) alone."""
        rank, _ = data_parallel_rank(self.config)
        seed_everything(self.config.loop.seed, self.progress.epoch + 1, self.progress.batch, rank)

    def _train(self, batch: Any) -> dict[str, Tensor]:
        """Forward and backward pass, and a step of the optimisers where one is due; what there is to log."""
        number, parts = self.progress.batch, self.plan.accumulate
        due = (number + 1) % parts == 0
        logs = self.engine.train(batch, number, share=1 / parts, last=due)
        if due and self.task.automatic_optimization:
            for optimizer in self.optimizers:
                self.engine.step(optimizer, self.config.optim.clip_grad)
            self._move_schedules("step")
        return logs

    def _move_schedules(self, interval: str) -> None:
        for schedule in self.schedules:
            # A task that steps its optimisers itself moves its schedules on itself.
            if schedule["interval"] == interval and self.task.automatic_optimization:
                schedule["scheduler"].step()

    def advance(self) -> None:
        """Advance by one batch."""
        progress = self.progress
        progress.batch += 1
        progress.images += self.plan.batch_size * self.plan.processes
        progress.step += progress.batch % self.plan.accumulate == 0

    def _finish_batch(self, logs: dict[str, Tensor], rate: float, stopping: Callable[[], bool]) -> None:
        """Average, record and save where a step ends; the end of an epoch is saved after its evaluation."""
        progress = self.progress
        step_ends = progress.batch % self.plan.accumulate == 0
        if self.ema is not None and step_ends:
            self.ema.update(progress.step)
        self.recorder.record_batch(logs, rate)
        if not step_ends or progress.batch == self.plan.batches(progress.epoch):
            return
        asked = stopping()
        if asked or progress.step % self.config.loop.checkpoint_every == 0:
            save_run(self.folder, self.checkpoint())
        if asked:
            raise Interrupted

    def evaluate(self) -> None:
        """Evaluate the weights, or their average if there is one, on the validation samples; write the epoch's row."""
        self.recorder.start_clock()
        if self.data.num_validation:
            with nullcontext() if self.ema is None else self.ema.swapped_in():
                self._evaluate(self.data.validation_batches(batch_size=self.plan.batch_size))
        self.recorder.record_evaluation()

    def test(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Metrics on the test samples, of the best epoch's weights and of the last one's; the model keeps the best."""
        self.recorder.start_clock()
        with nullcontext() if self.ema is None else self.ema.swapped_in():
            self._test(keep=self.progress.best_epoch == self.progress.epoch)
        best = final = self.task.results
        if self.progress.best_epoch != self.progress.epoch:
            with raise_on_all_ranks():
                weights = read_weights(self.folder)
            load_full_state_dict(self.task.model, weights)
            self._test(keep=True)
            best = self.task.results
        self.recorder.record_test()
        return best, final

    def _test(self, *, keep: bool) -> None:
        """Evaluate the test samples; with `keep` the run folder gets what was said of each."""
        self.task.kept = [] if keep else None
        self._evaluate(self.data.test_batches(batch_size=self.plan.batch_size))
        if self.task.kept is not None:
            columns, self.task.kept = collected(self.task.kept), None
            with raise_on_all_ranks():
                if self.recorder.first:
                    save_predictions(self.folder, columns, self.identity)

    def _evaluate(self, batches: Any) -> None:
        broadcast_buffers(self.task.model)
        _evaluate(self.engine, self.task, _evenly_padded(batches))

    def end_epoch(self) -> None:
        """Advance to the next epoch."""
        self.progress.epoch, self.progress.batch = self.progress.epoch + 1, 0
        self._move_schedules("epoch")

    def save_epoch(self) -> None:
        """Save `last`, and `best` if this epoch is the best so far."""
        checkpoint, progress = self.checkpoint(), self.progress
        evaluated = checkpoint.weights if self.ema is None else self.ema.weights()
        save_run(self.folder, checkpoint, evaluated if progress.best_epoch == progress.epoch else None)
        if self.request.ask()() and progress.step < self.plan.total_steps:
            raise Interrupted

    def checkpoint(self) -> Checkpoint:
        """The run at this position; `UserError` if its losses or weights are not finite. All processes must call it."""
        self.recorder.settle()
        self.recorder.sync()
        weights = full_state_dict(self.task.model.state_dict())
        broken = next((k for k, v in weights.items() if not v.isfinite().all()), None)
        if broken is not None:
            raise self.recorder.diverged(f"the weights {broken} are not finite", self.progress.step)
        state = {
            "optimizers": [full_state_dict(optimizer.state_dict()) for optimizer in self.optimizers],
            "schedules": [schedule["scheduler"].state_dict() for schedule in self.schedules],
            "precision": self.engine.state_dict(),
            "recorder": self.recorder.state_dict(),
            "average": self.ema.state_dict() if self.ema else None,
        }
        return Checkpoint(weights, state, {"format": 1, "progress": asdict(self.progress)}, self.identity)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the `state` of a checkpoint; the model has its weights already.

        Raises:
            UserError: the state is of a run with other options.
        """
        try:
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                # PyTorch would take the settings of any other optimiser as well.
                if any(a.keys() != b.keys() for a, b in zip(optimizer.param_groups, saved["param_groups"])):
                    raise ValueError("another optimiser")
                optimizer.load_state_dict(sharded_state_dict(saved, optimizer))
            for schedule, saved in zip(self.schedules, state["schedules"], strict=True):
                schedule["scheduler"].load_state_dict(saved)
            self.engine.load_state_dict(state["precision"])
            self.recorder.load_state_dict(state["recorder"])
            if (self.ema is None) != (state["average"] is None):
                raise ValueError("an average on one side only")
            if self.ema is not None:
                self.ema.load_state_dict(state["average"])
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise UserError(
                f"the checkpoint in {self.folder} is of a run with other options than config.json has "
                f"({one_line(error)}); restore config.json from a copy, or start a new run with --init-from"
            ) from None


@contextmanager
def finite_outputs(task: TaskModule) -> Iterator[None]:
    """Raise `UserError` if the task's model gives an output that is NaN or infinite within the block."""

    def check(module: nn.Module, inputs: Any, outputs: Any) -> None:
        if not all(value.isfinite().all() for value in _floats(outputs)):
            raise UserError(
                f"{task.config.model.model} gives outputs that are NaN or infinite: its weights, or mean and std in "
                "data.json, are too large or too small; restore the run folder from a copy"
            )

    handle = task.model.register_forward_hook(check)
    try:
        yield
    finally:
        handle.remove()


def _floats(outputs: Any) -> Iterator[Tensor]:
    """The floating-point tensors in what a model returns."""
    if isinstance(outputs, Tensor):
        if outputs.is_floating_point():
            yield outputs
    elif isinstance(outputs, Mapping):
        yield from _floats(list(outputs.values()))
    elif isinstance(outputs, list | tuple):
        for output in outputs:
            yield from _floats(output)


def _evaluate(engine: Engine, task: TaskModule, batches: Iterable[tuple[Any, bool]]) -> None:
    """Set the task's results from test batches; of those that come with False nothing is counted."""
    training = [module for module in task.modules() if module.training]
    task.eval()
    # Inference mode would not let processes put the parts of a block together.
    with torch.no_grad() if dist.is_initialized() else torch.inference_mode():
        task.on_validation_epoch_start()
        for number, (batch, counted) in enumerate(batches):
            batch = engine.move(batch)
            metrics, kept = task.metrics, task.kept
            if not counted:
                task.metrics, task.kept = copy.deepcopy(metrics), None
            with engine.computing():
                task.validation_step(batch, number)
            task.metrics, task.kept = metrics, kept
        task.on_validation_epoch_end()
    for module in training:
        module.training = True


def _evenly_padded(batches: Any) -> Iterator[tuple[Any, bool]]:
    """This process's test batches, and its last one, uncounted, as often as another process has more of them.

    Collective operations, such as gathering the shards of a block, must be called equally often.
    """
    missing = all_reduce_max(len(batches)) - len(batches)
    batch = None
    for batch in batches:
        yield batch, True
    for _ in range(missing):
        yield batch, False


@contextmanager
def _expected_warnings_ignored() -> Iterator[None]:
    """Suppress a remark of FSDP on views that nothing writes into."""
    with warnings.catch_warnings():
        # Scores that a block passes on are views, and nothing is written into them.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
        yield
