"""Shared data readers. Importing this package registers all image and scene sets, without heavy imports."""

from tokenmix.lab.data.lookup import DataInfo, DataRequest, fetch_data, list_data
from tokenmix.lab.registry import Kind, register_dataset, register_recipes

__all__ = ["DataInfo", "DataRequest", "fetch_data", "list_data", "register_dataset"]

LAYOUTS: tuple[tuple[str, tuple[Kind, ...], str, str], ...] = (
    ("folder", ("images",), ", one sub-folder per class", "images.sets:load_folder"),
    ("imagefolder", ("images",), ", photographs in ImageNet's layout", "images.sets:load_imagefolder"),
    (
        "wds",
        ("images",),
        "/train-{000..009}.tar, photographs in WebDataset shards",
        "images.webdataset:load_webdataset",
    ),
    (
        "voc",
        ("classes", "boxes", "masks"),
        ", Pascal VOC's VOCdevkit/VOC2012, 20 classes",
        "scenes.voc:load_voc",
    ),
    ("ade20k", ("classes",), ", ADEChallengeData2016, 150 classes", "scenes.label_maps:load_ade20k"),
    ("cityscapes", ("classes",), ", leftImg8bit and gtFine, 19 classes", "scenes.label_maps:load_cityscapes"),
    ("coco", ("boxes", "masks"), ", annotations, train2017 and val2017, 80 classes", "scenes.coco:load_coco"),
    ("yolo", ("boxes",), ", data.yaml, images and labels in text files of YOLO", "scenes.yolo:load_yolo"),
    (
        "masks",
        ("classes",),
        ", train and val with images and masks, a PNG of class numbers each",
        "scenes.label_maps:load_masks",
    ),
)
"""Users' own files: name, kinds, text after name:PATH, and reader."""
SIDES = {"folder": 64, "imagefolder": 224, "wds": 224}
"""Side of labelled images in pixels, unless --img-size is given."""

register_dataset(
    "fashion-mnist",
    "tokenmix.lab.data.images.sets:load_fashion_mnist",
    about="60,000 + 10,000 grey 28 x 28, 10 classes, 31 MB",
    licence="MIT",
    origin="publisher, else Debian dataset-fashion-mnist",
    stored=("fashion-mnist",),
    img_size=28,
)
register_dataset(
    "digits",
    "tokenmix.lab.data.images.sets:load_digits",
    about="1,437 + 360 grey 8 x 8, 10 classes",
    licence="BSD-3-Clause",
    origin="embedded in scikit-learn",
    img_size=8,
)
for _name, _kinds, _about, _load in LAYOUTS:
    register_dataset(
        _name,
        f"tokenmix.lab.data.{_load}",
        kinds=_kinds,
        about=f"{_name}:PATH{_about}",
        variant="shards" if _name == "wds" else "path",
        img_size=SIDES.get(_name),
    )
register_recipes()
