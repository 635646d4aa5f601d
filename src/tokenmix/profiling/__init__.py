"""Cost of mechanisms: parameters, multiply-adds, memory and speed compared with self-attention as N grows."""

from tokenmix.profiling.cost import cost_table, find_crossover
from tokenmix.profiling.machine import Timing, peak_memory, time_interleaved
from tokenmix.profiling.table import CostRow, CostTable, Crossover

__all__ = [
    "CostRow",
    "CostTable",
    "Crossover",
    "Timing",
    "cost_table",
    "find_crossover",
    "peak_memory",
    "time_interleaved",
]
