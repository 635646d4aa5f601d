"""What happens around the steps: where the run stands, averaged weights, checkpoints, Ctrl-C and SIGTERM."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import torch
from timm.utils.model_ema import ModelEmaV3
from torch import Tensor, nn

from tokenmix.errors import UserError
from tokenmix.train.checkpoint import Checkpoint, copy_checkpoint, save_checkpoint, save_weights
from tokenmix.train.parts import divided, whole
from tokenmix.train.plan import Plan, Progress, seed_everything
from tokenmix.train.ranks import any_of, ranks, together
from tokenmix.train.record import Recorder
from tokenmix.train.task import TaskModule

__all__ = ["Average", "Checkpoints", "Interrupted", "Position", "StopRequest", "listen"]


class Interrupted(Exception):
    """The run was told to stop and has been saved. Lightning would turn a KeyboardInterrupt into exit code 1."""


class StopRequest:
    """Whether Ctrl-C was pressed, or SIGTERM came."""

    def __init__(self) -> None:
        self.asked, self.owner = False, os.getpid()
        self.before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(self, signum: int, frame: Any) -> None:
        """Ask once. A second Ctrl-C works as ever; SIGTERM often comes twice, to a process and to its group."""
        signal.signal(signal.SIGINT, self.before[signal.SIGINT])
        # Processes that load images inherit this handler, and get the same Ctrl-C.
        if not self.asked and ranks().first and os.getpid() == self.owner:
            print("\nstopping after this step; Ctrl-C now stops without saving", file=sys.stderr, flush=True)
        self.asked = True

    def take_sigterm(self) -> None:
        """Handle SIGTERM here, not in Lightning, whose handler stops without saving and waits for other processes."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self.note)


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


class Position(L.Callback):
    """Counts batches, steps and epochs, and seeds each batch from its place in the run."""

    def __init__(self, plan: Plan, progress: Progress, seed: int) -> None:
        self.plan, self.progress, self.seed, self.rank = plan, progress, seed, ranks().rank

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Dropout, mixup and the like of this batch depend on (seed, epoch, batch) alone."""
        seed_everything(self.seed, self.progress.epoch + 1, self.progress.batch, self.rank)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Move on by one batch."""
        progress = self.progress
        progress.batch += 1
        progress.images += self.plan.batch_size * self.plan.processes
        progress.step += progress.batch % self.plan.accumulate == 0

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Move on to the next epoch."""
        self.progress.epoch, self.progress.batch = self.progress.epoch + 1, 0


class Average(L.Callback):
    """Exponential moving average of the weights: it is what is evaluated, and what a run folder's weights are."""

    def __init__(self, model: nn.Module, decay: float, plan: Plan, progress: Progress) -> None:
        places = [tensor.data_ptr() for tensor in model.state_dict().values() if tensor.numel()]
        if len(set(places)) < len(places):
            raise UserError(
                "ema would average twice what this model has in two places, such as embeddings that are its head's "
                "as well; leave --ema out"
            )
        self.model, self.decay, self.plan, self.progress = model, decay, plan, progress
        self.average: ModelEmaV3 | None = None
        self.loaded: dict[str, Tensor] | None = None

    def weights(self) -> dict[str, Tensor]:
        """The averaged weights."""
        assert self.average is not None
        return self.average.module.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """The averaged weights, for the checkpoint."""
        return {k: v.detach().cpu().clone() for k, v in self.weights().items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the average of a checkpoint until the model is on its device."""
        self.loaded = state_dict

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Copy the model, which is on its device by now."""
        # With warm-up the first averages are short: else a run of a few hundred steps would keep its first weights.
        self.average = ModelEmaV3(self.model, decay=self.decay, use_warmup=True)
        self.average.requires_grad_(False)
        if self.loaded is not None:
            self.average.module.load_state_dict(self.loaded)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Take the weights of this step into the average."""
        if self.progress.batch % self.plan.accumulate == 0:
            assert self.average is not None
            self.average.update(self.model, step=self.progress.step)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Evaluate the average."""
        self._swap()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Go on training the weights themselves."""
        self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for own, averaged in zip(self.model.state_dict().values(), self.weights().values()):
            kept = own.clone()
            own.copy_(averaged)
            averaged.copy_(kept)


class Checkpoints(L.Callback):
    """Writes `last` every `every` steps and after each epoch, `best` when the headline metric is the best so far.

    All processes take part, since each may hold a part of the weights, and the first one writes.
    """

    def __init__(
        self,
        run: Path,
        plan: Plan,
        progress: Progress,
        recorder: Recorder,
        average: Average | None,
        request: StopRequest,
        *,
        every: int,
        state: dict[str, Any] | None,
    ) -> None:
        self.run, self.plan, self.progress, self.recorder = run, plan, progress, recorder
        self.average, self.request, self.every, self.state = average, request, every, state
        self.last, self.best = run / "checkpoints" / "last", run / "checkpoints" / "best"

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Give optimisers, schedules and loss scale the state of the checkpoint that is resumed."""
        # Lightning has set its handlers by now.
        self.request.take_sigterm()
        if self.state is None:
            return
        for optimizer, kept in zip(trainer.optimizers, self.state["optimizers"], strict=True):
            optimizer.load_state_dict(divided(kept, optimizer))
        for config, kept in zip(trainer.lr_scheduler_configs, self.state["schedules"], strict=True):
            config.scheduler.load_state_dict(kept)
        trainer.precision_plugin.load_state_dict(self.state["precision"])

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save where a step ends; the end of an epoch is saved after its evaluation."""
        progress = self.progress
        if progress.batch % self.plan.accumulate or progress.batch == self.plan.batches(progress.epoch):
            return
        asked = any_of(self.request.asked)
        if asked or progress.step % self.every == 0:
            checkpoint = self._collect(trainer, pl_module)
            with together():
                if ranks().first:
                    save_checkpoint(self.last, checkpoint)
        if asked:
            raise Interrupted

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save `last`; if this epoch is the best, before that the run's own weights and `best`.

        `last` comes at the end: a kill before it repeats the epoch and writes the others once more.
        """
        checkpoint = self._collect(trainer, pl_module)
        with together():
            if ranks().first:
                self._save_epoch(checkpoint)
        if any_of(self.request.asked) and self.progress.step < self.plan.total_steps:
            raise Interrupted

    def _save_epoch(self, checkpoint: Checkpoint) -> None:
        if self.progress.best_epoch == self.progress.epoch:
            save_weights(self.run / "model.safetensors", self.average.weights() if self.average else checkpoint.weights)
            save_checkpoint(self.best, checkpoint)
            copy_checkpoint(self.best, self.last)
        else:
            save_checkpoint(self.last, checkpoint)

    def _collect(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Checkpoint:
        assert isinstance(pl_module, TaskModule)
        self.recorder.settle()
        weights = whole(pl_module.model.state_dict())
        broken = next((k for k, v in weights.items() if not v.isfinite().all()), None)
        if broken is not None:
            raise self.recorder.diverged(f"the weights {broken} are not finite", self.progress.step)
        state = {
            "optimizers": [whole(optimizer.state_dict()) for optimizer in trainer.optimizers],
            "schedules": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
            "precision": trainer.precision_plugin.state_dict(),
            "recorder": self.recorder.state_dict(),
            "average": self.average.state_dict() if self.average else None,
        }
        return Checkpoint(weights, state, {"format": 1, "progress": self.progress.as_dict()})
