"""Reading scenes: images with a class for each pixel, with boxes, or with a mask for each object."""

from tokenmix.data.dense.scenes import DenseData, Objects, Scene, Scenes

__all__ = ["DenseData", "Objects", "Scene", "Scenes"]
