"""Networks that give each pixel a class: a dilated backbone with a block of attention, or a feature pyramid."""

from tokenmix.models.segmentation.base import Segmenter
from tokenmix.models.segmentation.blocks import SelfAttention2d
from tokenmix.models.segmentation.eanet import EANetSegmenter
from tokenmix.models.segmentation.fpn import FPNSegmenter
from tokenmix.models.segmentation.presets import create_segmenter, list_segmenters

__all__ = [
    "EANetSegmenter",
    "FPNSegmenter",
    "Segmenter",
    "SelfAttention2d",
    "create_segmenter",
    "list_segmenters",
]
