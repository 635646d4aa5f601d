"""Where a run computes, in which precision, and how several processes share the work."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from tokenmix.lab.train.checks import device_type
from tokenmix.lab.train.config import TrainConfig
from tokenmix.lab.train.distributed import distributed_info
from tokenmix.lab.train.task import TaskModule

MIXED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


class _TrainingStep(nn.Module):
    """A task whose forward pass is its training step, which is what DistributedDataParallel wraps."""

    def __init__(self, task: TaskModule) -> None:
        super().__init__()
        self.task = task

    def forward(self, batch: Any, number: int) -> dict[str, Any]:
        return self.task.training_step(batch, number)


class Engine:
    """A task on its device and, unless `alone`, shared by all processes of the run.

    Several processes hold copies (ddp), shards (fsdp), or copies that split the tokens of an image. A task that steps
    its optimisers itself has several backward passes in a step, so that its gradients are averaged before each step of
    an optimiser.
    """

    def __init__(self, config: TrainConfig, task: TaskModule, *, alone: bool = False) -> None:
        here, kind = distributed_info(), device_type(config)
        self.task, self.precision, self.kind = task, config.loop.precision, kind
        several = not alone and here.world_size > 1
        self.device = torch.device(kind, here.local_rank) if several and kind == "cuda" else torch.device(kind)
        self.scaler = torch.amp.GradScaler(kind) if self.precision == "16-mixed" else None
        self.average = several and not task.automatic_optimization
        self.sharded = several and config.loop.strategy == "fsdp"
        self.module: nn.Module = _TrainingStep(task)
        task.to(self.device, torch.bfloat16 if self.precision == "bf16" else None)
        if self.sharded:
            _shard(task, kind, config.loop.token_parallel)
        elif several and not self.average:
            if (shared := config.loop.token_parallel) > 1:
                shape = (here.world_size // shared, shared)
                task.split_tokens(init_device_mesh(kind, shape, mesh_dim_names=("data", "tokens"))["tokens"])
            self.module = DistributedDataParallel(self.module, [self.device] if kind == "cuda" else None)

    def use(self, optimizers: list[Optimizer]) -> None:
        """Let the task step these; the processes' gradients are averaged where nothing else does it."""
        self.task.optimizers = optimizers
        for optimizer in optimizers if self.average else ():
            optimizer.register_step_pre_hook(_average_gradients)

    def move(self, batch: Any) -> Any:
        """The batch on the device, in bf16 in that type. Mixed precision keeps floats: points need all their bits."""
        dtype = torch.bfloat16 if self.precision == "bf16" else None
        return map_tensors(
            batch, lambda x: x.to(self.device, dtype if x.is_floating_point() else None, non_blocking=True)
        )

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Autocast in mixed precision; in bf16 new tensors are bf16."""
        before = torch.get_default_dtype()
        try:
            if self.precision == "bf16":
                torch.set_default_dtype(torch.bfloat16)
            mixed = MIXED.get(self.precision)
            with nullcontext() if mixed is None else torch.autocast(self.kind, mixed):
                yield
        finally:
            torch.set_default_dtype(before)

    def train(self, batch: Any, number: int, *, share: float = 1.0, last: bool = True) -> dict[str, Tensor]:
        """The task's training step, and the backward pass of `share` of its loss; returns what there is to log.

        Args:
            batch: on the device.
            number: of the batch in its epoch.
            share: factor of the loss.
            last: whether a step of the optimiser follows; only then the processes exchange gradients.
        """
        with nullcontext() if last or not isinstance(self.module, DistributedDataParallel) else self.module.no_sync():
            if self.sharded:
                self.task.model.set_requires_gradient_sync(last)  # type: ignore[operator]
            with self.computing():
                outputs = self.module(batch, number)
            if self.task.automatic_optimization:
                loss = outputs["loss"].float() * share
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        return map_tensors(outputs["logs"], lambda x: x.float() if x.is_floating_point() else x)

    def step(self, optimizer: Optimizer, clip_grad: float | None) -> None:
        """Clip the gradients, step, and clear them."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)
        if clip_grad is not None:
            # Weights that are not finite are reported with the checkpoint.
            nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], clip_grad)
        if self.scaler is None:
            optimizer.step()
        else:
            self.scaler.step(optimizer)
            self.scaler.update()
        optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """The scale of 16-mixed."""
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the scale of 16-mixed; `ValueError` for the state of another precision."""
        if (self.scaler is None) != (not state):
            raise ValueError("another precision")
        if self.scaler is not None:
            self.scaler.load_state_dict(state)


def map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """The function on each tensor of nested dicts, lists and tuples."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(one, function) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(one, function) for one in value)
    return value


def _average_gradients(optimizer: Optimizer, *_: Any) -> None:
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def _shard(task: TaskModule, kind: str, shared: int) -> None:
    size = dist.get_world_size()
    if shared > 1:
        shape = (size // shared, shared)
        task.split_tokens(init_device_mesh(kind, shape, mesh_dim_names=("data", "tokens"))["tokens"])
    # Over all processes, as gradients must be averaged over those that share an image too.
    task.shard(init_device_mesh(kind, (size,)))
