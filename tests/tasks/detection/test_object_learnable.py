"""A set of which only background could be learned is refused before anything is written."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tokenmix.errors import UserError
from tokenmix.lab.tasks.detection.task import Detection, InstanceSegmentation
from tokenmix.lab.train.config import TrainConfig
from tokenmix.lab.train.run import train
from tokenmix.lab.train.sources import make_config

SOME, NOTHING = [0, 20, 100], [120]


def coco(root: Path, counts: list[int]) -> Path:
    """Two images a part, the second with one object whose mask has these run lengths."""
    for part in ("train", "val"):
        (root / f"{part}2017").mkdir(parents=True)
        for number in (1, 2):
            Image.new("RGB", (12, 10), (90, 80, 70)).save(root / f"{part}2017" / f"{number}.jpg")
        told = {
            "images": [{"id": i, "file_name": f"{i}.jpg", "width": 12, "height": 10} for i in (1, 2)],
            "categories": [{"id": 1, "name": "person"}],
            "annotations": [
                {
                    "id": 1,
                    "image_id": 2,
                    "category_id": 1,
                    "bbox": [0, 0, 2, 10],
                    "segmentation": {"size": [10, 12], "counts": counts},
                },
            ],
        }
        (root / "annotations").mkdir(exist_ok=True)
        (root / "annotations" / f"instances_{part}2017.json").write_text(json.dumps(told))
    return root


def config(data: Path, task: str, **changes: Any) -> TrainConfig:
    model = "mask_rcnn_nano" if task == "instance-segmentation" else "faster_rcnn_nano"
    return make_config(task=task, model=model, data=f"coco:{data}", batch_size=1, device="cpu", **changes)


@pytest.mark.parametrize(
    ("task", "counts", "limit", "said"),
    [
        ("instance-segmentation", NOTHING, None, "an object with a mask that is not empty, so only background could"),
        ("instance-segmentation", SOME, 1, "that --limit 1 takes has an object with a mask"),
        ("detection", SOME, 1, "that --limit 1 takes has an object with a box"),
    ],
)
def test_nothing_to_learn(tmp_path: Path, task: str, counts: list[int], limit: int | None, said: str) -> None:
    data = coco(tmp_path / "coco", counts)
    with pytest.raises(UserError, match=rf"no training image of 'coco:{data}' ?.*{said}") as told:
        train(config(data, task, limit=limit, out=tmp_path / "run"), quiet=True)
    assert "\n" not in str(told.value)
    assert not (tmp_path / "run").exists()


def test_an_object_in_the_last_image_is_enough(tmp_path: Path) -> None:
    assert InstanceSegmentation.load_data(config(coco(tmp_path / "a", SOME), "instance-segmentation")).num_train == 2
    # Boxes need no mask, and who only evaluates has nothing to learn.
    hollow = coco(tmp_path / "b", NOTHING)
    assert Detection.load_data(config(hollow, "detection")).num_train == 2
    like = {"classes": ["person"], "mean": [0.5] * 3, "std": [0.5] * 3, "img_size": [128, 128]}
    assert InstanceSegmentation.load_data(config(hollow, "instance-segmentation"), like=like).num_test == 2
