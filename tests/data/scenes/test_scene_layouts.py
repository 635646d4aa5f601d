"""Tiny folders in the published layouts of dense tasks, and what may be wrong with them."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image

from tokenmix.errors import UserError
from tokenmix.lab.data.scenes import ObjectSamples, PixelSamples, SceneAugment, load_scenes
from tokenmix.lab.data.scenes.coco import decode_mask, encode_mask

SIZE = (12, 10)  # width, height


def image(path: Path, mode: str = "RGB", size: tuple[int, int] = SIZE) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    levels = np.arange(size[0] * size[1], dtype=np.uint8).reshape(size[1], size[0])
    if mode == "I;16":
        Image.fromarray(levels.astype(np.uint16) * 257).save(path)
    else:
        Image.fromarray(levels).convert(mode).save(path)


def labels(path: Path, numbers: Any, mode: str = "L") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    array = np.zeros((SIZE[1], SIZE[0]), np.uint8)
    array[: len(numbers), 0] = numbers
    picture = Image.fromarray(array)
    if mode == "P":
        picture = picture.copy()
        picture.putpalette(bytes(range(256)) * 3)
    picture.save(path)


def lines(path: Path, *names: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(names) + "\n")


def xml(path: Path, *boxes: tuple[str, int, int, int, int], size: tuple[int, int] = SIZE, difficult: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = [
        f"<object><name>{n}</name><difficult>{difficult}</difficult><bndbox><xmin>{a}</xmin><ymin>{b}</ymin>"
        f"<xmax>{c}</xmax><ymax>{d}</ymax></bndbox></object>"
        for n, a, b, c, d in boxes
    ]
    told = f"<size><width>{size[0]}</width><height>{size[1]}</height></size>"
    path.write_text(f"<annotation>{told}{''.join(parts)}</annotation>")


@pytest.fixture
def voc(tmp_path: Path) -> Path:
    root = tmp_path / "VOCdevkit" / "VOC2012"
    for name in ("a", "b", "c"):
        image(root / "JPEGImages" / f"{name}.jpg")
    for name in ("a", "b"):
        labels(root / "SegmentationClass" / f"{name}.png", [0, 20, 255], "P")
    xml(root / "Annotations" / "a.xml", ("dog", 1, 2, 12, 10), ("cat", 3, 3, 3, 5))
    xml(root / "Annotations" / "b.xml", ("person", 2, 2, 4, 6), difficult=1)
    lines(root / "ImageSets" / "Segmentation" / "train.txt", "a")
    lines(root / "ImageSets" / "Segmentation" / "val.txt", "b")
    lines(root / "ImageSets" / "Main" / "train.txt", "a", "c")
    lines(root / "ImageSets" / "Main" / "val.txt", "b")
    return root


def test_voc_classes(voc: Path):
    for path in (voc, voc.parent, voc.parent.parent):
        data = load_scenes(f"voc:{path}", want="classes")
        assert (len(data.train), len(data.test), len(data.classes), data.ignore) == (1, 1, 21, 255)
    classes = data.train.scene(0).classes
    assert classes is not None
    assert classes[:4, 0].tolist() == [0, 20, 255, 0]
    assert data.palette[:3] == [(0, 0, 0), (128, 0, 0), (0, 128, 0)]
    assert data.palette[15] == (192, 128, 128)
    batch = PixelSamples(data, data.test).read(torch.tensor([0]), 0)
    assert batch["image"].shape == (1, 3, 10, 12)


def test_voc_trains_on_the_augmented_list_where_there_is_one(voc: Path):
    lines(voc / "ImageSets" / "Segmentation" / "trainaug.txt", "/JPEGImages/a.jpg /SegmentationClassAug/a.png", "c")
    for name in ("a", "c"):
        labels(voc / "SegmentationClassAug" / f"{name}.png", [7])
    data = load_scenes(f"voc:{voc}", want="classes")
    assert len(data.train) == 2
    assert "trainaug" in data.source


def test_voc_boxes(voc: Path):
    data = load_scenes(f"voc:{voc}", want="boxes")
    objects, none = data.train.scene(0).objects, data.train.scene(1).objects
    assert objects is not None
    assert objects.boxes.tolist() == [[0, 1, 12, 10]]
    assert data.classes[int(objects.labels[0])] == "dog"
    assert none is not None
    assert none.boxes.shape == (0, 4), "an image without annotations is background"
    assert data.notes["boxes_without_area"] == 1
    assert data.skipped[0].path.endswith("a.xml")
    difficult = data.test.scene(0).objects
    assert difficult is not None
    assert difficult.crowd.tolist() == [True]


def test_voc_with_classes_of_its_own(voc: Path, capsys: pytest.CaptureFixture[str]):
    xml(voc / "Annotations" / "a.xml", ("screw", 1, 2, 12, 10), ("nut", 3, 3, 5, 5))
    with pytest.raises(UserError, match=r"b\.xml has an object 'person', .* give one of nut, screw"):
        load_scenes(f"voc:{voc}", want="boxes")
    xml(voc / "Annotations" / "b.xml", ("nut", 2, 2, 4, 6))
    data = load_scenes(f"voc:{voc}", want="boxes")
    assert (data.classes, len(data.palette)) == (["nut", "screw"], 2)
    assert "train.txt: nut, screw;" in capsys.readouterr().err
    objects = data.train.scene(0).objects
    assert objects is not None
    assert objects.labels.tolist() == [1, 0]
    lines(voc / "classes.txt", "screw", "washer", "nut")
    assert load_scenes(f"voc:{voc}", want="boxes").classes == ["screw", "washer", "nut"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<annotation><object>", "a.xml is not XML"),
        ("<annotation><object><name>dog</name></object></annotation>", "a.xml, object 1 has no <bndbox/xmin>"),
        (
            "<annotation><object><name>dog</name><bndbox><xmin>x</xmin><ymin>1</ymin><xmax>2</xmax><ymax>2</ymax>"
            "</bndbox></object></annotation>",
            "corner that is not a number",
        ),
        (
            "<annotation><object><name>dog</name><bndbox><xmin>nan</xmin><ymin>1</ymin><xmax>2</xmax><ymax>2</ymax>"
            "</bndbox></object></annotation>",
            "corner that is not a number",
        ),
    ],
)
def test_broken_xml(voc: Path, text: str, message: str):
    (voc / "Annotations" / "a.xml").write_text(text)
    with pytest.raises(UserError, match=message):
        load_scenes(f"voc:{voc}", want="boxes")


@pytest.mark.parametrize(("name", "purpose"), [("a", "learn from"), ("b", "evaluate on")])
def test_voc_without_any_box(voc: Path, name: str, purpose: str):
    (voc / "Annotations" / f"{name}.xml").unlink()
    with pytest.raises(UserError, match=rf"no image of .*\.txt has an object in .*Annotations to {purpose}"):
        load_scenes(f"voc:{voc}", want="boxes")


def test_boxes_that_do_not_fit(voc: Path):
    annotation = voc / "Annotations" / "a.xml"
    lines(voc / "classes.txt", "dog", "person")
    xml(annotation, ("unicorn", 1, 1, 4, 4))
    with pytest.raises(UserError, match=r"a\.xml has an object 'unicorn', which is neither in classes\.txt"):
        load_scenes(f"voc:{voc}", want="boxes")
    xml(annotation, ("dog", 5, 1, 4, 4))
    with pytest.raises(UserError, match="corners swapped"):
        load_scenes(f"voc:{voc}", want="boxes")
    xml(annotation, ("dog", 1, 1, 40, 4))
    with pytest.raises(UserError, match=r"a\.jpg has a box beyond its 12 x 10"):
        load_scenes(f"voc:{voc}", want="boxes").train.scene(0)
    xml(annotation, ("dog", 1, 1, 4, 4), size=(99, 99))
    with pytest.raises(UserError, match=r"a\.jpg has height x width \(10, 12\)"):
        load_scenes(f"voc:{voc}", want="boxes").train.scene(0)


def test_label_pictures_that_do_not_fit(voc: Path):
    mask = voc / "SegmentationClass" / "a.png"
    labels(mask, [0, 21], "P")
    with pytest.raises(UserError, match=r"a\.png has the label 21, out of range: known are 0 to 20, 255"):
        load_scenes(f"voc:{voc}", want="classes").train.scene(0)
    Image.new("L", (5, 10)).save(mask)
    with pytest.raises(UserError, match=r"a\.png has 5 x 10 pixels, its image .*a\.jpg 12 x 10"):
        load_scenes(f"voc:{voc}", want="classes").train.scene(0)
    Image.new("RGB", SIZE).save(mask)
    with pytest.raises(UserError, match=r"a\.png is a picture of mode RGB"):
        load_scenes(f"voc:{voc}", want="classes").train.scene(0)
    mask.write_bytes(b"")
    with pytest.raises(UserError, match=r"a\.png is empty"):
        load_scenes(f"voc:{voc}", want="classes").train.scene(0)
    mask.unlink()
    with pytest.raises(UserError, match=r"a\.jpg has no label image .*a\.png"):
        load_scenes(f"voc:{voc}", want="classes")


def test_missing_images_and_lists(voc: Path):
    (voc / "JPEGImages" / "b.jpg").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"b\.jpg is not an image"):
        load_scenes(f"voc:{voc}", want="classes").test.scene(0)
    (voc / "JPEGImages" / "b.jpg").unlink()
    for want in ("classes", "boxes"):
        with pytest.raises(UserError, match=r"b\.jpg does not exist"):
            load_scenes(f"voc:{voc}", want=want)
    lines(voc / "ImageSets" / "Segmentation" / "val.txt", "")
    with pytest.raises(UserError, match=r"val\.txt is empty"):
        load_scenes(f"voc:{voc}", want="classes")
    (voc / "ImageSets" / "Segmentation" / "val.txt").unlink()
    with pytest.raises(UserError, match=r"val\.txt.* does not exist"):
        load_scenes(f"voc:{voc}", want="classes")


def test_ade20k(tmp_path: Path):
    root = tmp_path / "ADEChallengeData2016"
    for part in ("training", "validation"):
        image(root / "images" / part / "ADE_1.jpg")
        labels(root / "annotations" / part / "ADE_1.png", [0, 1, 150])
    data = load_scenes(f"ade20k:{tmp_path}", want="classes")
    classes = data.train.scene(0).classes
    assert classes is not None
    assert classes[:3, 0].tolist() == [255, 0, 149]
    assert len(data.classes) == len(data.palette) == 150
    labels(root / "annotations" / "training" / "ADE_1.png", [151])
    with pytest.raises(UserError, match="label 151, out of range: known are 0 to 150"):
        data.train.scene(0)
    (root / "objectInfo150.txt").write_text(
        "Idx\tRatio\tTrain\tVal\tName\n" + "".join(f"{i}\t0\t0\t0\tthing {i}, other\n" for i in range(1, 151))
    )
    assert load_scenes(f"ade20k:{root}", want="classes").classes[::149] == ["thing 1", "thing 150"]


def test_cityscapes(tmp_path: Path):
    for part, city in (("train", "aachen"), ("val", "ulm")):
        stem = f"{city}_000000_000019"
        image(tmp_path / "leftImg8bit" / part / city / f"{stem}_leftImg8bit.png")
        labels(tmp_path / "gtFine" / part / city / f"{stem}_gtFine_labelIds.png", [7, 33, 0, 26, 255])
    data = load_scenes(f"cityscapes:{tmp_path}", want="classes")
    classes = data.train.scene(0).classes
    assert classes is not None
    assert classes[:5, 0].tolist() == [0, 18, 255, 13, 255]
    assert (len(data.classes), data.classes[13]) == (19, "car")
    labels(tmp_path / "gtFine" / "train" / "aachen" / "aachen_000000_000019_gtFine_labelTrainIds.png", [18, 255])
    classes = load_scenes(f"cityscapes:{tmp_path}", want="classes").train.scene(0).classes
    assert classes is not None
    assert classes[:2, 0].tolist() == [18, 255]


@pytest.fixture
def own(tmp_path: Path) -> Path:
    for part, mode in (("train", "L"), ("val", "I;16")):
        image(tmp_path / part / "images" / "x.png", mode)
        labels(tmp_path / part / "masks" / "x.png", [0, 2, 255])
    return tmp_path


def test_own_masks_grey_and_of_16_bits(own: Path):
    data = load_scenes(f"masks:{own}", want="classes")
    assert data.classes == ["class 0", "class 1", "class 2"]
    assert torch.equal(data.train.scene(0).image, data.test.scene(0).image), "16 bits become 8"
    lines(own / "classes.txt", "sea", "land", "sea")
    with pytest.raises(UserError, match="names 'sea' more than once"):
        load_scenes(f"masks:{own}", want="classes")
    (own / "classes.txt").write_text("")
    with pytest.raises(UserError, match=r"classes\.txt is empty.* it lists the classes"):
        load_scenes(f"masks:{own}", want="classes")
    (own / "classes.txt").unlink()
    os.mkfifo(own / "classes.txt")
    with pytest.raises(UserError, match=r"classes\.txt is a pipe"):
        load_scenes(f"masks:{own}", want="classes")
    (own / "classes.txt").unlink()
    lines(own / "classes.txt", "sea", "land")
    with pytest.raises(UserError, match="label 2, out of range: known are 0 to 1, 255"):
        load_scenes(f"masks:{own}", want="classes").train.scene(0)


def test_own_masks_that_are_not_there(own: Path, tmp_path: Path):
    (own / "val" / "masks" / "x.png").unlink()
    with pytest.raises(UserError, match="has no label image"):
        load_scenes(f"masks:{own}", want="classes")
    (own / "val" / "images" / "x.png").unlink()
    with pytest.raises(UserError, match="has no images"):
        load_scenes(f"masks:{own}", want="classes")
    (own / "val").rename(own / "other")
    with pytest.raises(UserError, match="neither val nor test"):
        load_scenes(f"masks:{own}", want="classes")
    with pytest.raises(UserError, match="no folder train"):
        load_scenes(f"masks:{tmp_path / 'none'}", want="classes")


def coco_part(root: Path, part: str, **changes: Any) -> dict[str, Any]:
    image(root / f"{part}2017" / "1.jpg")
    image(root / f"{part}2017" / "2.jpg", "L")
    told = {
        "images": [{"id": i, "file_name": f"{i}.jpg", "width": 12, "height": 10} for i in (1, 2)],
        "categories": [{"id": 90, "name": "toothbrush"}, {"id": 1, "name": "person"}],
        "annotations": [
            {
                "id": 5,
                "image_id": 1,
                "category_id": 90,
                "bbox": [2, 1, 4, 3],
                "iscrowd": 0,
                "segmentation": [[2, 1, 6, 1, 6, 4, 2, 4]],
            },
            {
                "id": 6,
                "image_id": 1,
                "category_id": 1,
                "bbox": [0, 0, 2, 10],
                "iscrowd": 1,
                "segmentation": {"size": [10, 12], "counts": [0, 20, 100]},
            },
            {"id": 7, "image_id": 1, "category_id": 1, "bbox": [3, 3, 0, 4], "iscrowd": 0, "segmentation": []},
        ],
        **changes,
    }
    path = root / "annotations" / f"instances_{part}2017.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(told))
    return told


@pytest.fixture
def coco(tmp_path: Path) -> Path:
    for part in ("train", "val"):
        coco_part(tmp_path, part)
    return tmp_path


def test_coco(coco: Path):
    data = load_scenes(f"coco:{coco}", want="masks")
    assert data.classes == ["person", "toothbrush"]
    assert data.notes == {"category_ids": [1, 90], "boxes_without_area": 2}
    scene = data.train.scene(0)
    assert scene.key == 1
    assert scene.objects is not None
    assert scene.objects.boxes.tolist() == [[2, 1, 6, 4], [0, 0, 2, 10]]
    assert scene.objects.labels.tolist() == [1, 0]
    assert scene.objects.crowd.tolist() == [False, True]
    assert scene.objects.masks is not None
    assert scene.objects.masks.flatten(1).sum(1).tolist() == [12, 20]
    assert scene.objects.masks[0, 1:4, 2:6].all()
    empty = ObjectSamples(data.train).read(torch.tensor([1]), 0)["targets"][0]
    assert empty["masks"].shape == (0, 10, 12)
    assert empty["image_id"] == 2
    boxes = load_scenes(f"coco:{coco}", want="boxes").train.scene(0).objects
    assert boxes is not None
    assert boxes.masks is None


def test_coco_as_roboflow_exports_it(coco: Path):
    for old, new in (("train", "train"), ("val", "valid")):
        (coco / f"{old}2017").rename(coco / new)
        (coco / "annotations" / f"instances_{old}2017.json").rename(coco / new / "_annotations.coco.json")
    data = load_scenes(f"coco:{coco}", want="boxes")
    assert (len(data.train), len(data.test), data.classes) == (2, 2, ["person", "toothbrush"])
    assert data.test.scene(0).name == str(coco / "valid" / "1.jpg")
    (coco / "valid").rename(coco / "test")
    assert len(load_scenes(f"coco:{coco}", want="boxes").test) == 2
    (coco / "train").rename(coco / "other")
    (coco / "annotations").rmdir()
    with pytest.raises(UserError, match=r"layout of COCO: .*_train2017\.json .* or train/_annotations\.coco\.json"):
        load_scenes(f"coco:{coco}", want="boxes")


@pytest.fixture
def yolo(tmp_path: Path) -> Path:
    for part in ("train", "val"):
        for name in ("a", "b"):
            image(tmp_path / "images" / part / f"{name}.jpg")
        lines(tmp_path / "labels" / part / "a.txt", "1 0.5 0.5 0.5 0.4", "0 0 0 0.25 0 0.25 0.5", "0 .5 .5 0 .5", "")
    (tmp_path / "labels" / "train" / "b.txt").touch()
    lines(tmp_path / "data.yaml", "path: /elsewhere", "train: images/train", "names: {0: cat, 1: dog}")
    return tmp_path


def test_yolo(yolo: Path, capsys: pytest.CaptureFixture[str]):
    data = load_scenes(f"yolo:{yolo}", want="boxes")
    objects, none = data.train.scene(0).objects, data.train.scene(1).objects
    assert objects is not None
    assert none is not None
    torch.testing.assert_close(objects.boxes, torch.tensor([[3.0, 3, 9, 7], [0, 0, 3, 5]]))
    assert (objects.labels.tolist(), data.classes, len(data.palette)) == ([1, 0], ["cat", "dog"], 2)
    assert none.boxes.shape == (0, 4), "an empty file is background"
    assert [(Path(s.path).name, s.reason) for s in data.skipped] == 2 * [("a.txt", "1 of its boxes have no area")]
    assert "1 of 2 images of" in capsys.readouterr().err, "and so is an image without a file, with a message"
    for part, new in (("train", "train"), ("val", "valid")):
        for kind in ("images", "labels"):
            (yolo / new).mkdir(exist_ok=True)
            (yolo / kind / part).rename(yolo / new / kind)
    lines(yolo / "data.yaml", "names: [cat, dog]")
    assert len(load_scenes(f"yolo:{yolo / 'data.yaml'}", want="boxes").test) == 2


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("labels/train/a.txt", "0 0.5 0.5 0.1 0.1\n7 .5 .5 .1 .1", r"a\.txt, line 2, .* no class 7; .* 0 to 1"),
        ("labels/train/a.txt", "0.5 0.5 0.5 0.1 0.1", "no class 0.5"),
        ("labels/train/a.txt", "-1 0.5 0.5 0.1 0.1", "no class -1"),
        ("labels/train/a.txt", "0 0.5 0.5 0.1", "line 1, .* give class, x, y, width and height"),
        ("labels/train/a.txt", "0 0.5 0.5 0.1 0.1 0.9", "give class, x, y"),
        ("labels/train/a.txt", "0 0.5 0.5 nan 0.1", "give class, x, y"),
        ("labels/train/a.txt", "0 0.5 x 0.1 0.1", "give class, x, y"),
        ("labels/train/a.txt", "0 120 80 40 30", "ends outside the image; give shares"),
        ("labels/train/a.txt", "", "no image of .*images/train has a box"),
        ("data.yaml", "nc: 2", r"data\.yaml has no list of class names"),
        ("data.yaml", "names: [[a], b]", "no list of class names"),
        ("data.yaml", "names: {1: a, 2: b}", "no list of class names"),
        ("data.yaml", "names: [a, a]", "names a class more than once"),
        ("data.yaml", "names: [a, b]\nkpt_shape: [2, 2]", "keypoints are not read"),
        ("data.yaml", "names: !!python/object/apply:os.getcwd []", "no list of class names"),
        ("data.yaml", "[" * 100_000, "no list of class names"),
        ("data.yaml", "a: &a [x]\nb: &b [*a, *a]\nnames: [*b, *b]", "no list of class names"),
    ],
)
def test_yolo_files_that_are_wrong(yolo: Path, file: str, text: str, message: str):
    (yolo / file).write_text(text)
    with pytest.raises(UserError, match=message):
        load_scenes(f"yolo:{yolo}", want="boxes")


def test_yolo_folders_that_are_not_there(yolo: Path):
    (yolo / "images" / "val").rename(yolo / "images" / "other")
    with pytest.raises(UserError, match="images/val has no images"):
        load_scenes(f"yolo:{yolo}", want="boxes")
    (yolo / "data.yaml").unlink()
    with pytest.raises(UserError, match=r"data\.yaml does not exist; give a folder with data\.yaml, images/train"):
        load_scenes(f"yolo:{yolo}", want="boxes")


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ([[2, 1, 6, 4], [8, 5, 11, 9]], "1 of 2 boxes end outside their images"),
        ([[0.1, 0.2, 0.5, 0.4], [0.3, 0.3, 0.5, 0.2]], "2 of 2 boxes are at most 1 in every number"),
    ],
)
def test_boxes_in_other_units_are_refused(coco: Path, boxes: list[list[float]], message: str):
    found = [{"id": i, "image_id": 1, "category_id": 1, "bbox": box} for i, box in enumerate(boxes)]
    coco_part(coco, "train", annotations=found)
    with pytest.raises(UserError, match=f"{message}; COCO's bbox is left, top, width and height, in pixels"):
        load_scenes(f"coco:{coco}", want="boxes")


def test_boxes_of_coco_need_no_pycocotools(coco: Path, monkeypatch: pytest.MonkeyPatch):
    import sys

    monkeypatch.setitem(sys.modules, "pycocotools", None)
    assert load_scenes(f"coco:{coco}", want="boxes").train.scene(0).objects is not None
    with pytest.raises(UserError, match=r"pip install 'tokenmix\[detection\]'"):
        load_scenes(f"coco:{coco}", want="masks").train.scene(0)


@pytest.mark.parametrize(
    ("segmentation", "message"),
    [
        ({"size": [10, 12], "counts": [5, 3, 2]}, "do not decode: they fill 10 of 120"),
        ({"size": [10, 12], "counts": "~~~~"}, "do not decode"),
        ({"size": [10, 12], "counts": ""}, "they fill 0 of 120"),
        ({"size": [10, 12], "counts": "P"}, "ends within a number"),
        ({"size": [10, 12], "counts": [130, -10]}, "not numbers >= 0"),
        ({"size": [12, 10], "counts": [120]}, "are of size"),
        ({"size": 120, "counts": [120]}, "are of size 120"),
        ([[1, 1, 5, 1]], "three or more corners"),
        ([[1, 1, 5, 1, 5, "a"]], "three or more corners"),
        (None, "neither polygons nor run lengths"),
        ([], "neither polygons nor run lengths"),
    ],
)
def test_masks_that_do_not_decode(coco: Path, segmentation: Any, message: str):
    entry = {"id": 8, "image_id": 2, "category_id": 1, "bbox": [1, 1, 4, 4], "segmentation": segmentation}
    coco_part(coco, "val", annotations=[entry])
    data = load_scenes(f"coco:{coco}", want="masks")
    with pytest.raises(UserError, match=rf"instances_val2017\.json, annotation 8 of .*2\.jpg: .*{message}"):
        data.test.scene(1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": []}, "has no images"),
        ({"categories": []}, "has no categories"),
        ({"annotations": []}, "nothing to learn from"),
        ({"annotations": None}, "no list of annotations"),
        ({"annotations": [{"id": 1}]}, "entry 0 of annotations, has no image_id"),
        ({"annotations": [{"id": 1, "image_id": 9, "category_id": 1, "bbox": [0, 0, 1, 1]}]}, "belongs to image 9"),
        ({"annotations": [{"id": 1, "image_id": 1, "category_id": 2, "bbox": [0, 0, 1, 1]}]}, "category 2"),
        ({"annotations": [{"id": 1, "image_id": 1, "category_id": 1, "bbox": [0, 0, 1]}]}, "has the box"),
        ({"categories": [{"id": 1, "name": "person"}]}, "category 90"),
        ({"categories": [{"id": 1, "name": None}]}, "entry 0 of categories, has name=None; give str"),
        ({"categories": [{"id": 1, "name": "person"}, {"id": 1, "name": "dog"}]}, "has 2 categories of the id 1"),
        ({"categories": [{"id": 1, "name": "dog"}, {"id": 90, "name": "dog"}]}, "has 2 categories of the name dog"),
        ({"images": [{"id": 1, "file_name": None, "width": 1, "height": 1}]}, "has file_name=None; give str"),
        ({"images": [{"id": 1, "file_name": "1.jpg", "width": "1", "height": 1}]}, "width='1'; give int or float"),
        ({"images": [{"id": 1, "file_name": "1.jpg", "width": 1, "height": 1}] * 2}, "has 2 images of the id 1"),
        ({"annotations": [{"id": 1, "image_id": 1, "category_id": [1], "bbox": [0, 0, 1, 1]}]}, r"category_id=\[1\]"),
        (
            {"annotations": [{"id": 1, "image_id": 1, "category_id": 1, "bbox": [0, 0, 9, 9], "iscrowd": 1}]},
            "that are no crowd, so there is nothing to learn from",
        ),
        (
            {"annotations": [{"id": 1, "image_id": 1, "category_id": 1, "bbox": [0, 0, 9, 9], "iscrowd": "0"}]},
            "annotation 1, has iscrowd='0'; give 0 or 1",
        ),
        ({"annotations": [{"id": 1, "image_id": 1, "category_id": 1, "bbox": [12, 0, 9, 9]}]}, "nothing to learn from"),
    ],
)
def test_annotation_files_that_are_wrong(coco: Path, changes: dict[str, Any], message: str):
    coco_part(coco, "train", **changes)
    with pytest.raises(UserError, match=rf"instances_train2017\.json.*{message}"):
        load_scenes(f"coco:{coco}", want="boxes")


def test_a_box_outside_its_image_is_one_of_no_area(coco: Path):
    told = coco_part(coco, "train")
    beyond = {"id": 8, "image_id": 2, "category_id": 1, "bbox": [-9, 3, 9, 4]}
    coco_part(coco, "train", annotations=[*told["annotations"], beyond])
    data = load_scenes(f"coco:{coco}", want="boxes")
    assert data.notes["boxes_without_area"] == 3
    assert [Path(one.path).name for one in data.skipped] == ["1.jpg", "2.jpg", "1.jpg"]


def test_nothing_to_evaluate_on(coco: Path):
    coco_part(coco, "val", annotations=[])
    with pytest.raises(UserError, match=r"instances_val2017\.json has no annotations .*nothing to evaluate on"):
        load_scenes(f"coco:{coco}", want="boxes")
    crowd = {"id": 1, "image_id": 1, "category_id": 1, "bbox": [0, 0, 9, 9], "iscrowd": 1}
    coco_part(coco, "val", annotations=[crowd])
    with pytest.raises(UserError, match=r"val2017.*that are no crowd, so there is nothing to evaluate on"):
        load_scenes(f"coco:{coco}", want="boxes")


def test_coco_files_that_are_broken(coco: Path):
    told = coco_part(coco, "val")
    told["images"][0]["width"] = 13
    coco_part(coco, "val", images=told["images"])
    with pytest.raises(UserError, match=r"1\.jpg has 12 x 10 pixels, .*says 13 x 10"):
        load_scenes(f"coco:{coco}", want="boxes").test.scene(0)
    (coco / "val2017" / "1.jpg").unlink()
    with pytest.raises(UserError, match=r"1\.jpg does not exist"):
        load_scenes(f"coco:{coco}", want="boxes").test.scene(0)
    annotations = coco / "annotations" / "instances_val2017.json"
    annotations.write_text('{"images": [')
    with pytest.raises(UserError, match=r"instances_val2017\.json is not JSON"):
        load_scenes(f"coco:{coco}", want="boxes")
    annotations.unlink()
    with pytest.raises(UserError, match=r"instances_val2017\.json does not exist"):
        load_scenes(f"coco:{coco}", want="boxes")


@pytest.mark.parametrize(
    "value", ['{"id": 1e400}', '{"bbox": [0, 0, 1e999, 1]}', "[" * 20_000, "9" * 5000, "NaN", '"\\ud800"']
)
def test_coco_files_that_no_reader_would_survive(coco: Path, value: str):
    (coco / "annotations" / "instances_val2017.json").write_text(f'{{"images": [{value}]}}')
    with pytest.raises(UserError, match=r"instances_val2017\.json is not JSON"):
        load_scenes(f"coco:{coco}", want="boxes")


def test_numbers_beyond_those_of_images_are_refused(coco: Path):
    told = coco_part(coco, "val")
    for change in ({"bbox": [0, 0, 10**400, 1]}, {"category_id": 10**30}):
        coco_part(coco, "val", annotations=[{**told["annotations"][0], **change}])
        with pytest.raises(UserError, match=r"instances_val2017\.json, (annotation|entry)"):
            load_scenes(f"coco:{coco}", want="boxes")


BOX = [1, 1, 50, 1, 50, 50, 1, 50]


@pytest.mark.parametrize(
    ("polygon", "message"),
    [
        ([3e9, 1, 50, 1, 50, 50], "far outside"),
        ([-3e9, 1, 50, 1, 50, 50], "far outside"),
        ([10**400, 1, 50, 1, 50, 50], "far outside"),
        ([float("nan"), *BOX[1:]], "far outside"),
        ([float("inf"), *BOX[1:]], "far outside"),
        ([0, 0, 99, 119] * 1000, "longer outline"),
        ("12345678", "not a list"),
        ([None] * 8, "not a list"),
        (BOX[:4], "three or more corners"),
        (BOX[:7], "three or more corners"),
    ],
)
def test_outlines_that_pycocotools_does_not_survive(polygon: object, message: str):
    """3e9 ended the process by SIGSEGV; a zigzag takes memory for each of its steps."""
    assert int(decode_mask([BOX], 120, 100).sum()) == 49 * 49
    with pytest.raises(UserError, match=message):
        decode_mask([BOX, polygon], 120, 100)


def test_a_run_length_without_an_end():
    with pytest.raises(UserError, match="one has no end"):
        decode_mask({"size": [120, 100], "counts": "o" * 1_000_000}, 120, 100)


@pytest.mark.parametrize("seed", range(5))
def test_run_lengths_there_and_back(seed: int):
    mask = torch.rand(17, 23, generator=torch.Generator().manual_seed(seed)) < [0.0, 0.02, 0.5, 0.98, 1.0][seed]
    coded = encode_mask(mask)
    assert json.loads(json.dumps(coded)) == coded
    assert torch.equal(decode_mask(coded, 17, 23), mask)


def test_run_lengths_of_a_large_mask_agree_with_pycocotools():
    from pycocotools import mask as tools

    yy, xx = np.mgrid[:300, :400]
    mask = ((yy - 150) ** 2 / 2 + (xx - 180) ** 2 < 90**2) ^ (xx % 77 == 0)
    coded = tools.encode(np.asfortranarray(mask.astype(np.uint8)))
    text = {"size": coded["size"], "counts": coded["counts"].decode()}
    assert np.array_equal(decode_mask(text, 300, 400).numpy(), mask)


def test_boxes_of_coco_are_the_annotations_with_masks_too(coco: Path):
    told = coco_part(coco, "val")
    thin = {"bbox": [2.2, 2.2, 7.5, 0.4], "segmentation": {"size": [10, 12], "counts": [120]}}
    told["annotations"][0] |= thin
    coco_part(coco, "val", annotations=told["annotations"][:1])
    boxes, masks = (
        ObjectSamples(load_scenes(f"coco:{coco}", want=want).test).read(torch.tensor([0]), 0)["targets"][0]
        for want in ("boxes", "masks")
    )
    torch.testing.assert_close(boxes["boxes"], torch.tensor([[2.2, 2.2, 9.7, 2.6]]))
    assert masks["boxes"].equal(boxes["boxes"])
    assert not masks["masks"].any(), "an object without a pixel is still one to find"


def test_photographs_of_yolo_are_turned(yolo: Path):
    upright = Image.open(yolo / "images/train/a.jpg")
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    upright.rotate(90, expand=True).save(yolo / "images/train/a.jpg", exif=exif)
    scene = load_scenes(f"yolo:{yolo}", want="boxes").train.scene(0)
    assert tuple(scene.image.shape) == (3, upright.height, upright.width)


def test_two_images_of_one_mask_are_refused(tmp_path: Path):
    for part in ("train", "val"):
        image(tmp_path / part / "images" / "a.jpg")
        labels(tmp_path / part / "masks" / "a.png", [0, 1])
    image(tmp_path / "train" / "images" / "a.png")
    with pytest.raises(UserError, match=r"a\.jpg and .*a\.png both have the mask .*a\.png; rename"):
        load_scenes(f"masks:{tmp_path}", want="classes")


@pytest.mark.parametrize("want", ["boxes", "masks"])
def test_the_area_of_coco_is_the_annotations(coco: Path, want: Any):
    told = coco_part(coco, "val")
    for entry, area in zip(told["annotations"], (7.5, 0, None)):
        entry["area"] = area
    coco_part(coco, "val", annotations=told["annotations"])
    data = load_scenes(f"coco:{coco}", want=want)
    given, own = (ObjectSamples(part).read(torch.tensor([0]), 0)["targets"][0] for part in (data.test, data.train))
    assert given["area"].tolist() == [7.5, 0.0]
    assert own["area"].tolist() == [12, 20], "without area it is that of the mask or the box"
    cropped = ObjectSamples(data.test, SceneAugment(seed=0, flip=0)).read(torch.tensor([0]), 0)["targets"][0]
    assert cropped["area"].tolist() == [12], "the area of a whole object is not that of its part"


@pytest.mark.parametrize("area", [-1, "9", [9], 1e300])
def test_areas_that_are_none(coco: Path, area: Any):
    told = coco_part(coco, "train")
    coco_part(coco, "train", annotations=[{**told["annotations"][0], "area": area}])
    with pytest.raises(UserError, match=r"annotation 5, has area=.*; give a number of pixels"):
        load_scenes(f"coco:{coco}", want="boxes")


def test_a_category_without_annotations_is_named(coco: Path, capsys: pytest.CaptureFixture[str]):
    told = coco_part(coco, "train")
    coco_part(coco, "train", annotations=told["annotations"][:1])
    load_scenes(f"coco:{coco}", want="boxes")
    assert "instances_train2017.json has no example of 'person', so it cannot be learned" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["../1.jpg", "a/../../1.jpg", "/etc/hostname"])
def test_names_of_coco_stay_in_its_folder(coco: Path, name: str):
    coco_part(coco, "val", images=[{"id": i, "file_name": name, "width": 12, "height": 10} for i in (1, 2)])
    image(coco / "1.jpg")
    with pytest.raises(UserError, match="leaves the folder"):
        load_scenes(f"coco:{coco}", want="boxes").test.scene(0)


def test_masks_that_would_not_fit_in_memory(coco: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tokenmix.environment.MASK_BYTES", 2 * 120 - 1)
    data = load_scenes(f"coco:{coco}", want="masks")
    with pytest.raises(UserError, match="2 masks of 12 x 10 pixels fill more than 0 MiB"):
        data.train.scene(0)
    monkeypatch.setattr("tokenmix.environment.MASK_BYTES", 2 * 120)
    augment = SceneAugment(seed=0, scales=(2.0,))
    with pytest.raises(UserError, match="1 masks of 24 x 20 pixels fill more than 0 MiB"):
        augment(data.train.scene(0), 0, 0)


def own_masks(root: Path, values: np.ndarray, names: str | None = None, mask: str = "0.png") -> Path:
    for part in ("train", "val"):
        for kind in ("images", "masks"):
            (root / part / kind).mkdir(parents=True)
        Image.fromarray(values).save(root / part / "masks" / mask)
        Image.new("RGB", values.shape[1::-1]).save(root / part / "images" / "0.jpg")
    if names is not None:
        (root / "classes.txt").write_text(names)
    return root


HALF = np.repeat(np.array([0, 1], np.uint8), 32).reshape(8, 8)


@pytest.mark.parametrize("names", ["background\nlesion\n", None])
def test_masks_of_one_class_are_refused_with_the_ignored_value(tmp_path: Path, names: str | None):
    root = own_masks(tmp_path, HALF * 255, names)
    told = ", none of class 'lesion'" if names else ""
    with pytest.raises(UserError, match=rf"train/masks has only pixels of 0, 255{told}; 255 means ignored; write"):
        load_scenes(f"masks:{root}", want="classes")


def test_a_class_without_pixels_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    values = HALF.copy()
    values[0] = 255
    load_scenes(f"masks:{own_masks(tmp_path / 'a', values, 'sky,sea,sand'.replace(',', chr(10)))}", want="classes")
    told = capsys.readouterr().err
    assert "train/masks has no example of 'sand', so it cannot be learned; 255 means ignored" in told
    load_scenes(f"masks:{own_masks(tmp_path / 'b', HALF * 2)}", want="classes")
    assert "has no example of 'class 1'" in capsys.readouterr().err
    load_scenes(f"masks:{own_masks(tmp_path / 'c', HALF)}", want="classes")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("names", ["sky\nsea\n", None])
def test_numbers_that_only_test_masks_have_are_named(
    tmp_path: Path, names: str | None, capsys: pytest.CaptureFixture[str]
):
    root = own_masks(tmp_path, HALF, names)
    Image.fromarray(HALF * 255).save(root / "val" / "masks" / "0.png")
    load_scenes(f"masks:{root}", want="classes")
    assert "val/masks has pixels of 255, which " in capsys.readouterr().err


@pytest.mark.parametrize("names", ["sky\nsea\n", None])
@pytest.mark.parametrize(
    ("values", "mask", "message"),
    [
        (HALF, "0_mask.png", r"0\.jpg has no label image .*masks/0\.png, though there is 0_mask\.png"),
        (HALF, "0.jpg", r"has no label image .*masks/0\.png, though there is 0\.jpg"),
        (HALF, "00.png", r"has no label image .*masks/0\.png; add it"),
        (np.stack([HALF] * 3, -1), "0.png", r"masks/0\.png is a picture of mode RGB, with no class numbers"),
        (np.stack([HALF] * 4, -1), "0.png", r"masks/0\.png is a picture of mode RGBA, with no class numbers"),
    ],
)
def test_masks_that_are_not_found_or_are_no_numbers(
    tmp_path: Path, names: str | None, values: np.ndarray, mask: str, message: str
):
    with pytest.raises(UserError, match=message):
        load_scenes(f"masks:{own_masks(tmp_path, values, names, mask)}", want="classes")


def test_a_jpeg_under_the_name_of_a_mask(tmp_path: Path):
    root = own_masks(tmp_path, HALF, mask="0.jpg")
    for part in ("train", "val"):
        (root / part / "masks" / "0.jpg").rename(root / part / "masks" / "0.png")
    with pytest.raises(UserError, match=r"masks/0\.png is a JPEG, whose compression changes numbers"):
        load_scenes(f"masks:{root}", want="classes")


def test_numbers_of_many_bits_in_masks(tmp_path: Path):
    values = HALF.astype(np.uint16)
    assert load_scenes(f"masks:{own_masks(tmp_path / 'a', values)}", want="classes").classes == ["class 0", "class 1"]
    with pytest.raises(UserError, match=r"0\.png has the label 60000, out of range: classes are 0 to 254, 255 ignored"):
        load_scenes(f"masks:{own_masks(tmp_path / 'b', values * 60000)}", want="classes")
    data = load_scenes(f"masks:{own_masks(tmp_path / 'c', values * 7, chr(10).join('abcdefg'))}", want="classes")
    with pytest.raises(UserError, match=r"0\.png has the label 7, out of range: known are 0 to 6, 255"):
        data.train.scene(0)


@pytest.mark.parametrize(
    "head",
    [
        '<!DOCTYPE a [<!ENTITY a "' + "x" * 1000 + '">]>',
        '<!DOCTYPE a [<!ENTITY a "ha"><!ENTITY b "&a;&a;"><!ENTITY c "&b;&b;">]>',
        '<!DOCTYPE a [<!ENTITY a SYSTEM "file:///etc/hostname">]>',
    ],
)
def test_entities_in_annotations_are_refused(voc: Path, head: str):
    path = next((voc / "Annotations").glob("*.xml"))
    path.write_text(head + path.read_text().replace("<name>", "<name>&a;"))
    with pytest.raises(UserError, match=rf"{path.name} has a DOCTYPE, .*remove it"):
        load_scenes(f"voc:{voc}", want="boxes")


def test_names_of_voc_stay_in_its_folder_and_may_have_dots(voc: Path):
    image(voc / "JPEGImages" / "a.b.jpg")
    image(voc / "out.jpg")
    xml(voc / "Annotations" / "a.b.xml", ("cat", 1, 1, 5, 5))
    lines(voc / "ImageSets" / "Main" / "val.txt", "a.b")
    assert load_scenes(f"voc:{voc}", want="boxes").test.scene(0).objects is not None
    lines(voc / "ImageSets" / "Main" / "val.txt", "../out")
    with pytest.raises(UserError, match=r"JPEGImages/out\.jpg does not exist"):
        load_scenes(f"voc:{voc}", want="boxes")


def test_images_without_an_annotation_are_counted(voc: Path, capsys: pytest.CaptureFixture[str]):
    image(voc / "JPEGImages" / "z.jpg")
    train = voc / "ImageSets" / "Main" / "train.txt"
    train.write_text(train.read_text() + "\nz\n")
    load_scenes(f"voc:{voc}", want="boxes")
    told = capsys.readouterr().err
    assert "c.xml does not exist: 2 images of" in told
    assert "are background" in told
