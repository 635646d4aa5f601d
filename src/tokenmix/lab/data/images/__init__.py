"""Reading labelled images: sets that are fetched by name, an embedded one, and folders of the user's own."""

from tokenmix.lab.data.images.augment import make_augment
from tokenmix.lab.data.images.decode import read_image
from tokenmix.lab.data.images.image_set import ImageSamples, ImageSet, InMemoryImages, normalize
from tokenmix.lab.data.images.load import ImageData, load_images

__all__ = [
    "ImageData",
    "ImageSamples",
    "ImageSet",
    "InMemoryImages",
    "load_images",
    "make_augment",
    "normalize",
    "read_image",
]
