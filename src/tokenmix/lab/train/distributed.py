"""Ranks of one run, and the communication between them.

torchrun, or `tokenmix train --devices 2`, starts the processes and sets their ranks in environment variables. Only
rank 0 writes files and messages. An error on one rank stops all ranks, and one rank reports the error.
"""

import gc
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from tokenmix.errors import UserError, as_user_error
from tokenmix.files import Values
from tokenmix.lab.train.launch import START, distributed_info

T = TypeVar("T")
LOST = ("connection closed", "connection reset", "broken pipe", "remote process exited", "timed out", "timeout")
"""Words in a backend's error after a lost connection."""


class PeerFailure(SystemExit):
    """Another rank stops the run and reports why; this process exits with the same code."""


@contextmanager
def process_group(device: str) -> Iterator[None]:
    """Join the process group for the block; a single process does nothing.

    If another process ended without a message, rank 0 raises `UserError` and the other ranks `PeerFailure`.
    """
    here = distributed_info()
    if here.world_size == 1 or dist.is_initialized():
        yield
        return
    cuda = device in ("auto", "cuda") and torch.cuda.is_available()
    if cuda:
        count = torch.cuda.device_count()
        if here.local_world_size > count and here.local_rank:
            raise PeerFailure(2)
        if here.local_world_size > count:
            raise UserError(
                f"{here.local_world_size} processes are requested and this machine has {count} CUDA "
                f"device{'s' * (count > 1)}; give --devices {count}, and --batch-size with --accumulate to keep the "
                "number of images per step, or --device cpu"
            )
        torch.cuda.set_device(here.local_rank)
    address = ":".join(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    alone = f"process {here.rank} of {here.world_size} cannot join the others at {address!r}, which MASTER_ADDR and "
    kinds = OSError, OverflowError, RuntimeError, TypeError, ValueError
    with as_user_error(f"{alone}MASTER_PORT give (", f"); {START}", *kinds):
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    try:
        yield
    except RuntimeError as error:
        # gloo has no exception class for a lost connection.
        backend = isinstance(error, dist.DistError) or "gloo" in str(error)
        if not backend or not any(word in str(error).lower() for word in LOST):
            raise
        if not here.first:
            raise PeerFailure(1) from None
        raise UserError(
            "the connection to another process of the run is lost, so training stopped; see what that process or its "
            "machine reported, then continue from the last checkpoint with: tokenmix train --resume FOLDER"
        ) from None
    finally:
        dist.destroy_process_group()
        # A gloo thread returns the tensors of its last work to Python, and aborts if Python is shutting down.
        # Collect the groups now, so that their threads end first.
        gc.collect()


def all_reduce_mean(values: Tensor) -> Tensor:
    """Mean of a CPU tensor over the ranks."""
    if not dist.is_initialized():
        return values
    values = values.clone()
    dist.all_reduce(values)
    return values / dist.get_world_size()


def all_gather(value: T) -> list[T]:
    """Values of all ranks, in the order of ranks."""
    if not dist.is_initialized():
        return [value]
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def broadcast_buffers(module: nn.Module) -> None:
    """Copy rank 0's buffers, such as the running statistics of a batch norm, to all ranks."""
    if dist.is_initialized():
        for buffer in module.buffers():
            dist.broadcast(buffer, src=0)


@contextmanager
def raise_on_all_ranks() -> Iterator[None]:
    """If the block fails on one rank, stop the others with `PeerFailure`; the block must not wait for other ranks."""
    if not dist.is_initialized():
        yield
        return
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    codes = all_gather(0 if error is None else 2 if isinstance(error, UserError | OSError) else 1)
    first = next((rank for rank, code in enumerate(codes) if code), None)
    if first is None:
        return
    if error is not None and first == dist.get_rank():
        raise error
    raise PeerFailure(codes[first]) from error


def map_tensors(value: T, function: Callable[[Tensor], object]) -> T:
    """Apply the function to each tensor of nested dicts, lists and tuples."""
    made: object = value
    if isinstance(value, Tensor):
        made = function(value)
    elif isinstance(value, Mapping):
        made = {key: map_tensors(one, function) for key, one in value.items()}
    elif isinstance(value, list | tuple):
        made = (list if isinstance(value, list) else tuple)(map_tensors(one, function) for one in value)
    return cast(T, made)


def full_state_dict(value: T) -> T:
    """The state with fsdp's shards gathered, so checkpoints do not depend on the strategy; all ranks must call this."""
    return map_tensors(value, lambda tensor: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)


@torch.no_grad()
def load_full_state_dict(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load full tensors into a module that fsdp may have sharded; all ranks must call this."""
    for name, own in module.state_dict().items():
        own.copy_(_sharded(state[name], own))


def sharded_state_dict(state: Values, optimizer: Optimizer) -> Values:
    """The full state dict of an optimiser, sharded like its parameters."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    moments = {
        place: map_tensors(values, lambda value, own=parameters[place]: _sharded(value, own))
        for place, values in state["state"].items()
    }
    return {**state, "state": moments}


def _sharded(value: Tensor, own: Tensor) -> Tensor:
    """The value, sharded like `own` if `own` is sharded and has its shape."""
    if not isinstance(own, DTensor) or value.shape != own.shape:
        return value
    return distribute_tensor(value.to(own.device), own.device_mesh, own.placements)
