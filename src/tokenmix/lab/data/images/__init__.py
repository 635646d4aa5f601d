"""Readers of labelled images: sets fetched by name, an embedded set, and users' folders."""

from tokenmix.lab.data.images.augment import make_augment
from tokenmix.lab.data.images.decode import read_image
from tokenmix.lab.data.images.image_set import ImageData, ImageSet, InMemoryImages, load_images, normalize

__all__ = [
    "ImageData",
    "ImageSet",
    "InMemoryImages",
    "load_images",
    "make_augment",
    "normalize",
    "read_image",
]
