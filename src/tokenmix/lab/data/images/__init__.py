"""Reading labelled images: sets that are fetched by name, an embedded one, and folders of the user's own."""

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
