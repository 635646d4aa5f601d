"""Checks of a run's options; its plan, optimiser and schedule."""

import importlib
import math
import os
import platform
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, get_type_hints

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from tokenmix.errors import UserError, needs, unknown_name
from tokenmix.files import Values
from tokenmix.lab.train.config import OptimConfig, TeacherOptions, TrainConfig
from tokenmix.lab.train.launch import distributed_info
from tokenmix.lab.train.schema import fitted

EPOCHS, MOST_EPOCHS, STEPS = 10, 30, 1000


def device_type(config: TrainConfig) -> str:
    """Device type of `config.loop.device` on this machine."""
    if config.loop.device != "auto":
        return config.loop.device
    return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"


def check_device(config: TrainConfig) -> None:
    """Raise `UserError` for a device that is not available, or a precision that the device does not support."""
    if config.loop.device == "cuda" and not torch.cuda.is_available():
        raise UserError("no CUDA device is available; give --device cpu")
    if config.loop.device == "mps" and not torch.backends.mps.is_available():
        raise UserError("no MPS device is available; give --device cpu")
    if config.loop.precision == "16-mixed" and device_type(config) == "cpu":
        raise UserError("precision 16-mixed needs a GPU; give --precision bf16-mixed or 32")


def fit_to_ranks(config: TrainConfig, step_size: int | None = None) -> TrainConfig:
    """The config of a run to resume, fitted to the current number of processes; samples per step stay the same.

    They are `step_size`, which is less than the config's where the training samples do not fill a batch.
    """
    if "RANK" not in os.environ:
        return config
    here = distributed_info()
    before = (config.loop.devices or 1) * (config.loop.num_nodes or 1)
    samples = step_size or config.loop.batch_size * before
    if samples % (here.world_size * config.optim.accumulate):
        raise UserError(
            f"the run takes {samples} samples a step ({before} processes of {samples // before}), which "
            f"{here.world_size} processes cannot share equally; resume it with another number of processes"
        )
    several = {"devices": here.local_world_size, "num_nodes": here.num_nodes}
    return config.replace(batch_size=samples // here.world_size, **several)


def distills_layers(config: TrainConfig) -> bool:
    return isinstance(config.options, TeacherOptions) and config.options.distill_from == "layers"


def check_config(config: TrainConfig) -> None:
    """Raise `UserError` for options that conflict, or do not fit the number of processes."""
    optim, loop = config.optim, config.loop
    if distills_layers(config) and config.swap.swap is None:
        raise UserError("distill_from=layers trains the layers that are swapped in; give --swap MIXER as well")
    if distills_layers(config) and loop.strategy == "fsdp":
        raise UserError("distill_from=layers calls single layers, which fsdp shards; give --strategy ddp")
    if distills_layers(config) and loop.token_parallel > 1:
        raise UserError("distill_from=layers calls single layers on whole images; leave --token-parallel out")
    if loop.batch_size % optim.accumulate:
        raise UserError(
            f"batch size {loop.batch_size} cannot be split into accumulate={optim.accumulate} equal parts; give a "
            f"multiple of {optim.accumulate} by --batch-size"
        )
    here = distributed_info()
    devices, nodes = loop.devices or here.local_world_size, loop.num_nodes or here.num_nodes
    if (devices, nodes) != (here.local_world_size, here.num_nodes):
        several = f"--nnodes {nodes} --rdzv_endpoint FIRST_MACHINE:29500 --rdzv_backend c10d " if nodes > 1 else ""
        raise UserError(
            f"{devices * nodes} processes are requested and {here.world_size} run; start them on each machine with: "
            f"torchrun {several}--nproc_per_node {devices} -m tokenmix train ..."
        )
    if here.world_size % loop.token_parallel:
        raise UserError(
            f"token_parallel={loop.token_parallel} splits each image over as many processes and "
            f"{here.world_size} run; give --devices {loop.token_parallel} or a multiple of it"
        )
    if loop.strategy != "auto" and here.world_size == 1:
        raise UserError(f"strategy {loop.strategy} needs several processes; give --devices 2 or more")
    if loop.strategy == "fsdp" and optim.ema is not None:
        raise UserError("ema keeps a whole copy of the weights, which fsdp avoids; leave --ema out or use ddp")
    if loop.strategy == "fsdp" and loop.precision == "16-mixed":
        raise UserError("fsdp cannot compute in 16-mixed; give --precision bf16-mixed or 32")
    if loop.logger is not None:
        with needs(f"--logger {loop.logger}"):
            importlib.import_module(loop.logger)
    if isinstance(optim, OptimConfig):
        if optim.warmup_steps is not None and optim.warmup_epochs is not None:
            raise UserError(
                f"warm-up is given twice: {optim.warmup_steps} steps and {optim.warmup_epochs:g} epochs; leave one out"
            )
        if (optim.warmup_epochs or 0) + optim.cooldown_epochs > (loop.epochs or EPOCHS):
            raise UserError(
                f"warm-up and cool-down of {optim.warmup_epochs or 0:g} and {optim.cooldown_epochs:g} epochs are "
                f"longer than the {loop.epochs or EPOCHS} of training; raise --epochs"
            )
        check_optimizer(optim.opt, optim.opt_eps)


@contextmanager
def batch_norm_errors() -> Iterator[None]:
    """Raise `UserError` if BatchNorm refuses a training batch in the block."""
    try:
        yield
    except ValueError as error:
        # PyTorch has no class for this error.
        if "more than 1 value per channel" not in str(error):
            raise
        raise UserError(
            "BatchNorm needs more than one value per channel in training; raise --batch-size, lower --accumulate, or "
            "give larger samples"
        ) from None


def check_optimizer(name: str, eps: float | None = None) -> None:
    """Raise `UserError` unless timm has an optimiser of this name, and the optimiser takes `eps` if given."""
    # Imported here: timm takes seconds, and only training needs it.
    from timm.optim import get_optimizer_info, list_optimizers

    known = [str(known) for known in list_optimizers()]
    if name not in known:
        raise unknown_name("optimiser", name, known)
    # timm would ignore it without a message.
    if eps is not None and not get_optimizer_info(name).has_eps:
        raise UserError(f"optimiser {name!r} has no epsilon; leave opt_eps={eps} out")


@dataclass(frozen=True)
class TrainingPlan:
    """Numbers of batches and steps. A step takes `accumulate` batches from each of `processes`, within one epoch."""

    batch_size: int
    accumulate: int
    steps_per_epoch: int
    epochs: int
    total_steps: int
    processes: int = 1

    def batches(self, epoch: int) -> int:
        """Batches of an epoch, counted from 0; the last epoch may be shorter."""
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
    best: Values = field(default_factory=dict)
    final: Values = field(default_factory=dict)

    @classmethod
    def from_dict(cls, values: object) -> "Progress":
        """Progress from JSON values; `UserError` for a wrong type or a negative number."""
        hints = get_type_hints(cls)
        if not isinstance(values, dict) or not hints.keys() >= values.keys() >= {"epoch", "batch", "step"}:
            raise UserError("it does not have the position of the run")
        found = {name: fitted(hints[name], value, name) for name, value in values.items()}
        for name, value in found.items():
            if not isinstance(value, dict | None) and value < 0:
                raise UserError(f"{name} must be at least 0, got {value}")
        return cls(**found)


def make_plan(config: TrainConfig, num_train: int, processes: int = 1, unit: str = "images") -> TrainingPlan:
    """The plan for this many training samples; `UserError` if a step has more parts than there are samples.

    If the samples do not fill one batch, an epoch has four steps of smaller batches, see `plan_notes`.
    """
    micro, parts = config.loop.batch_size // config.optim.accumulate, config.optim.accumulate * processes
    if parts > num_train:
        raise UserError(
            f"{num_train} training {unit} are fewer than the {parts} parts of a step (processes times accumulate); "
            "give more data, or fewer parts"
        )
    if micro * parts > num_train:
        micro = num_train // (4 * parts)
        micro = max(2 if 2 * parts <= num_train else 1, micro - micro % 2)  # mixup takes pairs
    steps_per_epoch = num_train // (micro * parts)
    total = (config.loop.epochs or usual_epochs(config, steps_per_epoch)) * steps_per_epoch
    if config.loop.max_steps is not None:
        total = min(total, config.loop.max_steps)
    return TrainingPlan(
        micro, config.optim.accumulate, steps_per_epoch, math.ceil(total / steps_per_epoch), total, processes
    )


def usual_epochs(config: TrainConfig, steps_per_epoch: int) -> int:
    """Epochs of a run without --epochs: `EPOCHS`; from random weights as many as make `STEPS`, up to `MOST_EPOCHS`.

    Ten epochs on a few thousand images are a few hundred steps, after which a random forest is better than any network.
    """
    if config.model.pretrained or config.loop.init_from is not None:
        return EPOCHS
    return max(EPOCHS, min(MOST_EPOCHS, math.ceil(STEPS / steps_per_epoch)))


def with_epochs(config: TrainConfig, plan: TrainingPlan) -> TrainConfig:
    """The config with its number of epochs, which depends on the number of samples if none is given."""
    if config.loop.epochs is not None:
        return config
    return config.replace(epochs=usual_epochs(config, plan.steps_per_epoch))


def plan_notes(config: TrainConfig, plan: TrainingPlan, num_train: int, unit: str) -> list[str]:
    """Notes to print before a run starts."""
    notes, optim, loop = [], config.optim, config.loop
    size, processes = plan.batch_size * plan.accumulate, f" in {plan.processes} processes" * (plan.processes > 1)
    if size != loop.batch_size:
        notes.append(
            f"{num_train} training {unit} do not fill a batch of {loop.batch_size}{processes}, so batches have "
            f"{size}; to choose it, give a --batch-size of at most {num_train // plan.processes}"
        )
    epochs = usual_epochs(config, plan.steps_per_epoch)
    if loop.epochs is None and epochs != EPOCHS and plan.epochs >= epochs:
        notes.append(f"an epoch has {plan.steps_per_epoch} steps, so there are {epochs}; --epochs changes that")
    warmup = optim.warmup_steps if isinstance(optim, OptimConfig) else None
    if warmup is not None and warmup >= plan.total_steps:  # as with a recipe for a larger data set
        peak = optim.lr * plan.total_steps / (warmup + 1)
        notes.append(
            f"the run's {plan.total_steps} steps end within the warm-up of {warmup}, at a learning rate "
            f"of {peak:.2g} of {optim.lr:g}; give --warmup-steps"
        )
    emulated = device_type(config) == "cpu" and platform.machine() in ("x86_64", "AMD64")
    emulated &= torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2")
    if emulated and "bf16" in loop.precision:
        notes.append(f"{loop.precision} is emulated on this CPU and takes 5 to 12 times as long; give --precision 32")
    return notes


def seed_everything(seed: int, epoch: int, batch: int, rank: int = 0) -> None:
    """Seed python, numpy and torch from a position in a run; weights are drawn at epoch 0, training starts at epoch 1.

    Each batch is seeded, so randomness depends only on the position: not on earlier draws by evaluation, worker
    processes or an interrupted run. Checkpoints need no random state. Each rank draws its own numbers.
    """
    place = (seed, epoch, batch, rank) if rank else (seed, epoch, batch)
    words = np.random.SeedSequence(place).generate_state(3)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))
    torch.manual_seed(int(words[2]))


@dataclass
class Warmup:
    """Factor on the peak rate: linear from near 0 over `warmup` steps, then `shape` of the progress, down to `floor`.

    `"step"` counts from the run's start, as published schedules do, and is at least `floor`.
    """

    shape: str
    warmup: int
    total: int
    floor: float

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return (step + 1) / (self.warmup + 1)
        if step >= self.total:
            return self.floor
        if self.shape == "step":
            done = step / max(1, self.total)
            return max(self.floor, 0.1 ** ((done >= 8 / 12) + (done >= 11 / 12)))
        done = (step - self.warmup) / (self.total - self.warmup)
        return self.floor + (1 - self.floor) * SHAPES[self.shape](done)


SHAPES: dict[str, Callable[[float], float]] = {
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
    "linear": lambda done: 1 - done,
    "poly": lambda done: (1 - done) ** 0.9,
    "constant": lambda done: 1.0,
}


def make_optimizer(model: nn.Module | list[Values], optim: OptimConfig) -> Optimizer:
    """timm's optimiser of that name.

    Biases, norms and parameters of `model.no_weight_decay()` have no weight decay; parameter groups keep their own.
    """
    from timm.optim import create_optimizer_v2

    try:
        options: Values = {} if optim.opt_eps is None else {"eps": optim.opt_eps}
        return create_optimizer_v2(model, opt=optim.opt, lr=optim.lr, weight_decay=optim.weight_decay, **options)
    except ImportError as error:
        raise UserError(f"optimiser {optim.opt!r}: {error}; install that, or give another --opt") from None


def make_schedule(optimizer: Optimizer, optim: OptimConfig, total_steps: int, epochs: float) -> LambdaLR:
    """Schedule with linear warm-up over the run's optimiser steps without the cool-down."""
    warmup = round(0.05 * total_steps) if optim.warmup_steps is None else optim.warmup_steps
    if optim.warmup_epochs is not None:
        warmup = round(optim.warmup_epochs / epochs * total_steps)
    falling = total_steps - round(optim.cooldown_epochs / epochs * total_steps)
    return LambdaLR(optimizer, Warmup(optim.schedule, warmup, falling, min(1.0, optim.min_lr / optim.lr)))


Configured = Optimizer | Values | Sequence[Optimizer] | Sequence[Values] | tuple[Sequence[Optimizer], Sequence[object]]
"""Result of Lightning's `configure_optimizers`: optimisers, or tables with an `optimizer` and its `lr_scheduler`."""


def optimizers_and_schedules(configured: Configured) -> tuple[list[Optimizer], list[Values]]:
    """Optimisers, and schedules with their `interval`, from any result of Lightning's `configure_optimizers`.

    As in Lightning, a schedule steps after each epoch unless its interval is "step".
    """
    parts: Sequence[Any] = [configured] if isinstance(configured, Optimizer | Mapping) else configured
    if len(parts) == 2 and all(isinstance(part, list | tuple) for part in parts):
        optimizers, schedules = parts
    else:
        optimizers = [one if isinstance(one, Optimizer) else one["optimizer"] for one in parts]
        schedules = [one["lr_scheduler"] for one in parts if isinstance(one, Mapping) and "lr_scheduler" in one]
    given = [schedule if isinstance(schedule, Mapping) else {"scheduler": schedule} for schedule in schedules]
    return list(optimizers), [{"interval": "epoch", **schedule} for schedule in given]


class WeightEMA:
    """Exponential moving average of the weights. A run evaluates the average and saves it as the run's weights."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        from timm.utils.model_ema import ModelEmaV3

        addresses = [tensor.data_ptr() for tensor in model.state_dict().values() if tensor.numel()]
        if len(set(addresses)) < len(addresses):
            raise UserError(
                "ema would average tied parameters twice, such as embeddings shared with the head; omit --ema"
            )
        self.model = model
        # With warm-up the first averages are short; otherwise a run of few hundred steps would keep its initial
        # weights. timm rounds a bfloat16 average at random, with a generator that checkpoints lack. float32 needs no
        # rounding.
        low = any(value.dtype in (torch.bfloat16, torch.float16) for value in model.state_dict().values())
        self.average = ModelEmaV3(model, decay=decay, use_warmup=True, dtype=torch.float32 if low else None)
        self.average.requires_grad_(False)

    def weights(self) -> dict[str, Tensor]:
        """The averaged weights, in the model's types."""
        averaged = self.average.module.state_dict()
        return {name: averaged[name].to(own.dtype) for name, own in self.model.state_dict().items()}

    def state_dict(self) -> Values:
        """The float32 average, for the checkpoint."""
        return {k: v.detach().cpu().clone() for k, v in self.average.module.state_dict().items()}

    def load_state_dict(self, state_dict: Values) -> None:
        self.average.module.load_state_dict(state_dict)

    def update(self, step: int) -> None:
        self.average.update(self.model, step=step)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Use the averaged weights within the block, and the model's own after it."""
        own = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.model.load_state_dict(self.average.module.state_dict())
        yield
        self.model.load_state_dict(own)
