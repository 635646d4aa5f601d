"""Reading real data: sets that are fetched by name, an embedded one, and folders of the user's own images."""

from tokenmix.data.images.augment import make_augment
from tokenmix.data.images.decode import read_image
from tokenmix.data.images.image_loader import ImageLoader, make_loader, normalize
from tokenmix.data.images.image_set import ImageData, ImageSet, MemoryImages, Skipped
from tokenmix.data.images.registry import DATA_SETS, DataInfo, get, list_data, load_images

__all__ = [
    "DATA_SETS",
    "DataInfo",
    "ImageData",
    "ImageLoader",
    "ImageSet",
    "MemoryImages",
    "Skipped",
    "get",
    "list_data",
    "load_images",
    "make_augment",
    "make_loader",
    "normalize",
    "read_image",
]
