"""Reading scenes: images with a class for each pixel, with boxes, or with a mask for each object."""

from tokenmix.data.dense.blue_marble import whole_map
from tokenmix.data.dense.request import Want
from tokenmix.data.dense.samples import DenseSamples, ObjectSamples, PixelSamples
from tokenmix.data.dense.scenes import DenseData, Objects, Often, Scene, Scenes
from tokenmix.data.dense.table import DENSE, get_dense, list_dense, load_dense
from tokenmix.data.dense.transforms import ObjectAugment, PixelAugment, scale_steps

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
