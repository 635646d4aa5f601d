"""Masks of objects out of Pascal VOC's two pictures, in a tiny folder of its layout."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tokenmix.errors import UserError
from tokenmix.lab.data.scenes import load_scenes

DOG, PERSON = 12, 15


def picture(path: Path, numbers: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(numbers).save(path)


@pytest.fixture
def voc(tmp_path: Path) -> Path:
    """Image a shows two dogs, one of them with its border and a pixel of another class, and a person; b a dog."""
    owners = np.zeros((10, 12), np.uint8)
    owners[1:5, 1:5], owners[2:4, 2:4] = 255, 1
    owners[6:9, 0:6], owners[0:4, 8:12] = 2, 3
    classes = np.where(owners == 255, 255, np.array([0, DOG, DOG, PERSON], np.uint8)[owners % 255]).astype(np.uint8)
    classes[6, 0] = PERSON
    for name, keep in (("a", (1, 2, 3, 255)), ("b", (2,))):
        shown = np.isin(owners, keep)
        picture(tmp_path / "JPEGImages" / f"{name}.jpg", np.full((10, 12, 3), 90, np.uint8))
        picture(tmp_path / "SegmentationObject" / f"{name}.png", np.where(shown, owners, 0).astype(np.uint8))
        picture(tmp_path / "SegmentationClass" / f"{name}.png", np.where(shown, classes, 0).astype(np.uint8))
    lists = tmp_path / "ImageSets" / "Segmentation"
    lists.mkdir(parents=True)
    for part, name in (("train", "a"), ("val", "b")):
        (lists / f"{part}.txt").write_text(f"{name}\n")
    return tmp_path


def test_an_object_is_its_pixels_and_their_commonest_class(voc: Path):
    data = load_scenes(f"voc:{voc}", want="masks")
    objects = data.train.scene(0).objects
    assert objects is not None
    assert objects.masks is not None
    assert [data.classes[int(label)] for label in objects.labels] == ["dog", "dog", "person"]
    assert objects.boxes.tolist() == [[2, 2, 4, 4], [0, 6, 6, 9], [8, 0, 12, 4]]
    assert objects.masks.sum((1, 2)).tolist() == [4, 18, 16], "borders are nobody's"
    assert not objects.crowd.any()


def test_an_image_without_objects_is_background(voc: Path):
    none = voc / "SegmentationObject" / "c.png"
    picture(none, np.full((10, 12), 255, np.uint8))
    picture(voc / "SegmentationClass" / "c.png", np.full((10, 12), 255, np.uint8))
    picture(voc / "JPEGImages" / "c.jpg", np.zeros((10, 12, 3), np.uint8))
    (voc / "ImageSets" / "Segmentation" / "train.txt").write_text("c\na\n")
    objects = load_scenes(f"voc:{voc}", want="masks").train.scene(0).objects
    assert objects is not None
    assert objects.masks is not None
    assert (objects.boxes.shape, objects.masks.shape) == ((0, 4), (0, 10, 12))
    (voc / "ImageSets" / "Segmentation" / "val.txt").write_text("c\n")
    with pytest.raises(UserError, match=r"val\.txt has an object .* to evaluate on"):
        load_scenes(f"voc:{voc}", want="masks")


def test_pictures_that_do_not_fit_each_other(voc: Path):
    data = load_scenes(f"voc:{voc}", want="masks")
    classes = voc / "SegmentationClass" / "b.png"
    picture(classes, np.zeros((10, 12), np.uint8))
    with pytest.raises(UserError, match=r"object 2 of .*SegmentationObject/b\.png has no class in .*Class/b\.png"):
        data.test.scene(0)
    picture(classes, np.full((10, 12), 21, np.uint8))
    with pytest.raises(UserError, match="has the label 21, out of range"):
        data.test.scene(0)
    picture(classes, np.zeros((9, 12), np.uint8))
    with pytest.raises(UserError, match="both must have the same size"):
        data.test.scene(0)
    classes.unlink()
    with pytest.raises(UserError, match="has no label image"):
        load_scenes(f"voc:{voc}", want="masks")
    assert torch.equal(data.train.scene(0).image, torch.full((3, 10, 12), 90, dtype=torch.uint8))
