"""What the readers of all data share: data sets by name, fetching, the cache, the order of samples and the loader.

Importing this package registers the sets of images and scenes, and nothing heavy.
"""

from tokenmix.data.lookup import DataInfo, DataRequest, fetch_data, list_data
from tokenmix.registry import DATA_SETS, DataEntry

__all__ = ["DataInfo", "DataRequest", "fetch_data", "list_data"]

DATA_SETS.register(
    DataEntry(
        name="fashion-mnist",
        kinds=("images",),
        about="60,000 + 10,000 grey 28 x 28, 10 classes, 31 MB",
        licence="MIT",
        origin="publisher, else Debian dataset-fashion-mnist",
        load="tokenmix.data.images.named_sets:load_fashion_mnist",
        stored=("fashion-mnist",),
    ),
    DataEntry(
        name="digits",
        kinds=("images",),
        about="1,437 + 360 grey 8 x 8, 10 classes",
        licence="BSD-3-Clause",
        origin="embedded in scikit-learn",
        load="tokenmix.data.images.named_sets:load_digits",
    ),
    DataEntry(
        name="folder",
        kinds=("images",),
        about="folder:PATH, one sub-folder a class",
        licence="yours",
        origin="your disk",
        load="tokenmix.data.images.folders:load_folder",
        variant="path",
    ),
    DataEntry(
        name="imagefolder",
        kinds=("images",),
        about="imagefolder:PATH, photographs in ImageNet's layout",
        licence="yours",
        origin="your disk",
        load="tokenmix.data.images.folders:load_imagefolder",
        variant="path",
    ),
    DataEntry(
        name="wds",
        kinds=("images",),
        about="wds:PATH/train-{000..009}.tar, photographs in WebDataset shards",
        licence="yours",
        origin="your disk",
        load="tokenmix.data.images.webdataset:load_webdataset",
        variant="shards",
    ),
    DataEntry(
        name="voc",
        kinds=("classes", "boxes", "masks"),
        about="voc:PATH, Pascal VOC's VOCdevkit/VOC2012, 20 classes",
        licence="yours",
        origin="your disk",
        load="tokenmix.data.scenes.voc:load_voc",
        variant="path",
    ),
    DataEntry(
        name="ade20k",
        kinds=("classes",),
        about="ade20k:PATH, ADEChallengeData2016, 150 classes",
        licence="yours",
        origin="your disk",
        load="tokenmix.data.scenes.label_maps:load_ade20k",
        variant="path",
    ),
    DataEntry(
        name="cityscapes",
        kinds=("classes",),
        about="cityscapes:PATH, leftImg8bit and gtFine, 19 classes",
        licence="yours",
        origin="your disk",
        load="tokenmix.data.scenes.label_maps:load_cityscapes",
        variant="path",
    ),
    DataEntry(
        name="coco",
        kinds=("boxes", "masks"),
        about="coco:PATH, annotations, train2017 and val2017, 80 classes",
        licence="yours",
        origin="your disk",
        load="tokenmix.data.scenes.coco:load_coco",
        variant="path",
    ),
    DataEntry(
        name="masks",
        kinds=("classes",),
        about="masks:PATH, train and val with images and masks, a PNG of class numbers each",
        licence="yours",
        origin="your disk",
        load="tokenmix.data.scenes.label_maps:load_masks",
        variant="path",
    ),
)
