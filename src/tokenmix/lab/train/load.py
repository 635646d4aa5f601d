"""A finished run's model, from only its folder."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tokenmix.errors import UserError, unknown_name
from tokenmix.lab.registry import get_task
from tokenmix.lab.train.checkpoint import check_weights, put_weights, read_weights
from tokenmix.lab.train.config import TrainConfig
from tokenmix.lab.train.sources import read_config, read_description
from tokenmix.lab.train.swapping import swap_mixers
from tokenmix.lab.train.task import TaskModule
from tokenmix.trust import from_caller

LARGE = 1024
"""Pixels of an image's side up to which a model is built before its weights are looked at."""


def load_run(run: Path) -> tuple[nn.Module, TrainConfig, dict[str, Any]]:
    """Load a run folder: the model with its weights, the config and the description of the data."""
    task, config, description = load_task(run)
    return task.model, config, description


@from_caller
def load_task(run: Path, options: Mapping[str, Any] | None = None) -> tuple[TaskModule, TrainConfig, dict[str, Any]]:
    """`load_run` with the task around the model; `options` are as in `evaluate`."""
    config, description = read_config(run), read_description(run)
    for name in options or {}:
        if name not in (known := [field.name for field in dataclasses.fields(config.options.evaluation)]):
            raise unknown_name(f"option of evaluating a run of {config.task}", name, known)
    config = config.replace(**(options or {}))
    weights = run / "model.safetensors"
    if not weights.exists():
        raise UserError(f"{run} has not finished its first epoch; continue with: tokenmix train --resume {run}")
    kind = get_task(config.task)
    stored = None
    changed = config.swap.swap is not None or config.swap.insert is not None
    if max(description.get("img_size") or [0]) > LARGE and not changed:
        # A model with a weight for each token of such images may not fit into memory.
        with torch.device("meta"):
            shapes = kind.model_from_config(config, description)
        stored = read_weights(run)
        check_weights(shapes, stored, weights, stored_types(config))
    task = kind(kind.model_from_config(config, description), config, description)
    swap_mixers(task)
    # Read after the model is built, whose mistakes come first.
    put_weights(task.model, read_weights(run) if stored is None else stored, weights, stored_types(config))
    return task.eval(), config, description


def stored_types(config: TrainConfig) -> tuple[torch.dtype, ...]:
    """Types other than the model's own that the weights in a run folder have."""
    return (torch.bfloat16,) if config.loop.precision == "bf16" else ()
