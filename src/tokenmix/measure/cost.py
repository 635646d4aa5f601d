"""What a mixer costs as the number of tokens grows: parameters, multiply-adds, memory, time."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from tokenmix.environment import environment
from tokenmix.errors import UserError
from tokenmix.layers.table import get_spec
from tokenmix.measure.crossover import Crossover, find_crossover, measured_crossover
from tokenmix.measure.memory import peak_memory
from tokenmix.measure.specimen import Specimen, make_specimen
from tokenmix.measure.speed import Timing, time_interleaved
from tokenmix.measure.units import count, milliseconds, size

__all__ = ["CostRow", "CostTable", "cost_table", "exponent", "run"]


@dataclass(frozen=True)
class CostRow:
    """One mixer at one N, for one sample: times in seconds, memory in bytes above weights and input."""

    mixer: str
    num_tokens: int
    parameters: int
    macs: int
    forward: Timing
    step: Timing
    forward_memory: int
    step_memory: int


@dataclass(frozen=True)
class CostTable:
    """Costs of several mixers; `step` is a pass forward and back.

    Attributes:
        dim: width D of the tokens.
        rows: one row for each mixer and N.
        exponents: p of seconds ~ N^p for a forward pass, over the upper half of the sizes; None with one size.
        crossovers: where the mixer takes fewer multiply-adds than self-attention.
        measured: N at which its forward pass becomes faster or slower than self-attention's; None if not in the sizes.
    """

    dim: int
    rows: tuple[CostRow, ...]
    exponents: Mapping[str, float | None]
    crossovers: Mapping[str, Crossover]
    measured: Mapping[str, int | None]

    def to_json(self) -> dict[str, Any]:
        """Plain values, with the environment."""
        plain = asdict(self)
        plain["crossovers"] = {name: str(crossover) for name, crossover in self.crossovers.items()}
        return {"schema": 1, **plain, "environment": environment()}

    def __rich__(self) -> Table:
        told = f"one sample of N tokens of width {self.dim}, float32; step = forward and backward"
        table = Table(title=told, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("mixer", no_wrap=True)
        for heading in ("N", "params", "MACs", "fwd ms", "step ms", "fwd mem.", "step mem."):
            table.add_column(heading, justify="right", no_wrap=True)
        for i, row in enumerate(self.rows):
            last = i + 1 == len(self.rows) or self.rows[i + 1].mixer != row.mixer
            table.add_row(row.mixer, *_cells(row), end_section=last)
        return table


def _cells(row: CostRow) -> tuple[str, ...]:
    times = milliseconds(row.forward.median), milliseconds(row.step.median)
    memory = size(row.forward_memory), size(row.step_memory)
    return f"{row.num_tokens:,}", count(row.parameters), count(row.macs), *times, *memory


def cost_table(
    names: Sequence[str], tokens: Sequence[int], dim: int = 256, *, repeats: int = 7, **kwargs: Any
) -> CostTable:
    """Count and measure mixers at several numbers of tokens, always beside self-attention.

    Args:
        names: names of `list_mixers()`.
        tokens: numbers of tokens N.
        dim: width D.
        repeats: rounds of timing; the mixers take turns.
        **kwargs: arguments for the layers that have them, such as `num_heads`.

    Raises:
        UserError: a name that is not in the table, or an N below 1.
    """
    for name in names:
        get_spec(name)
    if not tokens or min(tokens) < 1:
        raise UserError(f"tokens must be positive numbers, got {list(tokens)}; for example --tokens 196,1024,4096")
    mixers = list(dict.fromkeys(["self", *names]))
    sizes = sorted(set(tokens))
    by_size = {n: _measure(mixers, n, dim, repeats, kwargs) for n in sizes}
    seconds = {name: {n: by_size[n][name].forward.median for n in sizes} for name in mixers}
    others = mixers[1:]
    return CostTable(
        dim=dim,
        rows=tuple(by_size[n][name] for name in mixers for n in sizes),
        exponents={name: exponent(seconds[name]) for name in mixers},
        crossovers={name: find_crossover(name, dim, **kwargs) for name in others},
        measured={name: measured_crossover(seconds[name], seconds["self"]) for name in others},
    )


def _measure(mixers: Sequence[str], n: int, dim: int, repeats: int, kwargs: Mapping[str, Any]) -> dict[str, CostRow]:
    specimens = {name: make_specimen(name, dim, n, **kwargs) for name in mixers}
    forward = time_interleaved({name: s.forward for name, s in specimens.items()}, repeats=repeats)
    step = time_interleaved({name: s.step for name, s in specimens.items()}, repeats=repeats, warmup=1)
    return {name: _row(name, n, s, forward[name], step[name]) for name, s in specimens.items()}


def _row(name: str, n: int, specimen: Specimen, forward: Timing, step: Timing) -> CostRow:
    return CostRow(
        mixer=name,
        num_tokens=n,
        parameters=sum(p.numel() for p in specimen.layer.parameters()),
        macs=specimen.layer.macs(n),
        forward=forward,
        step=step,
        forward_memory=peak_memory(specimen.forward),
        step_memory=peak_memory(specimen.step),
    )


def exponent(seconds: Mapping[int, float]) -> float | None:
    """p of seconds ~ N^p by least squares on logarithms over the upper half of the sizes (two at least)."""
    upper = sorted(seconds)[-max(2, (len(seconds) + 1) // 2) :]
    if len(upper) < 2:
        return None
    xs, ys = [math.log(n) for n in upper], [math.log(seconds[n]) for n in upper]
    x_mean, y_mean = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys)) / sum((x - x_mean) ** 2 for x in xs)


def run(names: Sequence[str], tokens: Sequence[int], dim: int = 256, *, as_json: bool = False) -> int:
    """`tokenmix cost`: print the table, or JSON; returns the exit code."""
    table = cost_table(names, tokens, dim)
    if as_json:
        print(json.dumps(table.to_json(), indent=2))
        return 0
    console = Console()
    console.print(table)
    for name, power in table.exponents.items():
        console.print(_sentence(table, name, power), highlight=False)
    return 0


def _sentence(table: CostTable, name: str, power: float | None) -> str:
    parts = [] if power is None else [f"time grows as N^{power:.2f} over the upper sizes"]
    if name in table.crossovers:
        parts.append(f"fewer MACs than self-attention: {table.crossovers[name]}")
        parts.append(_measured_sentence(table, name))
    return f"{name}: {'; '.join(parts)}" if parts else name


def _measured_sentence(table: CostTable, name: str) -> str:
    crossing = table.measured[name]
    if crossing is not None:
        return f"forward times cross near N = {crossing:,}"
    mine, reference = (next(row for row in table.rows if row.mixer == mixer) for mixer in (name, "self"))
    return f"{'faster' if mine.forward.median < reference.forward.median else 'slower'} at all of these sizes"
