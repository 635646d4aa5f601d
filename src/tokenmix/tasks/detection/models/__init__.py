"""Networks that find objects: torchvision's detectors over backbones of ours."""

from tokenmix.tasks.detection.models.backbones import LaViTBackbone, ResNetBackbone
from tokenmix.tasks.detection.models.detector import Detector

__all__ = ["Detector", "LaViTBackbone", "ResNetBackbone"]
