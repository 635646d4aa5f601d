"""Weights and optimiser states that fsdp has cut into parts, as checkpoints hold them: whole.

So a run's checkpoints are the same whatever its strategy.
"""

from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

__all__ = ["divided", "whole"]


def whole(value: Any) -> Any:
    """The value with every tensor of which this process has a part put together; all processes must call it."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, dict):
        return {key: whole(one) for key, one in value.items()}
    if isinstance(value, list):
        return [whole(one) for one in value]
    return value


def divided(state: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """A whole state dict of an optimiser, cut as the optimiser's own parameters are."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    moments = {place: dict(values) for place, values in state["state"].items()}
    for place, values in moments.items():
        parameter = parameters[place]
        if not isinstance(parameter, DTensor):
            continue
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                values[name] = distribute_tensor(
                    value.to(parameter.device), parameter.device_mesh, parameter.placements
                )
    return {**state, "state": moments}
