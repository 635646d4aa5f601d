"""How many batches make a step, an epoch and a run, and where in it a run stands."""

import math
import random
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from tokenmix.errors import UserError
from tokenmix.train.config import TrainConfig

__all__ = ["Progress", "TrainingPlan", "check_config", "make_plan", "seed_everything", "warmup_note"]


@dataclass(frozen=True)
class TrainingPlan:
    """The arithmetic of a run.

    An optimiser step takes `accumulate` batches of `batch_size` from each of `processes`; none spans two epochs.
    """

    batch_size: int
    accumulate: int
    steps_per_epoch: int
    epochs: int
    total_steps: int
    processes: int = 1

    def batches(self, epoch: int) -> int:
        """Batches of an epoch, counted from 0; the last epoch may end early."""
        steps = min(self.steps_per_epoch, self.total_steps - epoch * self.steps_per_epoch)
        return steps * self.accumulate


@dataclass
class Progress:
    """Where a run stands: the next batch is number `batch` of epoch `epoch`, both counted from 0."""

    epoch: int = 0
    batch: int = 0
    step: int = 0
    images: int = 0
    train_seconds: float = 0.0
    eval_seconds: float = 0.0
    csv_bytes: int = 0
    best_epoch: int | None = None
    best: dict[str, Any] = field(default_factory=dict)
    final: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """As values for JSON."""
        return asdict(self)


def make_plan(config: TrainConfig, num_train: int, processes: int = 1, unit: str = "images") -> TrainingPlan:
    """The plan for this many training samples; `UserError` if they do not fill one batch of every process."""
    global_batch = config.batch_size * processes
    if global_batch > num_train:
        raise UserError(
            f"batch size {config.batch_size}{f' of {processes} processes' * (processes > 1)} is larger than the "
            f"{num_train} training {unit}; give --batch-size {max(1, num_train // (2 * processes))} or less"
        )
    steps_per_epoch = num_train // global_batch
    total = config.epochs * steps_per_epoch
    if config.max_steps is not None:
        total = min(total, config.max_steps)
    micro = config.batch_size // config.accumulate
    return TrainingPlan(micro, config.accumulate, steps_per_epoch, math.ceil(total / steps_per_epoch), total, processes)


def warmup_note(config: TrainConfig, plan: TrainingPlan) -> str | None:
    """What to say of a warm-up that the run ends in, as with a recipe for a larger set; None of any other."""
    if config.warmup_steps is None or config.warmup_steps < plan.total_steps:
        return None
    peak = config.lr * plan.total_steps / (config.warmup_steps + 1)
    return (
        f"the run's {plan.total_steps} steps end within the warm-up of {config.warmup_steps}, at a learning rate of "
        f"{peak:.2g} of {config.lr:g}; give --warmup-steps"
    )


def check_config(config: TrainConfig) -> None:
    """Raise `UserError` for the first setting that no run can have."""
    for name in ("epochs", "max_steps", "batch_size", "accumulate", "limit", "limit_eval", "img_size", "threads"):
        _at_least(config, name, 1)
    for name in ("log_every", "checkpoint_every", "devices", "num_nodes", "vocab_size", "seq_len", "doc_stride"):
        _at_least(config, name, 1)
    for name in ("min_lr", "warmup_steps", "warmup_epochs", "cooldown_epochs", "weight_decay", "workers", "seed"):
        _at_least(config, name, 0)
    for name in ("color_jitter", "opt_eps"):
        _at_least(config, name, 0)
    if config.warmup_steps is not None and config.warmup_epochs is not None:
        raise UserError(
            f"warm-up is given twice: {config.warmup_steps} steps and {config.warmup_epochs:g} epochs; leave one out"
        )
    if (config.warmup_epochs or 0) + config.cooldown_epochs > config.epochs:
        raise UserError(
            f"warm-up and cool-down of {config.warmup_epochs or 0:g} and {config.cooldown_epochs:g} epochs do not fit "
            f"into {config.epochs}; raise --epochs"
        )
    if not (config.lr > 0 and math.isfinite(config.lr)):
        raise UserError(f"lr must be a positive number, got {config.lr}")
    if config.clip_grad is not None and not config.clip_grad > 0:
        raise UserError(f"clip_grad must be positive, or none to switch clipping off; got {config.clip_grad}")
    if config.ema is not None and not 0 < config.ema < 1:
        raise UserError(f"ema is a decay in (0, 1) such as 0.999, or none to switch it off; got {config.ema}")
    if config.batch_size % config.accumulate:
        raise UserError(f"batch size {config.batch_size} cannot be cut into accumulate={config.accumulate} equal parts")


def _at_least(config: TrainConfig, name: str, least: int) -> None:
    value = getattr(config, name)
    if value is not None and not value >= least:
        raise UserError(f"{name} must be at least {least}, got {value}")


def seed_everything(seed: int, epoch: int, batch: int, rank: int = 0) -> None:
    """Seed python, numpy and torch from a position in a run; the weights are drawn at epoch 0, training starts at 1.

    Drawn anew for each batch, the randomness of a run depends on the position alone: not on what was drawn before, by
    evaluation, by worker processes or before a kill. That is why a checkpoint needs no random state. Each process of a
    run draws its own.
    """
    place = (seed, epoch, batch, rank) if rank else (seed, epoch, batch)
    words = np.random.SeedSequence(place).generate_state(3)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))
    torch.manual_seed(int(words[2]))
