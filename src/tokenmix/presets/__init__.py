"""Names and sizes of the models, without PyTorch. Importing this registers them."""

from tokenmix.presets import classification, detection, generation, points, segmentation, text

__all__ = ["classification", "detection", "generation", "points", "segmentation", "text"]
