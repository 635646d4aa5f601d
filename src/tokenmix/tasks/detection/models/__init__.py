"""Networks that find objects: torchvision's detectors over backbones of ours."""

from tokenmix.tasks.detection.models.bodies import LaViTBody, ResNetBody
from tokenmix.tasks.detection.models.detector import Detector

__all__ = ["Detector", "LaViTBody", "ResNetBody"]
