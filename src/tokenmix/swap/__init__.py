"""Put mixers into models: replace attention (swap), or add blocks after any module (insert)."""

from tokenmix.swap.adapter import Affine, AttentionAdapter, AttentionLayout, AttentionWeights, ObservedCall, SwapError
from tokenmix.swap.inserting import InsertedBlock, InsertReport, InsertRow, insert, remove_inserted
from tokenmix.swap.registry import register_adapter
from tokenmix.swap.report import SkippedAttention, SwapReport, SwapRow
from tokenmix.swap.swap import set_input_size, swap_attention

__all__ = [
    "Affine",
    "AttentionAdapter",
    "AttentionLayout",
    "AttentionWeights",
    "InsertReport",
    "InsertRow",
    "InsertedBlock",
    "ObservedCall",
    "SkippedAttention",
    "SwapError",
    "SwapReport",
    "SwapRow",
    "insert",
    "register_adapter",
    "remove_inserted",
    "set_input_size",
    "swap_attention",
]
