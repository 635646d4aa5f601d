"""Put mixers into models: in place of their attention (swap), or after any module (insert)."""

from tokenmix.swap.insert import InsertedBlock, InsertReport, InsertRow, insert, remove_inserted
from tokenmix.swap.report import SkippedAttention, SwapReport, SwapRow
from tokenmix.swap.swap import swap_attention

__all__ = [
    "InsertReport",
    "InsertRow",
    "InsertedBlock",
    "SkippedAttention",
    "SwapReport",
    "SwapRow",
    "insert",
    "remove_inserted",
    "swap_attention",
]
