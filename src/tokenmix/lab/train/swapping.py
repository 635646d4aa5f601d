"""Weights to start from and mixers that are swapped in, as a run's config states them; mixers of the user's own."""

import dataclasses
from pathlib import Path

import torch

from tokenmix.errors import UserError
from tokenmix.lab.train.checkpoint import put_weights
from tokenmix.lab.train.config import SwapConfig
from tokenmix.lab.train.sources import config_of_source
from tokenmix.lab.train.task import TaskModule
from tokenmix.layers.own import checked_own_mixers, own_mixers
from tokenmix.swap import SwapReport, swap_attention

# Weights to start from may be of any precision.
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def start_and_swap(task: TaskModule, source: Path | None) -> SwapReport | None:
    """Put the weights of `source` into the task's new model, and swap as its config says.

    Weights of a model that was not swapped go in before the swap, so that it can keep projections; those of a run that
    was swapped in the same way go in after it.

    Raises:
        UserError: weights of another model, or of a run with another swap; else as `swap_attention`.
    """
    if source is None:
        return swap_mixers(task)
    theirs = config_of_source(source)
    if theirs is None or theirs.swap.swap is None:
        put_weights(task.model, task.initial_weights(source), source, FLOATS)
        return swap_mixers(task)
    ours = task.config.swap
    if dataclasses.replace(theirs.swap, train_only=ours.train_only) != ours:
        raise UserError(
            f"{source} was trained with {_words(theirs.swap)}; give the same, or start from a run without a swap"
        )
    report = swap_mixers(task)
    put_weights(task.model, task.initial_weights(source), source, FLOATS)
    return report


def _words(swap: SwapConfig) -> str:
    kwargs = "".join(f" {name}={value}" for name, value in swap.swap_kwargs.items())
    return f"--swap {swap.swap} --swap-where {swap.swap_where!r}{kwargs and f' --swap-kwargs{kwargs}'}"


def swap_mixers(task: TaskModule) -> SwapReport | None:
    """Swap attention layers of the task's model as its config states; None if there is no swap."""
    swap = task.config.swap
    if swap.swap is None:
        return None
    return swap_attention(
        task.model, swap.swap, swap.swap_where, mixer_kwargs=swap.swap_kwargs, example_inputs=task.swap_example()
    )


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


def swap_notes(report: SwapReport | None) -> list[str]:
    """What was swapped, and what was matched and left as it was, in lines."""
    if report is None:
        return []
    names = list(dict.fromkeys((report.rows[0].name, report.rows[-1].name)))
    count = f"{len(report.rows)} layer{'s' * (len(report.rows) > 1)} ({' to '.join(names)})"
    kept = ", ".join(report.rows[0].kept) or "none"
    first = f"{report.mixer} in place of {report.rows[0].before} in {count}; projections kept: {kept}"
    return [first, *(f"left as it was: {s.name} ({s.kind}): {s.reason}" for s in report.skipped)]


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
        raise UserError(f"{task.config.swap.swap} has no weights, so there is nothing to train with train_only=mixers")
