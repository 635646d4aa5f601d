"""A model from a run folder, or from weights to start from, with the mixers that its config swaps in or inserts."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tokenmix.errors import UserError, unknown_name
from tokenmix.lab.registry import get_task
from tokenmix.lab.train.checkpoint import check_weights, put_weights, read_weights
from tokenmix.lab.train.config import SwapConfig, TrainConfig
from tokenmix.lab.train.sources import config_of_source, read_config, read_description
from tokenmix.lab.train.task import TaskModule
from tokenmix.layers.own import checked_own_mixers, own_mixers
from tokenmix.swap import InsertReport, SwapReport, insert, swap_attention
from tokenmix.swap.inserting import INSERTED
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


# Weights to start from may be of any precision.
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass
class ChangedModel:
    """What was swapped and inserted.

    Attributes:
        swapped: names of the layers that were swapped in.
        mixers: those, and the inserted blocks.
        notes: lines for the user.
    """

    swapped: list[str] = field(default_factory=list)
    mixers: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def start_and_swap(task: TaskModule, source: Path | None) -> ChangedModel:
    """Put the weights of `source` into the task's new model, and swap and insert as its config says.

    Weights of a model that was not changed go in before, so that a swap can keep projections; those of a run that was
    changed in the same way go in after it.

    Raises:
        UserError: weights of another model, or of a run with another swap; else as `swap_attention` and `insert`.
    """
    if source is None:
        return swap_mixers(task)
    theirs = config_of_source(source)
    if theirs is None or (theirs.swap.swap is None and theirs.swap.insert is None):
        put_weights(task.model, task.initial_weights(source), source, FLOATS)
        return swap_mixers(task)
    ours = task.config.swap
    if dataclasses.replace(theirs.swap, train_only=ours.train_only) != ours:
        raise UserError(
            f"{source} was trained with {_words(theirs.swap)}; give the same, or start from a run without a swap"
        )
    changed = swap_mixers(task)
    put_weights(task.model, task.initial_weights(source), source, FLOATS)
    return changed


def _words(swap: SwapConfig) -> str:
    words = []
    for part, place in (
        ("swap", f"--swap-where {swap.swap_where!r}"),
        ("insert", f"--insert-after {swap.insert_after!r}"),
    ):
        if (mixer := getattr(swap, part)) is not None:
            kwargs = "".join(f" {name}={value}" for name, value in getattr(swap, f"{part}_kwargs").items())
            words.append(f"--{part} {mixer} {place}{kwargs and f' --{part}-kwargs{kwargs}'}")
    return " ".join([*words, *([f"--swap-drop {swap.swap_drop}"] if swap.swap_drop else [])])


def swap_mixers(task: TaskModule) -> ChangedModel:
    """Swap attention layers of the task's model and insert blocks into it, as its config states."""
    swap, changed = task.config.swap, ChangedModel()
    if swap.swap is None and swap.insert is None:
        return changed
    example = task.swap_example()
    if swap.swap is not None:
        report = swap_attention(
            task.model,
            swap.swap,
            swap.swap_where,
            mixer_kwargs=swap.swap_kwargs,
            example_inputs=example,
            drop=swap.swap_drop,
        )
        changed.swapped = [row.name for row in report.rows]
        changed.mixers += changed.swapped
        changed.notes += _swap_notes(report)
    if swap.insert is not None:
        inserted = insert(
            task.model, swap.insert_after or "", swap.insert, mixer_kwargs=swap.insert_kwargs, example_inputs=example
        )
        changed.mixers += [f"{row.name}.{INSERTED}" for row in inserted.rows]
        changed.notes += _insert_notes(inserted)
    return changed


@torch.no_grad()
def check_own_mixers(task: TaskModule) -> None:
    """Run the task's new model once if it has mixers from outside tokenmix, before anything is written or trained.

    Raises:
        UserError: as `checked_own_mixers`.
    """
    if not own_mixers(task.model) or type(task).example is TaskModule.example:
        return
    with checked_own_mixers(task.model), torch.random.fork_rng(devices=[]):
        task.answering().eval()(*task.example().values())
    task.train()


def _swap_notes(report: SwapReport) -> list[str]:
    kept = ", ".join(report.rows[0].kept) or "none"
    first = f"{report.mixer} in place of {report.rows[0].before} in {_places(report)}; projections kept: {kept}"
    dropped = dict.fromkeys(name for row in report.rows for name in row.dropped)
    lines = [first, *([f"positions dropped: {', '.join(dropped)}"] if dropped else [])]
    return [*lines, *(f"left as it was: {s.name} ({s.kind}): {s.reason}" for s in report.skipped)]


def _insert_notes(report: InsertReport) -> list[str]:
    more = report.parameters_after - report.parameters_before
    first = f"{report.mixer} inserted after {_places(report)}; identity at the start, {more:,} more parameters"
    return [first, *(f"left out: {s.name} ({s.kind}): {s.reason}" for s in report.skipped)]


def _places(report: SwapReport | InsertReport) -> str:
    names = list(dict.fromkeys((report.rows[0].name, report.rows[-1].name)))
    return f"{len(report.rows)} layer{'s' * (len(report.rows) > 1)} ({' to '.join(names)})"


def freeze_all_but(task: TaskModule, layers: list[str]) -> None:
    """Freeze all but these layers of the task's model: their weights, and statistics such as those of BatchNorm.

    Dropout of frozen layers stays on.
    """
    task.model.requires_grad_(False)
    trained = [task.model.get_submodule(name).requires_grad_(True) for name in layers]
    inside, saved = {module for layer in trained for module in layer.modules()}, task.model.state_dict()
    for name, module in task.model.named_modules():
        own = [part for part, buffer in module.named_buffers(prefix=name, recurse=False) if buffer.is_floating_point()]
        if module not in inside and not saved.keys().isdisjoint(own):
            module.training = False
    if not any(p.requires_grad for p in task.model.parameters()):
        mixers = " and ".join(filter(None, (task.config.swap.swap, task.config.swap.insert)))
        raise UserError(
            f"{mixers} has no weights, so there is nothing to train with train_only=mixers; leave --train-only out"
        )
