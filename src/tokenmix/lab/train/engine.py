"""Lightning Fabric, set up for one run: device, precision, and how several processes share the work."""

from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.fabric.plugins.precision import HalfPrecision, MixedPrecision, Precision
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tokenmix.errors import UserError
from tokenmix.lab.train.config import TrainConfig
from tokenmix.lab.train.distributed import distributed_info
from tokenmix.lab.train.task import TaskModule


class Autocast(MixedPrecision):
    """Automatic mixed precision whose inputs stay as they are: points need all bits of their coordinates."""

    def convert_input(self, data: Any) -> Any:
        """Nothing is cast."""
        return data


class AverageAtStep(DDPStrategy):
    """DDP for a task that steps its optimisers itself: each step uses the mean of the processes' gradients.

    DistributedDataParallel instead expects one backward pass after each forward pass of the module that it wraps; such
    a task has several within `training_step`, each through a part of its networks.
    """

    def setup_module(self, module: nn.Module) -> nn.Module:  # pyrefly: ignore[bad-override]
        """The module itself; all processes have drawn or read the same weights."""
        return module

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Average, then step."""
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        return super().optimizer_step(optimizer, **kwargs)


def make_fabric(config: TrainConfig, task: TaskModule, *, alone: bool = False) -> Fabric:
    """Fabric on the config's device, over all processes of the run, or only this one."""
    device, here = device_type(config), distributed_info()
    plugins: list[Any] = [_precision(config, device)]
    if alone or here.world_size == 1:
        fabric = Fabric(accelerator=device, devices=1, plugins=plugins)
    else:
        fabric = Fabric(
            accelerator=device,
            devices=here.local_world_size,
            num_nodes=here.num_nodes,
            strategy=_strategy(config, task),
            plugins=[*plugins, TorchElasticEnvironment()],
        )
    fabric.launch()
    return fabric


def _precision(config: TrainConfig, device: str) -> Precision:
    if config.loop.precision == "32":
        return Precision()
    if config.loop.precision == "bf16":
        return HalfPrecision("bf16-true")
    return Autocast(config.loop.precision, device)


class SplitTokens(DDPStrategy):
    """Copies of a task whose model has split tokens; gradients are averaged over all processes."""

    def __init__(self, shared: int) -> None:
        super().__init__()
        self.shared = shared

    def setup_module(self, module: nn.Module) -> nn.Module:  # pyrefly: ignore[bad-override]
        """Split the tokens over neighbouring processes, then wrap."""
        shape = (dist.get_world_size() // self.shared, self.shared)
        mesh = init_device_mesh(self.root_device.type, shape, mesh_dim_names=("data", "tokens"))
        assert isinstance(module, TaskModule)
        module.split_tokens(mesh["tokens"])
        return super().setup_module(module)


def _strategy(config: TrainConfig, task: TaskModule) -> Strategy:
    shared = config.loop.token_parallel
    if config.loop.strategy == "fsdp":
        size = distributed_info().world_size // shared
        return ModelParallelStrategy(_shard, data_parallel_size=size, tensor_parallel_size=shared)
    if shared > 1:
        return SplitTokens(shared)
    return DDPStrategy() if task.automatic_optimization else AverageAtStep()


def _shard(task: TaskModule, mesh: DeviceMesh) -> TaskModule:
    if mesh["tensor_parallel"].size() == 1:
        task.shard(mesh["data_parallel"])
        return task
    task.split_tokens(mesh["tensor_parallel"])
    # Over all processes, as gradients must be averaged over those that share an image too.
    task.shard(init_device_mesh(mesh.device_type, (mesh.size(),)))
    return task


def device_type(config: TrainConfig) -> str:
    """The kind of device that `config.loop.device` is on this machine."""
    if config.loop.device != "auto":
        return config.loop.device
    return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"


def check_device(config: TrainConfig) -> None:
    """Raise `UserError` for a device that the machine does not have, or a precision that it cannot compute in."""
    if config.loop.device == "cuda" and not torch.cuda.is_available():
        raise UserError("no CUDA device is available; give --device cpu")
    if config.loop.device == "mps" and not torch.backends.mps.is_available():
        raise UserError("no MPS device is available; give --device cpu")
    if config.loop.precision == "16-mixed" and device_type(config) == "cpu":
        raise UserError("precision 16-mixed needs a GPU; give --precision bf16-mixed or 32")
