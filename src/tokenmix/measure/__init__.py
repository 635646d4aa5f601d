"""Measuring: peak memory, speed, cost, and comparisons at equal budget (`tokenmix.measure.compare`).

Names are fetched when first used: the trainer measures memory, and must not load the comparison that is built on it.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenmix.measure.cost import CostRow, CostTable, cost_table
    from tokenmix.measure.crossover import Crossover, find_crossover
    from tokenmix.measure.memory import peak_memory
    from tokenmix.measure.report import write_report
    from tokenmix.measure.speed import Timing, time_interleaved

_HOME = {
    "CostRow": "cost",
    "CostTable": "cost",
    "Crossover": "crossover",
    "Timing": "speed",
    "cost_table": "cost",
    "find_crossover": "crossover",
    "peak_memory": "memory",
    "time_interleaved": "speed",
    "write_report": "report",
}

__all__ = [
    "CostRow",
    "CostTable",
    "Crossover",
    "Timing",
    "cost_table",
    "find_crossover",
    "peak_memory",
    "time_interleaved",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
