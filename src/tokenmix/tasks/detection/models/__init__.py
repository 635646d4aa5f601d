"""Networks that find objects: torchvision's detectors over backbones of ours."""

from tokenmix.tasks.detection.models.bodies import LaViTBody, ResNetBody
from tokenmix.tasks.detection.models.detector import Detector
from tokenmix.tasks.detection.models.presets import create_detector, list_detectors

__all__ = ["Detector", "LaViTBody", "ResNetBody", "create_detector", "list_detectors"]
