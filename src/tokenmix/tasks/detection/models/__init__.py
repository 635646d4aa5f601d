"""Networks that find objects: torchvision's detectors over backbones of ours."""

from tokenmix.errors import needs

with needs("tokenmix.tasks.detection.models"):
    from tokenmix.tasks.detection.models.backbones import LaViTBackbone, ResNetBackbone
    from tokenmix.tasks.detection.models.detector import Detector

__all__ = ["Detector", "LaViTBackbone", "ResNetBackbone"]
