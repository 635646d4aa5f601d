"""Costs of mechanisms: parameters, multiply-adds, memory and speed compared with self-attention as N grows."""

from tokenmix.cost.cost import CostRow, CostTable, cost_table
from tokenmix.cost.crossover import Crossover, find_crossover
from tokenmix.cost.memory import peak_memory
from tokenmix.cost.speed import Timing, time_interleaved

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
