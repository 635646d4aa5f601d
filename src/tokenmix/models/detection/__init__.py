"""Networks that find objects: torchvision's detectors over backbones of ours."""

from tokenmix.models.detection.bodies import LaViTBody, ResNetBody
from tokenmix.models.detection.detector import Detector
from tokenmix.models.detection.presets import create_detector, list_detectors

__all__ = ["Detector", "LaViTBody", "ResNetBody", "create_detector", "list_detectors"]
