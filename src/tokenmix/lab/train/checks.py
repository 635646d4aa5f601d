"""What a run's options must be, checked once before anything is read or written."""

import importlib
import os

import torch

from tokenmix.errors import UserError, needs, unknown_name
from tokenmix.lab.train.config import OptimConfig, TeacherOptions, TrainConfig
from tokenmix.lab.train.launch import distributed_info
from tokenmix.layers.table import get_spec


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


def fit_to_ranks(config: TrainConfig) -> TrainConfig:
    """The config of a run to resume for as many processes as run now; a step takes as many samples as it did.

    Raises:
        UserError: they cannot be divided equally.
    """
    if "RANK" not in os.environ:
        return config
    here = distributed_info()
    before = (config.loop.devices or 1) * (config.loop.num_nodes or 1)
    samples = config.loop.batch_size * before
    if samples % here.world_size:
        raise UserError(
            f"the run takes {samples} samples a step ({before} processes of {config.loop.batch_size}), which "
            f"{here.world_size} processes cannot share equally; resume it with another number of processes"
        )
    several = {"devices": here.local_world_size, "num_nodes": here.num_nodes}
    return config.replace(batch_size=samples // here.world_size, **several)


def distills_layers(config: TrainConfig) -> bool:
    """Whether the run learns the outputs of a teacher's layers."""
    return isinstance(config.options, TeacherOptions) and config.options.distill_from == "layers"


def check_config(config: TrainConfig) -> None:
    """Raise `UserError` for options that do not fit together, or do not fit the processes that run."""
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
    for mixer in (config.swap.swap, config.swap.insert):
        if mixer is not None:
            get_spec(mixer)
    if loop.logger is not None:
        with needs(f"--logger {loop.logger}"):
            importlib.import_module(loop.logger)
    if isinstance(optim, OptimConfig):
        if optim.warmup_steps is not None and optim.warmup_epochs is not None:
            raise UserError(
                f"warm-up is given twice: {optim.warmup_steps} steps and {optim.warmup_epochs:g} epochs; leave one out"
            )
        if (optim.warmup_epochs or 0) + optim.cooldown_epochs > loop.epochs:
            raise UserError(
                f"warm-up and cool-down of {optim.warmup_epochs or 0:g} and {optim.cooldown_epochs:g} epochs are "
                f"longer than the {loop.epochs} of training; raise --epochs"
            )
        check_optimizer(optim.opt, optim.opt_eps)


def check_optimizer(name: str, eps: float | None = None) -> None:
    """Raise `UserError` unless timm has an optimiser of this name, and it takes `eps` if one is given."""
    # Here, since timm takes seconds and only training needs it.
    from timm.optim import get_optimizer_info, list_optimizers

    known = [str(known) for known in list_optimizers()]
    if name not in known:
        raise unknown_name("optimiser", name, known)
    # timm would leave it out without a word.
    if eps is not None and not get_optimizer_info(name).has_eps:
        raise UserError(f"optimiser {name!r} has no epsilon; leave opt_eps={eps} out")
