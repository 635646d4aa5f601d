"""What a mixer or model costs as its input grows: parameters, multiply-adds, memory, time, against this machine."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from tokenmix.environment import environment
from tokenmix.errors import UserError
from tokenmix.measure.ceilings import Ceilings, measure_ceilings
from tokenmix.measure.crossover import Crossover, find_crossover, measured_crossover
from tokenmix.measure.foresight import expected_peak, free_memory, too_large
from tokenmix.measure.memory import peak_memory
from tokenmix.measure.other_work import OtherWork
from tokenmix.measure.speed import Timing, time_interleaved
from tokenmix.measure.subject import Measurable, MixerSubject, ModelSubject, Subject, subjects_for

__all__ = ["DTYPES", "CostRow", "CostTable", "Precision", "cost_table", "exponent"]

Precision = Literal["fp32", "bf16", "fp16"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TOKENS = (196, 1024, 4096)
DIM = 256
SECONDS = 20.0
"""About as long is spent on timing one size; two rounds are taken in any case."""


@dataclass(frozen=True)
class CostRow:
    """One mixer or model at one size, for one sample: times in seconds, memory in bytes above weights and input.

    Attributes:
        size: number of tokens, or side of the image in pixels.
        macs: multiply-adds of a forward pass; of models that are not ours counted, else from the equations.
        traffic: the least number of bytes that a forward pass moves: input, weights and output once.
        forward, step, forward_memory, step_memory: None where it was not run.
        skipped: why it was not run, "" if it was.
    """

    name: str
    size: int
    parameters: int | None
    macs: int | None
    traffic: int | None
    forward: Timing | None
    step: Timing | None
    forward_memory: int | None
    step_memory: int | None
    skipped: str = ""

    @property
    def macs_per_second(self) -> float | None:
        """Of the forward pass."""
        return None if self.forward is None or self.macs is None else self.macs / self.forward.median

    @property
    def bytes_per_second(self) -> float | None:
        """Of the forward pass, if it moved its least traffic."""
        return None if self.forward is None or self.traffic is None else self.traffic / self.forward.median


@dataclass(frozen=True)
class CostTable:
    """Costs of several mixers or models; `step` is a pass forward and back.

    Attributes:
        axis: what a row's size is: tokens, or pixels of a side.
        dim: width D of the tokens; None for models.
        device, precision: where, and in what numbers.
        ceilings: what the machine can do at most.
        rows: one row for each name and size.
        exponents: p of seconds ~ N^p for a forward pass over the upper half of the sizes; N is the number of tokens, or
            of pixels of the whole image. None with one size.
        reference: the name that the others are held against: self-attention, or the first model.
        crossovers: where the mixer takes fewer multiply-adds than self-attention; empty for models.
        measured: size at which its forward pass becomes faster or slower than the reference's; None if in no gap.
        warning: that other programs took part of the CPU meanwhile, so that times say little; "" if they did not.
    """

    axis: Literal["tokens", "pixels"]
    dim: int | None
    device: str
    precision: Precision
    ceilings: Ceilings
    rows: tuple[CostRow, ...]
    exponents: Mapping[str, float | None]
    reference: str
    crossovers: Mapping[str, Crossover]
    measured: Mapping[str, int | None]
    warning: str = ""

    @property
    def names(self) -> list[str]:
        """The mixers or models, the reference first."""
        return list(self.exponents)

    def row(self, name: str, size: int) -> CostRow:
        """The row of a name and a size."""
        return next(row for row in self.rows if (row.name, row.size) == (name, size))

    def to_json(self) -> dict[str, Any]:
        """Plain values, with the environment."""
        plain = asdict(self)
        plain["crossovers"] = {name: str(crossover) for name, crossover in self.crossovers.items()}
        for cell, row in zip(plain["rows"], self.rows):
            cell |= {"macs_per_second": row.macs_per_second, "bytes_per_second": row.bytes_per_second}
        return {"schema": 3, **plain, "environment": environment()}


def cost_table(
    names: Sequence[str],
    sizes: Sequence[int] | None = None,
    dim: int | None = None,
    *,
    device: str = "cpu",
    precision: Precision = "fp32",
    repeats: int = 7,
    track: Callable[[Sequence[int]], Iterable[int]] = iter,
    **kwargs: Any,
) -> CostTable:
    """Count and measure mixers at several numbers of tokens beside self-attention, or models at several image sizes.

    Args:
        names: names of `list_mixers()`; or of models, ours or timm's.
        sizes: numbers of tokens N, 196, 1,024 and 4,096 if not given; or sides of the image, the model's own if not.
        dim: width D of the tokens, 256 if not given.
        device: cpu or cuda.
        precision: of weights and input.
        repeats: rounds of timing, fewer where they take long; the names take turns.
        track: the sizes go through it as they are measured, for a progress bar such as `rich.progress.track`.
        **kwargs: arguments for the layers that have them, such as `num_heads`.

    Raises:
        UserError: a name that nothing has, a width or a size below 1, a size that a model does not take, or a device
            that is not there.
    """
    place, dtype = _place(device), DTYPES[precision]
    subjects = subjects_for(names, dim=dim or DIM, device=place, dtype=dtype, kwargs=kwargs)
    models = isinstance(subjects[0], ModelSubject)
    if models and (dim is not None or kwargs):
        raise UserError(f"dim={dim} and the like are of mixers; {subjects[0].name!r} is a model with its own width")
    if dim is not None and dim < 1:
        raise UserError(f"dim must be at least 1, got {dim}")
    sizes = _sizes(sizes, subjects[0])
    others_work = OtherWork()
    ceilings = measure_ceilings(place, dtype)
    by_size = {n: _measure(subjects, n, place, repeats) for n in track(sizes)}
    found = [subject.name for subject in subjects]
    seconds = {name: _seconds({n: by_size[n][name] for n in sizes}) for name in found}
    reference, others = found[0], found[1:]
    return CostTable(
        axis="pixels" if models else "tokens",
        dim=None if models else dim or DIM,
        device=str(place),
        precision=precision,
        ceilings=ceilings,
        rows=tuple(by_size[n][name] for name in found for n in sizes),
        exponents={name: exponent({n**2 if models else n: s for n, s in seconds[name].items()}) for name in found},
        reference=reference,
        crossovers={} if models else {name: find_crossover(name, dim or DIM, **kwargs) for name in others},
        measured={name: _crossing(seconds[name], seconds[reference]) for name in others},
        warning=others_work.told(torch.get_num_threads()) if place.type == "cpu" else "",
    )


def _place(device: str) -> torch.device:
    if device not in ("cpu", "cuda"):
        raise UserError(f"unknown device {device!r}; costs are measured on cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("no CUDA device is available; leave --device cuda out")
    return torch.device(device)


def _sizes(sizes: Sequence[int] | None, subject: MixerSubject | ModelSubject) -> list[int]:
    if sizes is None:
        return list(TOKENS) if isinstance(subject, MixerSubject) else [subject.own_size()]
    if not sizes or min(sizes) < 1:
        raise UserError(f"sizes must be positive numbers, got {list(sizes)}; for example --tokens 196,1024,4096")
    return sorted(set(sizes))


def _seconds(rows: Mapping[int, CostRow]) -> dict[int, float]:
    return {n: row.forward.median for n, row in rows.items() if row.forward is not None}


def _crossing(seconds: Mapping[int, float], reference: Mapping[int, float]) -> int | None:
    both = [n for n in seconds if n in reference]
    return measured_crossover({n: seconds[n] for n in both}, reference)


def _measure(subjects: Sequence[Subject], n: int, device: torch.device, repeats: int) -> dict[str, CostRow]:
    """A row for each; one that the memory does not hold is left out, with the reason in its place."""
    reasons = {subject.name: _reason(subject, n, device) for subject in subjects}
    built = {subject.name: subject.build(n) for subject in subjects if not reasons[subject.name]}
    reasons |= {name: _obstacle(specimen) for name, specimen in built.items() if device.type == "cuda"}
    built = {name: specimen for name, specimen in built.items() if not reasons[name]}
    forward = _time({name: b.forward for name, b in built.items()}, repeats, device)
    step = _time({name: b.step for name, b in built.items()}, repeats, device)
    return {
        name: _row(name, n, built[name], forward[name], step[name], device)
        if name in built
        else CostRow(name, n, None, None, None, None, None, None, None, why)
        for name, why in reasons.items()
    }


def _reason(subject: Subject, n: int, device: torch.device) -> str:
    """On the CPU a process that takes too much is killed, so this is known before."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # What PyTorch keeps of earlier sizes is free as well.
    free = free_memory() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    return too_large(expected_peak(subject.foresee(n, "step")), free)


def _obstacle(built: Measurable) -> str:
    """Kernels can take more than was foreseen, which on a GPU is an error that costs no more than this size."""
    try:
        built.step()
    except torch.OutOfMemoryError:
        return "took more memory than the device has"
    return ""


def _time(functions: Mapping[str, Any], repeats: int, device: torch.device) -> dict[str, Timing]:
    first = time_interleaved(functions, repeats=1, warmup=1, device=device)
    rounds = int(SECONDS / 2 / max(1e-9, sum(timing.median for timing in first.values())))
    return time_interleaved(functions, repeats=max(min(2, repeats), min(repeats, rounds)), warmup=0, device=device)


def _row(name: str, n: int, built: Measurable, forward: Timing, step: Timing, device: torch.device) -> CostRow:
    return CostRow(
        name=name,
        size=n,
        parameters=built.parameters(),
        macs=built.macs(),
        traffic=built.traffic(),
        forward=forward,
        step=step,
        forward_memory=peak_memory(built.forward, device),
        step_memory=peak_memory(built.step, device),
    )


def exponent(seconds: Mapping[int, float]) -> float | None:
    """p of seconds ~ N^p by least squares on logarithms over the upper half of the sizes (two at least)."""
    upper = sorted(seconds)[-max(2, (len(seconds) + 1) // 2) :]
    if len(upper) < 2:
        return None
    xs, ys = [math.log(n) for n in upper], [math.log(seconds[n]) for n in upper]
    x_mean, y_mean = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys)) / sum((x - x_mean) ** 2 for x in xs)
