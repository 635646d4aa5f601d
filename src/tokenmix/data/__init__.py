"""Reading real data: sets that are fetched by name, an embedded one, and folders of the user's own images."""

from tokenmix.data.augment import make_augment
from tokenmix.data.decode import read_image
from tokenmix.data.images import ImageData, ImageSet, MemoryImages, Skipped
from tokenmix.data.loader import ImageLoader, make_loader, normalize
from tokenmix.data.registry import DATA_SETS, DataInfo, get, list_data, load_images

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
