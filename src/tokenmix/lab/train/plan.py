"""How many batches make a step, an epoch and a run, and the position of a run in it."""

import math
import random
from dataclasses import dataclass, field
from typing import Any, get_type_hints

import numpy as np
import torch

from tokenmix.errors import UserError
from tokenmix.lab.train.config import OptimConfig, TrainConfig
from tokenmix.lab.train.schema import fitted


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
    """Position of a run: the next batch is number `batch` of epoch `epoch`, both counted from 0."""

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

    @classmethod
    def from_dict(cls, values: Any) -> "Progress":
        """From values of JSON; `UserError` if one has another type, or is a number below 0."""
        hints = get_type_hints(cls)
        if not isinstance(values, dict) or not hints.keys() >= values.keys() >= {"epoch", "batch", "step"}:
            raise UserError("it does not have the position of the run")
        found = {name: fitted(hints[name], value, name) for name, value in values.items()}
        for name, value in found.items():
            if not isinstance(value, dict | None) and value < 0:
                raise UserError(f"{name} must be at least 0, got {value}")
        return cls(**found)


def make_plan(config: TrainConfig, num_train: int, processes: int = 1, unit: str = "images") -> TrainingPlan:
    """The plan for this many training samples; `UserError` if they do not fill one batch of every process."""
    global_batch = config.loop.batch_size * processes
    if global_batch > num_train:
        raise UserError(
            f"batch size {config.loop.batch_size}{f' of {processes} processes' * (processes > 1)} is larger than the "
            f"{num_train} training {unit}; give --batch-size {max(1, num_train // (2 * processes))} or less"
        )
    steps_per_epoch = num_train // global_batch
    total = config.loop.epochs * steps_per_epoch
    if config.loop.max_steps is not None:
        total = min(total, config.loop.max_steps)
    micro = config.loop.batch_size // config.optim.accumulate
    return TrainingPlan(
        micro, config.optim.accumulate, steps_per_epoch, math.ceil(total / steps_per_epoch), total, processes
    )


def warmup_note(config: TrainConfig, plan: TrainingPlan) -> str | None:
    """What to say of a warm-up that the run ends in, as with a recipe for a larger set; None of any other."""
    optim = config.optim
    if not isinstance(optim, OptimConfig) or optim.warmup_steps is None or optim.warmup_steps < plan.total_steps:
        return None
    peak = optim.lr * plan.total_steps / (optim.warmup_steps + 1)
    return (
        f"the run's {plan.total_steps} steps end within the warm-up of {optim.warmup_steps}, at a learning rate of "
        f"{peak:.2g} of {optim.lr:g}; give --warmup-steps"
    )


def seed_everything(seed: int, epoch: int, batch: int, rank: int = 0) -> None:
    """Seed python, numpy and torch from a position in a run; the weights are drawn at epoch 0, training starts at 1.

    Seeded for each batch, the randomness of a run depends on the position only: not on what was drawn before, by
    evaluation, by worker processes or before a kill. That is why a checkpoint needs no random state. Each process of a
    run draws its own.
    """
    place = (seed, epoch, batch, rank) if rank else (seed, epoch, batch)
    words = np.random.SeedSequence(place).generate_state(3)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))
    torch.manual_seed(int(words[2]))
