"""Another mixer in the place of the attention of timm's, torchvision's, transformers' and anybody's models."""

from tokenmix.swap.report import Skipped, SwapReport, SwapRow
from tokenmix.swap.swapping import swap_attention

__all__ = ["Skipped", "SwapReport", "SwapRow", "swap_attention"]
