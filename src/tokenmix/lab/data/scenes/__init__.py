"""Reading scenes: images with a class for each pixel, with boxes, or with a mask for each object."""

from tokenmix.lab.data.scenes.samples import (
    ObjectAugment,
    ObjectSamples,
    PixelAugment,
    PixelSamples,
    SceneSamples,
    scale_steps,
)
from tokenmix.lab.data.scenes.scenes import (
    Objects,
    Scene,
    SceneData,
    Scenes,
    Want,
    load_scenes,
    repeated,
)

__all__ = [
    "ObjectAugment",
    "ObjectSamples",
    "Objects",
    "PixelAugment",
    "PixelSamples",
    "Scene",
    "SceneData",
    "SceneSamples",
    "Scenes",
    "Want",
    "load_scenes",
    "repeated",
    "scale_steps",
]
