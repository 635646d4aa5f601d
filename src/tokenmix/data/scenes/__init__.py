"""Reading scenes: images with a class for each pixel, with boxes, or with a mask for each object."""

from tokenmix.data.scenes.blue_marble import whole_map
from tokenmix.data.scenes.request import Want
from tokenmix.data.scenes.samples import DenseSamples, ObjectSamples, PixelSamples
from tokenmix.data.scenes.scenes import DenseData, Objects, Often, Scene, Scenes
from tokenmix.data.scenes.table import DENSE, get_dense, list_dense, load_dense
from tokenmix.data.scenes.transforms import ObjectAugment, PixelAugment, scale_steps

__all__ = [
    "DENSE",
    "DenseData",
    "DenseSamples",
    "ObjectAugment",
    "ObjectSamples",
    "Objects",
    "Often",
    "PixelAugment",
    "PixelSamples",
    "Scene",
    "Scenes",
    "Want",
    "get_dense",
    "list_dense",
    "load_dense",
    "scale_steps",
    "whole_map",
]
