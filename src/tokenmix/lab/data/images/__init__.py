"""Reading labelled images: sets that are fetched by name, an embedded one, and folders of the user's own."""

from tokenmix.lab.data.images.augment import make_augment
from tokenmix.lab.data.images.decode import read_image
from tokenmix.lab.data.images.image_set import ImageSet, InMemoryImages, Skipped
from tokenmix.lab.data.images.load import ImageData, LoadedImages, load_images
from tokenmix.lab.data.images.samples import ImageSamples, normalize

__all__ = [
    "ImageData",
    "ImageSamples",
    "ImageSet",
    "InMemoryImages",
    "LoadedImages",
    "Skipped",
    "load_images",
    "make_augment",
    "normalize",
    "read_image",
]
