"""The training loop: order of batches, steps and epochs. A run that continues in mid-epoch is bit-identical."""

import itertools
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from tokenmix.environment import keep_freed_memory
from tokenmix.errors import UserError, as_user_error
from tokenmix.files import Values
from tokenmix.lab.data.fetch import log
from tokenmix.lab.train.checkpoint import Checkpoint, read_weights, save_run
from tokenmix.lab.train.config import TrainConfig
from tokenmix.lab.train.distributed import (
    all_gather,
    broadcast_buffers,
    distributed_info,
    full_state_dict,
    load_full_state_dict,
    map_tensors,
    raise_on_all_ranks,
    sharded_state_dict,
)
from tokenmix.lab.train.folder import RunFolder
from tokenmix.lab.train.metrics import INDEX, save_predictions
from tokenmix.lab.train.plan import (
    Progress,
    TrainingPlan,
    WeightEMA,
    device_type,
    optimizers_and_schedules,
    seed_everything,
)
from tokenmix.lab.train.programs import Batch
from tokenmix.lab.train.record import ProgressBar, Recorder
from tokenmix.lab.train.task import TaskData, TaskModule
from tokenmix.swap.probe import evaluating

T = TypeVar("T")
MIXED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


class _TrainingStep(nn.Module):
    """A task whose forward pass is its training step, for DistributedDataParallel."""

    def __init__(self, task: TaskModule) -> None:
        super().__init__()
        self.task = task

    def forward(self, batch: Batch, number: int) -> Values:
        return self.task.training_step(batch, number)


class Engine:
    """A task on its device and in its precision."""

    def __init__(self, config: TrainConfig, task: TaskModule) -> None:
        self.task, self.precision, self.kind = task, config.loop.precision, device_type(config)
        if self.kind == "cpu":
            keep_freed_memory()
        self.device = torch.device(self.kind)
        if self.kind == "cuda":  # `process_group` has set the device of this rank.
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.scaler = torch.amp.GradScaler(self.kind, enabled=self.precision == "16-mixed")
        self.average = self.sharded = False
        self.module: nn.Module = _TrainingStep(task)
        task.to(self.device, torch.bfloat16 if self.precision == "bf16" else None)

    def distribute(self, config: TrainConfig) -> None:
        """Distribute training over the ranks: copies (ddp), shards (fsdp), or copies that split the tokens of an image.

        A task that steps its optimisers itself has several backward passes per step, so gradients are averaged before
        each optimiser step.
        """
        world_size, shared = dist.get_world_size(), config.loop.token_parallel
        self.average = not self.task.automatic_optimization
        self.sharded = config.loop.strategy == "fsdp"
        if shared > 1 and (self.sharded or not self.average):
            shape = (world_size // shared, shared)
            self.task.split_tokens(init_device_mesh(self.kind, shape, mesh_dim_names=("data", "tokens"))["tokens"])
        if self.sharded:
            # Over all ranks: gradients are also averaged over ranks that share an image.
            self.task.shard(init_device_mesh(self.kind, (world_size,)))
        elif not self.average:
            self.module = DistributedDataParallel(self.module, [self.device] if self.kind == "cuda" else None)

    def move(self, given: T) -> T:
        """Tensors on the device, in precision bf16 as bf16. Mixed precision keeps float32: points need all bits."""
        dtype = torch.bfloat16 if self.precision == "bf16" else None
        return map_tensors(
            given, lambda x: x.to(self.device, dtype if x.is_floating_point() else None, non_blocking=True)
        )

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Autocast in mixed precision; in bf16, new tensors are bf16."""
        before = torch.get_default_dtype()
        try:
            if self.precision == "bf16":
                torch.set_default_dtype(torch.bfloat16)
            mixed = MIXED.get(self.precision)
            with nullcontext() if mixed is None else torch.autocast(self.kind, mixed):
                yield
        finally:
            torch.set_default_dtype(before)

    def train(self, batch: Batch, number: int, *, share: float = 1.0, last: bool = True) -> dict[str, Tensor]:
        """Training step and backward pass of `share` of its loss; ranks exchange gradients after the `last` batch.

        Returns the values for the log.
        """
        with nullcontext() if last or not isinstance(self.module, DistributedDataParallel) else self.module.no_sync():
            if self.sharded:
                self.task.model.set_requires_gradient_sync(last)  # type: ignore[operator]
            with self.computing():
                outputs = self.module(batch, number)
            if self.task.automatic_optimization:
                self.scaler.scale(outputs["loss"].float() * share).backward()
        return map_tensors(outputs["logs"], lambda x: x.float() if x.is_floating_point() else x)

    def step(self, optimizer: Optimizer, clip_grad: float | None) -> None:
        """Clip the gradients, step, and clear them."""
        self.scaler.unscale_(optimizer)
        if clip_grad is not None:
            # Weights that are not finite are reported at the checkpoint.
            nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], clip_grad)
        self.scaler.step(optimizer)
        self.scaler.update()
        optimizer.zero_grad()

    def evaluate(self, batches: Iterable[Batch]) -> None:
        """Set the task's results from test batches.

        Ranks must call collective operations, such as gathering shards, equally often. A rank with fewer batches
        repeats its last batch, which is not counted.
        """
        task, batch, missing = self.task, None, 0
        if dist.is_initialized():
            assert isinstance(batches, Sized), "processes must know how many batches the others have"
            missing = max(all_gather(len(batches))) - len(batches)
        # Inference mode would keep ranks from gathering the shards of a block.
        with evaluating(task), torch.no_grad() if dist.is_initialized() else torch.inference_mode():
            task.on_validation_epoch_start()
            for number, batch in enumerate(batches):
                with self.computing():
                    task.validation_step(self.move(batch), number)
            rows = list(task.rows)
            for _ in range(missing):
                with self.computing():
                    task.validation_step(self.move(batch), 0)
            task.rows = rows
            task.on_validation_epoch_end()


class StopRequest:
    """Whether Ctrl-C or SIGTERM came within the block: the first requests a stop after the current step."""

    def __init__(self) -> None:
        self.asked, self.owner = False, os.getpid()
        main = threading.current_thread() is threading.main_thread()
        heard = (signal.SIGINT, signal.SIGTERM) if main else ()
        self.before = {number: signal.getsignal(number) for number in heard}

    def __enter__(self) -> "StopRequest":
        for number in self.before:
            signal.signal(number, self.note)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def ask(self) -> Callable[[], bool]:
        """Ask all ranks asynchronously whether one has a request; the returned function waits for the answers.

        A step is computed in between, so no rank waits. A single process answers with its request after that step.
        """
        if not dist.is_initialized():
            return lambda: self.asked
        asked = torch.tensor(int(self.asked))
        work = dist.all_reduce(asked, dist.ReduceOp.MAX, async_op=True)

        def answer() -> bool:
            work.wait()
            return bool(asked)

        return answer

    def note(self, signum: int, frame: object) -> None:
        """Request a stop once. A second Ctrl-C interrupts; SIGTERM often comes twice, to a process and to its group."""
        signal.signal(signal.SIGINT, self.before[signal.SIGINT])
        # Processes that load images inherit this handler, and receive the same Ctrl-C.
        here = distributed_info()
        if not self.asked and here.first and os.getpid() == self.owner:
            step = "this step" if here.world_size == 1 else "this step or the next"
            print(f"\nstopping after {step}; Ctrl-C now stops without saving", file=sys.stderr, flush=True)
        self.asked = True


@dataclass
class Session:
    """Inputs of a run: a task with its config, this rank's data, and the plan.

    `progress` and `state` are the start of the run or a checkpoint. `counts` are parameters, multiply-adds and sizes
    for the run's result. `notes` are printed before the first step.
    """

    task: TaskModule
    data: TaskData
    plan: TrainingPlan
    progress: Progress = field(default_factory=Progress)
    state: Values | None = None
    counts: Values = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@contextmanager
def training(session: Session, run: RunFolder, *, quiet: bool) -> Iterator["TrainingLoop"]:
    """The loop of a run, with checkpoints and logs in the run folder; within the block Ctrl-C requests a stop."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with raise_on_all_ranks():
        recorder = Recorder(run.path, session.plan, session.progress, session.task, session.data, quiet=quiet)
    with closing(recorder), warnings.catch_warnings(), StopRequest() as request:
        # Blocks pass on scores as views, and nothing writes into them.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
        yield TrainingLoop(session, run, recorder, request)


class TrainingLoop:
    """One rank's part of a run: epochs, each with a validation and a checkpoint; then the test."""

    def __init__(self, session: Session, run: RunFolder, recorder: Recorder, request: StopRequest) -> None:
        task, config = session.task, session.task.config
        self.task, self.data, self.plan, self.config = task, session.data, session.plan, config
        self.folder, self.progress, self.recorder, self.request = run, session.progress, recorder, request
        task.total_steps, task.total_epochs = self.plan.total_steps, self.plan.total_steps / self.plan.steps_per_epoch
        self.engine = Engine(config, task)
        if dist.is_initialized():
            self.engine.distribute(config)
        self.optimizers, self.schedules = optimizers_and_schedules(task.configure_optimizers())
        task.optimizers = self.optimizers

        def average_gradients(optimizer: Optimizer, *_: object) -> None:
            for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= dist.get_world_size()

        for optimizer in self.optimizers if self.engine.average else ():
            optimizer.register_step_pre_hook(average_gradients)
        self.ema = None if config.optim.ema is None else WeightEMA(task.model, config.optim.ema)
        if session.state is not None:
            self.load_state_dict(session.state)

    def fit(self) -> None:
        progress, plan = self.progress, self.plan
        with (bar := ProgressBar(self.recorder)).rich:
            while progress.epoch < plan.epochs:
                bar.start_epoch()
                self.recorder.start_clock()
                for batch in self._batches():
                    self.start_batch()
                    stopping = self.request.ask()
                    rate = self.optimizers[0].param_groups[0]["lr"]
                    step_ends = (progress.batch + 1) % plan.accumulate == 0
                    logs = self.engine.train(batch, progress.batch, share=1 / plan.accumulate, last=step_ends)
                    if step_ends and self.task.automatic_optimization:
                        for optimizer in self.optimizers:
                            self.engine.step(optimizer, self.config.optim.clip_grad)
                        self._move_schedules("step")
                    self.advance()
                    if step_ends and self.ema is not None:
                        self.ema.update(progress.step)
                    self.recorder.record_batch(logs, rate)
                    # The end of an epoch is saved after its evaluation.
                    if step_ends and progress.batch < plan.batches(progress.epoch):
                        asked = stopping()
                        if asked or progress.step % self.config.loop.checkpoint_every == 0:
                            save_run(self.folder.path, self.checkpoint())
                        if asked:
                            raise KeyboardInterrupt
                    bar.advance()
                self.evaluate()
                self.end_epoch()
                self.save_epoch()

    def _batches(self) -> Iterator[Batch]:
        """Remaining batches of the epoch, on the device, each with its `part_weight`."""
        progress, plan = self.progress, self.plan
        batches = self.data.train_batches(batch_size=plan.batch_size, epoch=progress.epoch, start=progress.batch)
        rest = itertools.islice(batches, plan.batches(progress.epoch) - progress.batch)
        # A part of a step is weighted by its count, so all parts are read before the first backward pass.
        together = 1 if type(self.task).count is TaskModule.count else plan.accumulate
        while parts := list(itertools.islice(rest, together)):
            for batch, weight in zip(parts, self.task.part_weights(parts)):
                self.task.part_weight = weight
                yield self.engine.move(batch)

    def start_batch(self) -> None:
        """Seed the batch: dropout and mixup depend only on (seed, epoch, batch, data-parallel rank)."""
        rank, _ = distributed_info().data_parallel(self.config.loop.token_parallel)
        seed_everything(self.config.loop.seed, self.progress.epoch + 1, self.progress.batch, rank)

    def advance(self) -> None:
        progress = self.progress
        progress.batch += 1
        progress.images += self.plan.batch_size * self.plan.processes
        progress.step += progress.batch % self.plan.accumulate == 0

    def end_epoch(self) -> None:
        self.progress.epoch, self.progress.batch = self.progress.epoch + 1, 0
        self._move_schedules("epoch")

    def _move_schedules(self, interval: str) -> None:
        for schedule in self.schedules:
            # A task that steps its optimisers itself also steps its schedules.
            if schedule["interval"] == interval and self.task.automatic_optimization:
                schedule["scheduler"].step()

    def evaluate(self) -> None:
        """Evaluate the weights, or their average, on the validation samples; write the epoch's row."""
        self.recorder.start_clock()
        if self.data.num_validation:
            with self._averaged():
                self._evaluate(self.data.validation_batches(batch_size=self.plan.batch_size))
        self.recorder.record_evaluation()

    def test(self) -> tuple[Values, Values]:
        """Metrics on the test samples, for the weights of the best and of the last epoch; the model keeps the best."""
        self.recorder.start_clock()
        with self._averaged():
            self._evaluate(self.data.test_batches(batch_size=self.plan.batch_size))
        final = self.task.results
        if self.progress.best_epoch != self.progress.epoch:
            with raise_on_all_ranks():
                weights = read_weights(self.folder)
            load_full_state_dict(self.task.model, weights)
            self._evaluate(self.data.test_batches(batch_size=self.plan.batch_size))
        lost = self.data.num_test - len(self.task.samples[INDEX]) if INDEX in self.task.samples else 0
        if lost > 0 and self.recorder.first:
            log(f"{lost} of {self.data.num_test} test {self.data.unit} cannot be read; the metrics are of the others")
        # Tasks without a comparison need no file; a GAN's rows may fill gigabytes.
        if not self.task.no_comparison:
            with raise_on_all_ranks():
                if self.recorder.first:
                    save_predictions(self.folder.path, self.task.samples, self.folder.identity)
        self.recorder.record_test()
        return self.task.results, final

    def _averaged(self) -> AbstractContextManager[None]:
        return nullcontext() if self.ema is None else self.ema.swapped_in()

    def _evaluate(self, batches: Iterable[Batch]) -> None:
        broadcast_buffers(self.task.model)
        self.engine.evaluate(batches)

    def save_epoch(self) -> None:
        """Save `last`, and `best` if this epoch is the best so far."""
        checkpoint, progress = self.checkpoint(), self.progress
        evaluated = checkpoint.weights if self.ema is None else self.ema.weights()
        save_run(self.folder.path, checkpoint, evaluated if progress.best_epoch == progress.epoch else None)
        if self.request.ask()() and progress.step < self.plan.total_steps:
            raise KeyboardInterrupt

    def checkpoint(self) -> Checkpoint:
        """Checkpoint at this position; `UserError` if losses or weights are not finite. All ranks must call this."""
        self.recorder.settle()
        self.recorder.sync()
        weights = full_state_dict(self.task.model.state_dict())
        broken = next((k for k, v in weights.items() if not v.isfinite().all()), None)
        if broken is not None:
            raise self.recorder.diverged(f"the weights {broken} are not finite", self.progress.step)
        state = {
            "optimizers": [full_state_dict(optimizer.state_dict()) for optimizer in self.optimizers],
            "schedules": [schedule["scheduler"].state_dict() for schedule in self.schedules],
            "precision": self.engine.scaler.state_dict(),
            "recorder": self.recorder.state_dict(),
            "average": self.ema.state_dict() if self.ema else None,
        }
        return Checkpoint(weights, state, self.progress, self.folder.identity)

    def load_state_dict(self, state: Values) -> None:
        """Continue from the `state` of a checkpoint, whose weights the model has; `UserError` for other options."""
        other = f"the checkpoint in {self.folder.path} is of a run with other options than config.json has ("
        remedy = "); restore config.json from a copy, or start a new run with --init-from"
        with as_user_error(other, remedy, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                # PyTorch would also accept the settings of another optimiser. LAMB adds a step in its first one.
                if any((a.keys() ^ b.keys()) - {"step"} for a, b in zip(optimizer.param_groups, saved["param_groups"])):
                    raise ValueError("another optimiser")
                optimizer.load_state_dict(sharded_state_dict(saved, optimizer))
            for schedule, saved in zip(self.schedules, state["schedules"], strict=True):
                schedule["scheduler"].load_state_dict(saved)
            if self.engine.scaler.is_enabled() != bool(state["precision"]):
                raise ValueError("another precision")
            self.engine.scaler.load_state_dict(state["precision"])
            self.recorder.load_state_dict(state["recorder"])
            if (self.ema is None) != (state["average"] is None):
                raise ValueError("an average on one side only")
            if self.ema is not None:
                self.ema.load_state_dict(state["average"])


@contextmanager
def finite_outputs(model: nn.Module) -> Iterator[None]:
    """Raise `UserError` if the model gives a NaN or infinite output within the block."""

    def check(value: Tensor) -> None:
        if value.is_floating_point() and not value.isfinite().all():
            raise UserError(
                f"{type(model).__name__} gives outputs that are NaN or infinite: its weights, or mean and std in "
                "data.json, are too large or too small; restore the run folder from a copy"
            )

    def check_all(module: nn.Module, inputs: object, outputs: object) -> None:
        map_tensors(outputs, check)

    with model.register_forward_hook(check_all):
        yield
