"""What each variant of a comparison costs: counted, timed in turns with the others, watched by the allocator."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from tokenmix.lab.compare.results import Growth, Variant
from tokenmix.lab.train.config import TrainConfig
from tokenmix.lab.train.optimizer import make_optimizer
from tokenmix.lab.train.task import TaskModule
from tokenmix.layers.base import count_parameters
from tokenmix.layers.table import get_spec
from tokenmix.profiling.crossover import find_crossover
from tokenmix.profiling.memory import peak_memory
from tokenmix.profiling.speed import Timing, time_interleaved
from tokenmix.profiling.target import mixer_with_input

SECONDS = 4.0
"""About as long is spent on each of the two timings."""
TOKENS = (64, 256, 1024, 4096)
"""Numbers of tokens at which layers are measured: 64 is a small image, 4,096 one of 1,024 pixels in patches of 16."""


class _Bench:
    """One variant with a batch and an optimiser of its own."""

    def __init__(
        self, module: TaskModule, batch: Mapping[str, Tensor], config: TrainConfig, device: torch.device
    ) -> None:
        dtype = torch.bfloat16 if config.loop.precision == "bf16" else None
        self.module, self.config, self.device = module.to(device, dtype), config, device
        self.batch = {
            name: value.to(device, dtype if value.is_floating_point() else None) for name, value in batch.items()
        }
        self.optimizer = make_optimizer(self.module.parameter_groups(), config.optim)

    def _autocast(self) -> AbstractContextManager[Any]:
        mixed = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(self.config.loop.precision)
        return nullcontext() if mixed is None else torch.autocast(self.device.type, mixed)

    @torch.no_grad()
    def forward(self, images: Tensor) -> None:
        with self._autocast():
            self.module.model(images)

    def step(self) -> None:
        with self._autocast():
            loss, _ = self.module.loss(self.batch)
        loss.backward()
        if self.config.optim.clip_grad is not None:
            nn.utils.clip_grad_norm_(self.module.model.parameters(), self.config.optim.clip_grad)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def measure_variants(
    variants: Mapping[str, TaskModule], batch: Mapping[str, Tensor], config: TrainConfig, device: torch.device
) -> list[Variant]:
    """Count and measure new variants, which have no runs yet, on one training batch; their weights change.

    Args:
        variants: a task module for each mixer.
        batch: `image` (B, C, H, W) and what else the task's loss takes.
        config: optimiser, precision and clipping.
        device: where to measure.
    """
    benches = {name: _Bench(module, batch, config, device) for name, module in variants.items()}
    for bench in benches.values():
        bench.module.eval()
    one = {name: lambda b=b: b.forward(b.batch["image"][:1]) for name, b in benches.items()}
    latency = _time(one, device)
    inference = {name: _peak(lambda b=b: b.forward(b.batch["image"]), device) for name, b in benches.items()}
    for bench in benches.values():
        bench.module.train()
    step = _time({name: bench.step for name, bench in benches.items()}, device)
    memory = {name: _peak(bench.step, device) for name, bench in benches.items()}
    growth = _measure_growth({name: module.model for name, module in variants.items()}, device)
    return [
        Variant(
            mixer=name,
            about=get_spec(name).about,
            **_counts(name, module.model),
            latency=latency[name],
            step=step[name],
            step_memory=memory[name],
            inference_memory=inference[name],
            growth=growth[name],
        )
        for name, module in variants.items()
    ]


def measure_steps(
    variants: Mapping[str, TaskModule], batch: Mapping[str, Tensor], config: TrainConfig, device: torch.device
) -> dict[str, float]:
    """Median seconds of a training step of each variant, from five rounds; their weights change."""
    benches = {name: _Bench(module.train(), batch, config, device) for name, module in variants.items()}
    steps = {name: bench.step for name, bench in benches.items()}
    return {name: t.median for name, t in time_interleaved(steps, repeats=5, warmup=1, device=device).items()}


def _measure_growth(variants: Mapping[str, nn.Module], device: torch.device) -> dict[str, Growth]:
    """One layer of each variant, of its width and heads, over numbers of tokens."""
    layers = {name: model.blocks[-1].mixer for name, model in variants.items()}  # type: ignore[index, union-attr]
    first: Any = next(iter(layers.values()))
    heads = {n for layer in layers.values() if (n := getattr(layer, "num_heads", None))}
    kwargs: dict[str, Any] = {"num_heads": heads.pop()} if len(heads) == 1 else {}
    found = {name: Growth() for name in layers}
    for n in TOKENS:
        calls = {
            name: mixer_with_input(name, first.dim, n, device=device, dtype=torch.float32, **kwargs).forward
            for name in layers
        }
        timings = time_interleaved(calls, repeats=5, warmup=1, device=device)
        for name, call in calls.items():
            found[name].tokens.append(n)
            found[name].seconds.append(timings[name].median)
            found[name].memory.append(_peak(call, device) or 0)
    return found


def _time(functions: Mapping[str, Any], device: torch.device) -> dict[str, Timing]:
    """As many rounds as the time allows, five at least."""
    first = time_interleaved(functions, repeats=1, warmup=1, device=device)
    rounds = int(SECONDS / max(1e-6, sum(timing.median for timing in first.values())))
    return time_interleaved(functions, repeats=min(101, max(5, rounds)), warmup=1, device=device)


def _peak(fn: Any, device: torch.device) -> int | None:
    return peak_memory(fn, device) if device.type in ("cpu", "cuda") else None


def _counts(name: str, model: Any) -> dict[str, Any]:
    """Of the network and of its mixers alone, for one image; and where the mixer is cheaper than self-attention."""
    mixers = [block.mixer for block in model.blocks]
    heads = getattr(mixers[-1], "num_heads", None)
    return {
        "parameters": count_parameters(model),
        "macs": model.macs(),
        "mixer_parameters": sum(map(count_parameters, mixers)),
        "mixer_macs": sum(mixer.macs(model.num_tokens) for mixer in mixers),
        "crossover": None if name == "self" else str(find_crossover(name, mixers[-1].dim, num_heads=heads)),
    }
