"""A data set of somebody outside the package: 20 grey images, dark or bright."""

import torch

from tokenmix.lab.data import DataRequest, register_dataset
from tokenmix.lab.data.images import ImageData, InMemoryImages


def load_levels(request: DataRequest) -> ImageData:
    """Grey levels of 8 x 8."""
    labels = torch.arange(20) % 2
    levels = (60 + 120 * labels).byte().view(-1, 1, 1, 1).expand(-1, 1, *(request.img_size or (8, 8)))
    images = InMemoryImages(levels.clone(), labels)
    return ImageData(images.subset(torch.arange(12)), images.subset(torch.arange(12, 20)), ["dark", "bright"], "toy")


register_dataset("toy-levels", load_levels, about="20 grey levels", licence="CC0", origin="here")
