"""Object detection: torchvision's detectors over our backbones."""

from tokenmix.errors import needs

with needs("tokenmix.models.detection"):
    from tokenmix.models.detection.backbones import LaViTBackbone, ResNetBackbone
    from tokenmix.models.detection.detector import Detector

__all__ = ["Detector", "LaViTBackbone", "ResNetBackbone"]
