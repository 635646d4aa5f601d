"""Costs of the variants of a comparison: counted, timed in turns, and with peak memory."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from tokenmix.errors import UserError, as_user_error
from tokenmix.files import Values
from tokenmix.lab.compare.results import Growth, Variant
from tokenmix.lab.train.config import TrainConfig
from tokenmix.lab.train.plan import batch_norm_errors, make_optimizer
from tokenmix.lab.train.programs import Batch
from tokenmix.lab.train.task import TaskModule, input_sizes
from tokenmix.lab.train.trainer import Engine
from tokenmix.layers.base import Mixer, outer_mixers
from tokenmix.layers.table import get_spec, is_mixer
from tokenmix.profiling.cost import find_crossover
from tokenmix.profiling.machine import Timing, peak_memory, time_interleaved
from tokenmix.profiling.target import layer_for, mixer_with_input
from tokenmix.swap.probe import model_macs

SECONDS = 4.0
"""Approximate seconds for each of the two timings."""
TOKENS = (64, 256, 1024, 4096)
"""Numbers of tokens for measuring layers: 64 is a small image, 4,096 an image of 1,024 pixels in patches of 16."""


class _Bench:
    """A variant in the engine that trains it, with a training batch and one sample."""

    def __init__(self, task: TaskModule, batch: Batch, config: TrainConfig, device: torch.device) -> None:
        self.task, self.clip_grad = task, config.optim.clip_grad
        self.engine = Engine(config.replace(device=device.type), task)
        self.batch, self.sample = self.engine.move(batch), self.engine.move(one_sample(task))
        self.optimizer = make_optimizer(task.parameter_groups(), config.optim)

    @torch.no_grad()
    def forward(self) -> None:
        with self.engine.computing():
            self.task.model(*self.sample)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> None:
        self.task.on_validation_epoch_start()
        with self.engine.computing():
            self.task.validation_step(batch, 0)

    def step(self) -> None:
        self.engine.train(self.batch, 0)
        self.engine.step(self.optimizer, self.clip_grad)


def _step(name: str, bench: _Bench) -> None:
    """A training step, the first of a user's own mixer."""
    with as_user_error(f"{name} fails in a training step: ", "; correct it, or leave it out"), batch_norm_errors():
        bench.step()


def one_sample(task: TaskModule) -> tuple[object, ...]:
    """Forward arguments of the task's model for one sample; `UserError` for a task without an example."""
    return task.swap_example() or tuple(given[:1] for given in task.example().values())


def measure_variants(
    variants: Mapping[str, TaskModule], batch: Batch, test: Batch, config: TrainConfig, device: torch.device
) -> tuple[list[Variant], dict[str, float]]:
    """Count and measure new variants, changing their weights; also return the seconds of each to evaluate `test`."""
    macs, inserting = {}, any(task.config.swap.insert for task in variants.values())
    for name, task in variants.items():
        # From the model's own equations, else counted in a forward pass of one sample. Equations omit inserted blocks.
        # A detector finds no boxes on the meta device.
        count: Any = getattr(task.model, "counted_macs", None) if inserting else task.macs
        own = None if count is None else count()
        macs[name] = own or model_macs(task.model, one_sample(task), torch.device("cpu"))
    benches = {name: _Bench(module, batch, config, device) for name, module in variants.items()}
    for bench in benches.values():
        bench.task.eval()
    latency = _time({name: bench.forward for name, bench in benches.items()}, device)
    inference = {name: _peak(bench.forward, device) for name, bench in benches.items()}
    tests = {name: partial(bench.evaluate, bench.engine.move(test)) for name, bench in benches.items()}
    evaluated = time_interleaved(tests, repeats=1, warmup=1, device=device)
    for bench in benches.values():
        bench.task.train()
    steps = {name: partial(_step, name, bench) for name, bench in benches.items()}
    step = _time(steps, device)
    memory = {name: _peak(call, device) for name, call in steps.items()}
    layers = _measure_layers(variants, device)
    measured = [
        Variant(
            name=name,
            about=get_spec(name).about if is_mixer(name) else "",
            latency=latency[name],
            step=step[name],
            step_memory=memory[name],
            inference_memory=inference[name],
            parameters=variants[name].num_parameters(),
            macs=macs[name],
            **layers.get(name, {}),
        )
        for name in variants
    ]
    return measured, {name: timing.median for name, timing in evaluated.items()}


def skeleton_of(variants: Mapping[str, TaskModule]) -> Values:
    """Description of the common network: tokens, width, depth, and for images the image and patch sizes."""
    task = next(iter(variants.values()))
    model: Any = task.model
    found = input_sizes(model, task.data.get("img_size"))
    widths = [mixer.dim for one in variants.values() for mixer in outer_mixers(one.model).values()]
    found |= {"dim": widths[-1]} if widths else {}
    found |= {"depth": len(model.blocks)} if hasattr(model, "blocks") else {}
    tokens = found.get("num_tokens") or task.data.get("seq_len")
    return found | ({"num_tokens": tokens} if tokens else {})


def _measure_layers(variants: Mapping[str, TaskModule], device: torch.device) -> dict[str, Values]:
    """Multiply-adds, crossover and growth of each variant's layer; none for an unknown mixer or model width."""
    names = [name for name in variants if is_mixer(name)]
    sizes = skeleton_of(variants)
    modules = [module for task in variants.values() for module in task.model.modules() if isinstance(module, Mixer)]
    width, tokens = sizes.get("dim"), sizes.get("num_tokens")
    if width is None:
        return {}
    heads = {n for module in modules if module.dim == width and (n := getattr(module, "num_heads", None))}
    kwargs: Values = {"num_heads": heads.pop()} if len(heads) == 1 else {}
    found: dict[str, Values] = {}
    for name in names:
        try:
            macs = layer_for(name, width, tokens, **kwargs).macs(tokens) if isinstance(tokens, int) else None
            crossover = None if name == "self" else str(find_crossover(name, width, **kwargs))
        except UserError:
            continue  # A user's layer that needs more than a width and a number of tokens.
        found[name] = {"layer_macs": macs, "crossover": crossover, "growth": Growth()}
    for n in TOKENS if found else ():
        calls = {
            name: mixer_with_input(name, width, n, device=device, dtype=torch.float32, **kwargs).forward
            for name in found
        }
        timings = time_interleaved(calls, repeats=5, warmup=1, device=device)
        for name, call in calls.items():
            growth = found[name]["growth"]
            growth.tokens.append(n)
            growth.seconds.append(timings[name].median)
            growth.memory.append(_peak(call, device) or 0)
    return found


def _time(functions: Mapping[str, Callable[[], None]], device: torch.device) -> dict[str, Timing]:
    """Time as many rounds as the budget allows, at least five."""
    first = time_interleaved(functions, repeats=1, warmup=1, device=device)
    rounds = int(SECONDS / max(1e-6, sum(timing.median for timing in first.values())))
    return time_interleaved(functions, repeats=min(101, max(5, rounds)), warmup=1, device=device)


def _peak(fn: Callable[[], object], device: torch.device) -> int | None:
    return peak_memory(fn, device) if device.type in ("cpu", "cuda") else None
