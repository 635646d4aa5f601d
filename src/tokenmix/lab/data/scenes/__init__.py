"""Reading scenes: images with a class for each pixel, with boxes, or with a mask for each object."""

from tokenmix.lab.data.scenes.scenes import (
    Objects,
    ObjectSamples,
    PixelSamples,
    Scene,
    SceneAugment,
    SceneData,
    Scenes,
    load_scenes,
    repeated,
)

__all__ = [
    "ObjectSamples",
    "Objects",
    "PixelSamples",
    "Scene",
    "SceneAugment",
    "SceneData",
    "Scenes",
    "load_scenes",
    "repeated",
]
