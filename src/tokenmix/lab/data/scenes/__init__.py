"""Readers of scenes: images with a class per pixel, boxes, or a mask per object."""

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
