"""Lightning's Trainer, set up for one run.

Where a run continues is not restored through Lightning's own loop state: resuming it in mid-epoch depends on the order
in which its private counters are advanced around each hook, which differs between its versions. Here an epoch that
continues is to Lightning an epoch whose loader begins at the next batch and is that much shorter. The loader is asked
for anew each epoch, so every length is right, also that of a last epoch which --max-steps cuts short.
"""

import itertools
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

from tokenmix.errors import UserError
from tokenmix.train.callbacks import Average, Checkpoints, Position, listen
from tokenmix.train.config import TrainConfig
from tokenmix.train.plan import Plan, Progress
from tokenmix.train.ranks import most, ranks, together
from tokenmix.train.record import Recorder
from tokenmix.train.task import Repeated, TaskData, TaskModule

__all__ = ["check_device", "fit", "validate"]

ACCELERATORS = {"auto": "auto", "cpu": "cpu", "cuda": "gpu", "mps": "mps"}
PRECISIONS: dict[str, Literal["32-true", "bf16-mixed", "16-mixed", "bf16-true"]] = {
    "32": "32-true",
    "bf16-mixed": "bf16-mixed",
    "16-mixed": "16-mixed",
    "bf16": "bf16-true",
}


class Remaining:
    """The batches of an epoch from `start` to `stop`."""

    def __init__(self, data: TaskData, plan: Plan, epoch: int, start: int) -> None:
        self.data, self.plan, self.epoch, self.start = data, plan, epoch, start

    def __len__(self) -> int:
        return self.plan.batches(self.epoch) - self.start

    def __iter__(self) -> Iterator[Any]:
        # A generator: Lightning makes iterators that it never uses, and they must not start worker processes.
        batches = self.data.train_batches(batch_size=self.plan.batch_size, epoch=self.epoch, start=self.start)
        yield from itertools.islice(batches, len(self))


class Even:
    """The test batches of this process, and its last one again if another process has more of them.

    What processes do together, such as gathering the parts of a block, they must do equally often.
    """

    def __init__(self, batches: Any) -> None:
        self.batches, self.count = batches, most(len(batches))

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        batch = None
        for batch in self.batches:
            yield batch
        for _ in range(self.count - len(self.batches)):
            yield Repeated(batch)


class Batches(L.LightningDataModule):
    """Hands Lightning the rest of the epoch where the run stands."""

    def __init__(self, data: TaskData, plan: Plan, progress: Progress) -> None:
        super().__init__()
        self.data, self.plan, self.progress = data, plan, progress

    def train_dataloader(self) -> Remaining:
        """The rest of the current epoch."""
        return Remaining(self.data, self.plan, self.progress.epoch, self.progress.batch)

    def val_dataloader(self) -> Any:
        """The test samples."""
        return Even(self.data.test_batches(batch_size=self.plan.batch_size))


class Bar(RichProgressBar):
    """Lightning's bar, redrawn a hundred times an epoch at most, with what was last written to metrics.csv."""

    def __init__(self, recorder: Recorder, headline: str, batches: int) -> None:
        super().__init__(refresh_rate=max(1, batches // 100), console_kwargs={"stderr": True})
        self.recorder, self.headline = recorder, headline

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Count epochs from 1; Lightning calls the second of two "Epoch 1/1"."""
        super().on_train_epoch_start(trainer, pl_module)
        if self.progress is not None and self.train_progress_bar_id is not None:
            shown = f"Epoch {trainer.current_epoch + 1}/{trainer.max_epochs}"
            self.progress.update(self.train_progress_bar_id, description=shown)

    def get_metrics(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Any]:
        """Loss and headline metric."""
        latest = self.recorder.latest
        shown = {"loss": latest.get("train_loss"), self.headline: latest.get(f"val_{self.headline}")}
        return {name: f"{value:.4f}" for name, value in shown.items() if value is not None}


def check_device(config: TrainConfig) -> None:
    """Raise `UserError` for a device that is not there, or a precision that it cannot compute in."""
    if config.device not in ACCELERATORS:
        raise UserError(f"unknown device {config.device!r}; known: {', '.join(ACCELERATORS)}")
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UserError("no CUDA device is available; give --device cpu")
    if config.device == "mps" and not torch.backends.mps.is_available():
        raise UserError("no MPS device is available; give --device cpu")
    on_cpu = config.device == "cpu" or (
        config.device == "auto" and not (torch.cuda.is_available() or torch.backends.mps.is_available())
    )
    if config.precision == "16-mixed" and on_cpu:
        raise UserError("precision 16-mixed needs a GPU; give --precision bf16-mixed or 32")


def fit(
    task: TaskModule,
    data: TaskData,
    config: TrainConfig,
    run: Path,
    plan: Plan,
    progress: Progress,
    state: dict[str, Any] | None,
    *,
    quiet: bool,
) -> None:
    """Train from where `progress` stands to the end of the plan, leaving checkpoints and logs in the run folder."""
    with together():
        recorder = Recorder(run, plan, progress, log_every=config.log_every, quiet=quiet, unit=data.unit)
    average = None if config.ema is None else Average(task.model, config.ema, plan, progress)
    if state is not None:
        recorder.load_state_dict(state["recorder"])
        if average is not None:
            average.load_state_dict(state["average"])
    task.total_steps = plan.total_steps
    with _quiet_lightning(), listen() as request:
        checkpoints = Checkpoints(
            run, plan, progress, recorder, average, request, every=config.checkpoint_every, state=state
        )
        # In this order: the position moves first, and what is saved has been averaged and recorded.
        callbacks = [Position(plan, progress, config.seed), average, recorder, checkpoints]
        shown = not quiet and sys.stderr.isatty()
        bar = Bar(recorder, task.headline, plan.batches(progress.epoch)) if shown else None
        trainer = L.Trainer(
            max_epochs=plan.epochs,
            # A task that steps its optimisers itself accumulates and clips itself as well.
            accumulate_grad_batches=plan.accumulate if task.automatic_optimization else 1,
            gradient_clip_val=config.clip_grad if task.automatic_optimization else None,
            num_sanity_val_steps=0,
            reload_dataloaders_every_n_epochs=1,
            enable_progress_bar=shown,
            callbacks=[callback for callback in (*callbacks, bar) if callback is not None],
            **_engine(config),
            **_processes(config, task),
        )
        counted = trainer.fit_loop.epoch_progress.current
        for name in ("ready", "started", "processed", "completed"):
            setattr(counted, name, progress.epoch)
        trainer.fit(task, datamodule=Batches(data, plan, progress))
    recorder.close()


def validate(task: TaskModule, data: TaskData, config: TrainConfig, batch_size: int) -> dict[str, Any]:
    """Metrics of the task's model on the test samples."""
    with _quiet_lightning():
        trainer = L.Trainer(enable_progress_bar=False, devices=1, **_engine(config))
        trainer.validate(task, dataloaders=data.test_batches(batch_size=batch_size), verbose=False)
    return task.results


def _engine(config: TrainConfig) -> dict[str, Any]:
    return {
        "accelerator": ACCELERATORS[config.device],
        "precision": PRECISIONS[config.precision],
        "logger": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "benchmark": False,
    }


def _processes(config: TrainConfig, task: TaskModule) -> dict[str, Any]:
    here = ranks()
    if here.world_size == 1:
        return {"devices": 1}
    # A backward pass of one of several networks leaves the others' parameters without a gradient.
    strategy = DDPStrategy(find_unused_parameters=not task.automatic_optimization)
    if config.strategy == "fsdp":
        strategy = ModelParallelStrategy(data_parallel_size=here.world_size, tensor_parallel_size=1)
    return {
        "devices": here.local_world_size,
        "num_nodes": here.num_nodes,
        "strategy": strategy,
        "plugins": [TorchElasticEnvironment()],
    }


@contextmanager
def _quiet_lightning() -> Iterator[None]:
    """Hold back Lightning's remarks on the machine and on settings that are ours."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric", "lightning")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"lightning\..*")
        # Scores that a block hands on are views, and nothing is written into them.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
        try:
            for logger in loggers:
                logger.setLevel(logging.ERROR)
            yield
        finally:
            for logger, level in zip(loggers, levels):
                logger.setLevel(level)
