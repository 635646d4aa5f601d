"""Networks that give each pixel a class: a dilated backbone with a block of attention, or a feature pyramid."""

from tokenmix.errors import needs

with needs("tokenmix.models.segmentation"):
    from tokenmix.models.segmentation.base import Segmenter
    from tokenmix.models.segmentation.eanet import EANetSegmenter
    from tokenmix.models.segmentation.fpn import FPNSegmenter

__all__ = [
    "EANetSegmenter",
    "FPNSegmenter",
    "Segmenter",
]
