"""Networks that give each pixel a class: a dilated backbone with a block of attention, or a feature pyramid."""

from tokenmix.errors import needs

with needs("tokenmix.tasks.segmentation.models"):
    from tokenmix.tasks.segmentation.models.base import Segmenter
    from tokenmix.tasks.segmentation.models.eanet import EANetSegmenter
    from tokenmix.tasks.segmentation.models.fpn import FPNSegmenter

__all__ = [
    "EANetSegmenter",
    "FPNSegmenter",
    "Segmenter",
]
