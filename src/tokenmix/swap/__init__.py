"""Swap the attention of timm's, torchvision's, transformers' and other models for another mixer."""

from tokenmix.swap.report import SkippedAttention, SwapReport, SwapRow
from tokenmix.swap.swap import swap_attention

__all__ = ["SkippedAttention", "SwapReport", "SwapRow", "swap_attention"]
