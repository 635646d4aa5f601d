"""Detection and instance segmentation on made scenes: metrics, crowds, windows, answers, resuming, export, mistakes."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from pycocotools.mask import area, encode
from safetensors.torch import load_file
from torch import Tensor
from torchmetrics.detection import MeanAveragePrecision
from torchvision.ops import box_area, box_convert
from torchvision.transforms.functional import pil_to_tensor

import tokenmix
from predictions import check_predictions
from tokenmix.errors import UserError
from tokenmix.lab.data.scenes import Objects, Scene, SceneData, Scenes
from tokenmix.lab.tasks.detection import task as objects
from tokenmix.lab.tasks.detection.metrics import OVERLAPS, RECALLS, matched_rows, object_metrics
from tokenmix.lab.tasks.detection.task import Detection, class_color, draw_objects, find_in_windows, image_numbers
from tokenmix.lab.train.config import TrainConfig
from tokenmix.lab.train.export import export
from tokenmix.lab.train.load import load_run, load_task
from tokenmix.lab.train.metrics import joined
from tokenmix.lab.train.run import evaluate, predict, train
from tokenmix.lab.train.sources import make_config
from tokenmix.models.detection.pictures import PlacedMasks

CLASSES = ["green", "red"]


class Squares(Scenes):
    """One to three rectangles of plain green or red on grey noise; scene 0 of a part has none."""

    def __init__(self, count: int, seed: int, side: int = 64) -> None:
        self.count, self.seed, self.side = count, seed, side

    def __len__(self) -> int:
        return self.count

    def name(self, index: int) -> str:
        return f"squares {index}"

    def scene(self, index: int) -> Scene:
        generator = torch.Generator().manual_seed(1000 * self.seed + index)

        def draw(low: int, high: int) -> int:
            return int(torch.randint(low, high, (), generator=generator))

        image = (torch.rand(3, self.side, self.side, generator=generator) * 60 + 90).to(torch.uint8)
        boxes, labels = [], []
        for _ in range(draw(1, 4) if index else 0):
            width, height = draw(12, 28), draw(12, 28)
            left, top, label = draw(0, self.side - width), draw(0, self.side - height), draw(0, 2)
            image[:, top : top + height, left : left + width] = 20
            image[1 - label, top : top + height, left : left + width] = 250
            boxes.append([left, top, left + width, top + height])
            labels.append(label)
        masks = torch.zeros(len(boxes), self.side, self.side, dtype=torch.bool)
        for mask, (left, top, right, bottom) in zip(masks, boxes):
            mask[top:bottom, left:right] = True
        there = Objects(
            torch.tensor(boxes, dtype=torch.float32).view(-1, 4),
            torch.tensor(labels, dtype=torch.int64),
            masks,
            torch.zeros(len(boxes), dtype=torch.bool),
        )
        return Scene(image, self.name(index), objects=there, key=index)


def squares(spec: str, *, want: str, seed: int = 0, root: Path | None = None) -> SceneData:
    one = spec == "one-class"
    return SceneData(
        spec=spec,
        train=Squares(10, 1),
        test=Squares(3, 2),
        classes=CLASSES[:1] if one else CLASSES,
        palette=[(0, 255, 0), (255, 0, 0)],
        mean=(0.45,) * 3,
        std=(0.2,) * 3,
        source="made by the test",
        notes={"category_ids": [7, 9]},
    )


@pytest.fixture(autouse=True)
def made_scenes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "load_scenes", squares)


def config(out: Path, **changes: Any) -> TrainConfig:
    given: dict[str, Any] = {
        "task": "detection",
        "model": "retinanet_nano",
        "data": "squares",
        "epochs": 1,
        "batch_size": 4,
        "lr": 1e-3,
        "device": "cpu",
        "threads": 1,
        "log_every": 1,
        "out": out,
        "min_size": 64,
        "max_size": 64,
        "score": 0.0,
        "shown": 0.0,
        "detections": 5,
        "validation": 2,
    }
    return make_config(**{**given, **changes})


def test_the_validation_images_are_a_tenth_of_the_images_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many = dataclasses.replace(squares("squares", want="boxes"), train=Squares(200, 1))
    monkeypatch.setattr(objects, "load_scenes", lambda *_, **__: many)
    for limit, validation in [(None, 20), (8, 0), (150, 15)]:
        asked = config(tmp_path, validation=None, limit=limit)
        assert len(asked.task_class.load_data(asked).validation or ()) == validation


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, made = tmp_path_factory.mktemp("objects"), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(objects, "load_scenes", squares)
        made["boxes"] = train(config(folder / "boxes"), quiet=True)
        made["masks"] = train(
            config(folder / "masks", task="instance-segmentation", model="mask_rcnn_nano"), quiet=True
        )
    return made


def found_and_there(seed: int) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """What is found in six images and what is there, with masks, crowds and objects of all sizes."""
    generator = torch.Generator().manual_seed(seed)
    found, there = [], []
    for _ in range(4):
        corner = torch.rand(6, 2, generator=generator) * 100
        boxes = torch.cat([corner, corner + 8 + torch.rand(6, 2, generator=generator) * 100], 1)
        labels = torch.tensor([0, 1, 0, 2, 2, 0])
        moved = boxes + torch.rand(6, 4, generator=generator) * 8
        found.append({"boxes": moved, "scores": torch.rand(6, generator=generator), "labels": labels.flip(0).roll(1)})
        found[-1]["labels"][:3] = labels[:3]
        there.append({"boxes": boxes, "labels": labels, "iscrowd": torch.tensor([0, 0, 1, 0, 1, 0])})
    nothing = {name: values[:0] for name, values in there[0].items()}
    found += [{**{name: nothing[name] for name in ("boxes", "labels")}, "scores": torch.empty(0)}, found[0]]
    there += [there[1], nothing]
    for one in (*found, *there):
        left, top, right, bottom = one["boxes"].round().long().clamp_min(0).unbind(1)
        one["masks"] = torch.zeros(len(left), 220, 220, dtype=torch.bool)
        for mask, l, t, r, b in zip(one["masks"], left, top, right, bottom):
            mask[t:b, l:r] = True
    return found, there


def measured(found: list[dict[str, Tensor]], there: list[dict[str, Tensor]], want: Any, classes: int) -> dict[str, Any]:
    """The numbers of images, and the entries of `per_class` as a list."""
    full = [
        {"iscrowd": torch.zeros(len(one["labels"])), "area": box_area(one["boxes"]), **one, "labels": one["labels"]}
        for one in there
    ]
    each = enumerate(zip(found, full, strict=True))
    rows = joined([matched_rows(one, true, index, want) for index, (one, true) in each])
    numbers = {name: metric(rows) for name, metric in object_metrics(want, [str(i) for i in range(classes)]).items()}
    return {name: list(value.values()) if isinstance(value, dict) else value for name, value in numbers.items()}


def by_pycocotools(found: list[dict[str, Tensor]], there: list[dict[str, Tensor]], kind: Any) -> dict[str, Any]:
    """The same numbers by COCO's own program."""
    sides = COCO(), COCO()
    for side, images in zip(sides, (found, there)):
        rows: list[dict[str, Any]] = []
        for number, image in enumerate(images):
            boxes = box_convert(image["boxes"], "xyxy", "xywh").double()
            for i, (left, top, width, height) in enumerate(boxes.tolist()):
                mask = encode(np.asfortranarray(image["masks"][i].byte().numpy()))
                own = {"bbox": width * height, "segm": float(area(mask))}[kind]
                row = {"image_id": number, "id": len(rows) + 1, "bbox": [left, top, width, height], "area": own}
                row |= {"category_id": int(image["labels"][i]), "segmentation": mask, "iscrowd": 0}
                if "scores" in image:
                    row["score"] = float(image["scores"][i])
                else:
                    row |= {"iscrowd": int(image["iscrowd"][i]), "area": float(box_area(image["boxes"])[i])}
                rows.append(row)
        side.dataset = {
            "images": [{"id": i, "height": 220, "width": 220} for i in range(len(images))],
            "categories": [{"id": label} for label in range(4)],
            "annotations": rows,
        }
        side.createIndex()
    evaluation = COCOeval(sides[1], sides[0], kind)
    evaluation.params.maxDets = [100]
    evaluation.evaluate()
    evaluation.accumulate()

    def mean(values: np.ndarray) -> float:
        known = values[values > -1]
        return float(known.mean()) if known.size else -1.0

    precision, recall = (evaluation.eval[name][..., 0] for name in ("precision", "recall"))
    whole = precision[..., 0]
    return {
        "map": mean(whole),
        "map_50": mean(whole[0]),
        "map_75": mean(whole[5]),
        **{name: mean(precision[..., i]) for i, name in enumerate(("map_small", "map_medium", "map_large"), 1)},
        "mar": mean(recall[..., 0]),
        "per_class": [mean(whole[:, :, label]) for label in range(4)],
    }


@pytest.mark.parametrize("want", ["boxes", "masks"])
@pytest.mark.parametrize("seed", range(3))
def test_average_precision_is_cocos(want: Any, seed: int):
    """With crowds, and with images in which nothing is found or nothing is there; of masks and of their boxes."""
    found, there = found_and_there(seed)
    mine = measured(found, there, want, 4)
    assert 0.02 < mine["map"] < 0.98
    for prefix, kind in {"": "bbox" if want == "boxes" else "segm", "box_": "bbox"}.items():
        if prefix == "" or want == "masks":
            for name, value in by_pycocotools(found, there, kind).items():
                assert mine[f"{prefix}{name}"] == pytest.approx(value, abs=1e-6), f"{prefix}{name}"


@pytest.mark.parametrize("side", [5.0, 6.0, 8.0, 9.5, 10.0])
def test_overlaps_and_recalls_of_whole_numbers_are_cocos(side: float):
    """An overlap of 0.6 is at least 0.6, and three objects of five are a recall of 0.6."""
    boxes = torch.tensor([[20.0 * i, 0, 20 * i + 10, 10] for i in range(5)])
    labels, masks = torch.zeros(5, dtype=torch.long), torch.zeros(5, 1, 220, dtype=torch.bool)
    there = {"boxes": boxes, "labels": labels, "masks": masks, "iscrowd": labels}
    cut = boxes[:3].clone()
    cut[0, 3] = side
    found = {"boxes": cut, "labels": labels[:3], "masks": masks[:3], "scores": torch.tensor([0.9, 0.8, 0.7])}
    mine, theirs = measured([found], [there], "boxes", 4), by_pycocotools([found], [there], "bbox")
    assert mine["map"] == pytest.approx(theirs["map"], abs=1e-6)
    assert mine["mar"] == pytest.approx(theirs["mar"], abs=1e-6)


def test_an_image_that_stands_for_an_unreadable_one_does_not_count():
    found, there = found_and_there(0)
    full = [{"area": box_area(one["boxes"]), **one} for one in there]
    indices = [*range(len(found)), -1]
    rows = [matched_rows(found[i], full[i], i, "boxes") for i in indices]
    once, again = joined(rows[:-1]), joined([joined(rows[-1:]), *rows[:-1]])
    assert once.keys() == again.keys()
    assert all(once[name].equal(again[name]) for name in once)


def test_average_precision_is_torchmetrics():
    found, there = found_and_there(0)
    there = [{**one, "iscrowd": torch.zeros_like(one["labels"])} for one in there]
    # Its own thresholds are in single precision.
    theirs = MeanAveragePrecision(iou_thresholds=OVERLAPS.tolist(), rec_thresholds=RECALLS.tolist())
    theirs.update(found, [{**one, "area": box_area(one["boxes"])} for one in there])
    mine, yours = measured(found, there, "boxes", 4), theirs.compute()
    for name, other in {"map": "map", "map_small": "map_small", "map_large": "map_large", "mar": "mar_100"}.items():
        assert mine[name] == pytest.approx(yours[other].item(), abs=1e-6), name


@pytest.mark.parametrize(("area", "size"), [(300.0, "small"), (0.0, "small"), (2000.0, "medium"), (1e4, "large")])
@pytest.mark.parametrize("want", ["boxes", "masks"])
def test_the_size_class_of_an_object_is_that_of_its_area(area: float, size: str, want: Any):
    mask = torch.zeros(1, 80, 80, dtype=torch.bool)
    mask[0, 10:60, 10:60] = True
    there = {"boxes": torch.tensor([[10.0, 10, 60, 60]]), "labels": torch.tensor([0]), "masks": mask}
    found = measured([{**there, "scores": torch.tensor([0.9])}], [{**there, "area": torch.tensor([area])}], want, 1)
    for prefix in ("",) if want == "boxes" else ("", "box_"):
        values = {name: found[f"{prefix}map_{name}"] for name in ("small", "medium", "large")}
        assert values.pop(size) == pytest.approx(1.0)
        assert set(values.values()) == {-1.0}


def test_nothing_there_and_nothing_found():
    none = {"boxes": torch.empty(0, 4), "labels": torch.empty(0, dtype=torch.int64)}
    found = measured([{**none, "scores": torch.empty(0)}], [none], "boxes", 2)
    assert found["map"] == found["mar"] == -1
    assert found["per_class"] == [-1, -1]


def test_images_without_masks_count():
    """What is missed in an image without answers, and what is found in one without objects."""
    mask = torch.zeros(1, 40, 40, dtype=torch.bool)
    mask[0, 5:20, 5:20] = True
    one = {"boxes": torch.tensor([[5.0, 5, 20, 20]]), "labels": torch.tensor([0]), "masks": mask}
    none = {key: value[:0] for key, value in one.items()}
    assert measured([{**none, "scores": torch.empty(0)}], [one], "masks", 1)["map"] == 0
    answers = [{**one, "scores": torch.tensor([score])} for score in (0.8, 0.9)]
    assert measured(answers, [one, none], "masks", 1)["map"] == pytest.approx(0.5)


def task_of(kind: Any, tmp_path: Path, **changes: Any) -> Any:
    made = config(tmp_path, **changes)
    description = json.loads(json.dumps(kind.load_data(made).describe()))
    torch.manual_seed(0)
    return kind(kind.build_model(made, description), made, description)


def test_crowds_are_neither_learnt_nor_wrong(tmp_path: Path):
    task = task_of(Detection, tmp_path)
    seen: list[Any] = []
    task.model.forward = lambda images, targets=None: seen.append(targets) or {"loss": torch.zeros(())}
    target = {
        "boxes": torch.tensor([[0.0, 0, 10, 10], [20, 20, 60, 60]]),
        "labels": torch.tensor([0, 0]),
        "iscrowd": torch.tensor([False, True]),
        "area": torch.tensor([100.0, 1600.0]),
        "image_id": torch.tensor(3),
    }
    task.loss({"images": [torch.rand(3, 64, 64)], "targets": [target]})
    assert seen[0][0]["boxes"].tolist() == [[0, 0, 10, 10]]
    # One box on the object, one of the highest score in the crowd: the second is left out of the account.
    answer = {
        "boxes": torch.tensor([[0.0, 0, 10, 10], [25, 25, 50, 50]]),
        "labels": torch.tensor([0, 0]),
        "scores": torch.tensor([0.5, 0.9]),
    }
    task.find = lambda images: [answer]
    for crowd, expected in ((True, 1.0), (False, None)):
        targets = [{**target, "iscrowd": torch.tensor([False, crowd])}]
        rows = task.evaluate({"images": [None], "targets": targets, "index": torch.tensor([0])})
        value = task.metrics["map"](rows)
        assert value == pytest.approx(expected) if expected is not None else value < 0.9


def perfect(objects_there: Tensor, labels: Tensor, *, with_masks: bool = False) -> Any:
    """A detector that finds what of the objects is in a window, whose place it reads from the pixels."""

    def detect(images: Any) -> list[dict[str, Tensor]]:
        answers = []
        for image in images:
            left, top = image[0, 0, 0], image[1, 0, 0]
            height, width = image.shape[1:]
            moved = objects_there - torch.stack([left, top, left, top])
            cut = torch.stack(
                [
                    moved[:, 0].clamp(0, width),
                    moved[:, 1].clamp(0, height),
                    moved[:, 2].clamp(0, width),
                    moved[:, 3].clamp(0, height),
                ],
                1,
            )
            keep = ((cut[:, 2:] - cut[:, :2]) > 3).all(1)
            # A piece is surer than the whole: it must lose all the same.
            area = (cut[:, 2:] - cut[:, :2]).prod(1)
            found = {"boxes": cut[keep], "labels": labels[keep], "scores": 1 - area[keep] / 1e4}
            if with_masks:
                masks = torch.zeros(len(cut), height, width, dtype=torch.bool)
                for mask, (a, b, c, d) in zip(masks, cut.int().tolist()):
                    mask[b:d, a:c] = True
                found["masks"] = PlacedMasks([(mask, 0, 0) for mask in masks[keep]], (height, width))
            answers.append(found)
        return answers

    return detect


@pytest.mark.parametrize("with_masks", [False, True])
def test_windows_find_each_object_once_and_whole(with_masks: bool):
    y, x = torch.meshgrid(torch.arange(150.0), torch.arange(230.0), indexing="ij")
    image = torch.stack([x, y, x])
    there = torch.tensor(
        [[5.0, 5, 25, 30], [50, 40, 75, 70], [90, 10, 115, 30], [200, 120, 230, 150], [60, 60, 85, 88]]
    )
    labels = torch.tensor([0, 1, 0, 1, 0])
    found = find_in_windows(
        perfect(there, labels, with_masks=with_masks), image, window=64, overlap=0.5, nms=0.5, count=100
    )
    order = torch.cdist(there, found["boxes"]).argmin(1)
    assert len(found["boxes"]) == 5
    torch.testing.assert_close(found["boxes"][order], there)
    assert torch.equal(found["labels"][order], labels)
    if with_masks:
        sizes = (there[:, 2:] - there[:, :2]).prod(1)
        torch.testing.assert_close(found["masks"].dense()[order].flatten(1).sum(1).float(), sizes)


def test_an_object_larger_than_the_overlap_is_not_lost():
    y, x = torch.meshgrid(torch.arange(64.0), torch.arange(120.0), indexing="ij")
    there = torch.tensor([[20.0, 20, 100, 40]])
    found = find_in_windows(
        perfect(there, torch.tensor([0])), torch.stack([x, y, x]), window=64, overlap=0.25, nms=0.5, count=9
    )
    assert len(found["boxes"]) >= 1


@pytest.mark.parametrize("kind", ["boxes", "masks"])
def test_a_run_has_its_numbers(kind: str, runs: dict[str, Path]):
    result = json.loads((runs[kind] / "result.json").read_text())
    header = (runs[kind] / "metrics.csv").read_text().splitlines()[0].split(",")
    logged = (
        {"train_classification", "train_bbox_regression"} if kind == "boxes" else {"train_loss_mask", "val_box_map"}
    )
    assert {"val_map", "val_map_50", "val_map_small", *logged} <= set(header)
    assert set(result["final"]["per_class"]) == set(CLASSES)
    assert result["macs"] > 0
    again = evaluate(runs[kind], device="cpu")
    assert again["map"] == pytest.approx(result["metrics"]["map"])
    assert again["samples"] == 3


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"min_size": 24}, "photographs of 64 x 64 px are scaled down by 2.7 to 24 x 24 px; a larger --min-size keeps"),
        ({"min_size": 24, "window": 48}, ""),
        ({"min_size": None, "img_size": 20}, "scaled down by 3.2 to 20 x 20 px; a larger --img-size"),
        ({}, ""),
    ],
)
def test_photographs_that_lose_most_of_their_pixels_are_said(
    changes: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    chosen = config(tmp_path, **changes)
    data = chosen.task_class.load_data(chosen)
    told = capsys.readouterr().err
    assert said in told if said else "scaled down" not in told
    assert data.describe()["img_size"] == 2 * [changes.get("img_size") or changes.get("min_size", 64)]


def test_eval_takes_other_settings(runs: dict[str, Path]):
    fewer = evaluate(runs["boxes"], device="cpu", options={"detections": 1, "window": 48})
    assert fewer["mar"] <= evaluate(runs["boxes"], device="cpu")["mar"]


@pytest.mark.parametrize("kind", ["boxes", "masks"])
def test_answers_as_rows_pictures_and_cocos_results(kind: str, runs: dict[str, Path], tmp_path: Path):
    scene = Squares(3, 2, side=72).scene(1)
    file = tmp_path / "000000000042.png"
    Image.fromarray(scene.image.permute(1, 2, 0).numpy()).save(file)
    rows = predict(runs[kind], [file])
    assert rows == predict(runs[kind], [file], tmp_path / "out")
    assert {row["label"] for row in rows} <= set(CLASSES)
    assert len(rows) == 5
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [round(value, 1) for value in results[0]["bbox"]] == pytest.approx(rows[0]["box"], abs=0.11)
    assert {entry["image_id"] for entry in results} == {42}
    assert {entry["category_id"] for entry in results} <= {7, 9}
    assert ("segmentation" in results[0]) == (kind == "masks")
    assert Image.open(tmp_path / "out" / "000000000042-overlay.png").size == (72, 72)
    assert cocos_own_tools_read(tmp_path / "out" / "results.json") == len(results)


def test_objects_are_drawn_in_the_colours_of_their_classes():
    image = Image.new("L", (240, 240), 90)
    boxes = torch.tensor([[20.0, 20, 80, 80], [120, 120, 200, 200]])
    found = {"boxes": boxes, "labels": torch.tensor([3, 11]), "scores": torch.tensor([0.9, 0.8])}
    drawn = pil_to_tensor(draw_objects(image, found=found, classes=list("abcdefghijkl")))
    assert drawn[:, 80, 50].tolist() == list(class_color(3))
    assert drawn[:, 200, 160].tolist() == list(class_color(11)) == list(class_color(1))
    assert drawn[:, 10, 150].tolist() == [90, 90, 90]
    assert len({class_color(label) for label in range(10)}) == 10


def cocos_own_tools_read(file: Path) -> int:
    """How many results pycocotools takes from the file for an image 42 of categories 7 and 9."""
    from pycocotools.coco import COCO

    truth = COCO()
    truth.dataset = {
        "info": {},
        "images": [{"id": 42, "width": 72, "height": 72}],
        "annotations": [],
        "categories": [{"id": 7, "name": "green"}, {"id": 9, "name": "red"}],
    }
    truth.createIndex()
    return len(truth.loadRes(str(file)).anns)


def test_answers_never_lie_over_the_image_or_each_other(runs: dict[str, Path], tmp_path: Path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        Image.new("RGB", (40, 40), "grey").save(tmp_path / folder / "one.png")
    before = (tmp_path / "a" / "one.png").read_bytes()
    predict(runs["boxes"], [tmp_path / "a" / "one.png"], tmp_path / "a")
    assert (tmp_path / "a" / "one.png").read_bytes() == before
    with pytest.raises(UserError, match=r"a/one\.png and .*b/one\.png have the same name"):
        predict(runs["boxes"], [tmp_path / "a" / "one.png", tmp_path / "b" / "one.png"], tmp_path / "out")


def test_maps_lie_over_the_whole_image(runs: dict[str, Path], tmp_path: Path):
    scene = Squares(3, 2, side=72).scene(1)
    image = scene.image[:, :36]
    file = tmp_path / "wide.png"
    Image.fromarray(image.permute(1, 2, 0).numpy()).save(file)
    model, _, description = load_run(runs["boxes"])
    view = Detection.view(model.eval(), file, description)
    # 72 pixels become 64, the most that this run looks at, and 36 become 32; no padding of the square is looked at.
    assert view.shown.shape == (3, 32, 64)
    small = torch.nn.functional.interpolate(image[None] / 255, (32, 64), mode="bilinear")[0]
    torch.testing.assert_close(view.shown, small, atol=2e-2, rtol=0)


def test_no_answer_is_a_row_too(runs: dict[str, Path], tmp_path: Path):
    Image.new("L", (50, 40), 7).save(tmp_path / "grey.png")
    (row,) = predict(runs["boxes"], [tmp_path / "grey.png"], tmp_path / "out", options={"shown": 1.0})
    assert row["label"] is None
    with pytest.raises(UserError, match=r"gone\.png does not exist"):
        predict(runs["boxes"], [tmp_path / "gone.png"])
    with pytest.raises(UserError, match=r"gone\.png does not exist"):
        predict(runs["boxes"], [tmp_path / "gone.png"], tmp_path / "new")
    assert not (tmp_path / "new").exists()
    before = sorted((tmp_path / "out").iterdir())
    with pytest.raises(UserError, match=r"gone\.png does not exist"):
        predict(runs["boxes"], [tmp_path / "gone.png"], tmp_path / "out")
    assert sorted((tmp_path / "out").iterdir()) == before


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["000000000042.jpg", "7.png"], [42, 7]),
        (["cat.jpg", "1.jpg"], [0, 1]),
        (["cat.jpg", "0.jpg"], [0, 1]),
        (["01.jpg", "1.jpg"], [0, 1]),
        (["COCO_val2014_000000000042.jpg", "COCO_val2014_000000000073.jpg"], [42, 73]),
        (["COCO_test2015_000000000001.jpg", "000000000016.jpg", "frame7.png"], [1, 16, 7]),
        (["COCO_val2014_000000000042.jpg", "COCO_train2014_000000000042.jpg"], [0, 1]),
        (["2024_left.jpg", "2025_left.jpg"], [0, 1]),
        (["1" * 40 + ".jpg", "2.jpg"], [0, 1]),
        ([], []),
    ],
)
def test_no_two_images_have_one_number(names: list[str], expected: list[int]):
    assert image_numbers(names) == expected


def test_resuming_changes_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    whole = train(config(tmp_path / "whole", epochs=2, model="faster_rcnn_nano"), quiet=True)
    part = config(tmp_path / "part", epochs=2, model="faster_rcnn_nano", checkpoint_every=1)
    original = Detection.loss

    def stopping(self: Detection, batch: Any) -> Any:
        if len(calls) == 3:
            raise KeyboardInterrupt
        calls.append(0)
        return original(self, batch)

    calls: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(Detection, "loss", stopping)
        with pytest.raises(BaseException):  # noqa: B017  (how Lightning lets an interrupt out is its own affair)
            train(part, quiet=True)
    assert not (tmp_path / "part" / "result.json").exists()
    train(make_config(resume=tmp_path / "part", threads=1, device="cpu"), quiet=True)
    a, b = (load_file(folder / "checkpoints" / "last" / "model.safetensors") for folder in (whole, tmp_path / "part"))
    assert all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.slow
@pytest.mark.parametrize("file_format", ["torch-export", "onnx"])
def test_retinanet_is_exported_before_nms(file_format: Any, runs: dict[str, Path], tmp_path: Path):
    assert export(runs["boxes"], file_format, tmp_path / "model").exists()


def test_exported_boxes_are_the_detectors(runs: dict[str, Path]):
    task = load_task(runs["boxes"])
    description = task.data
    image = torch.rand(3, 64, 64)
    answers = task.inference_module().eval()(image[None])[0]
    assert answers.shape[1] == 4 + len(description["classes"])
    found = task.model([image])[0]
    apart = (found["boxes"][:, None] - answers[None, :, :4].clamp(0, 64)).abs().amax(2)
    assert apart.min(1).values.max() < 1e-3


def test_masks_are_not_exported(runs: dict[str, Path]):
    with pytest.raises(UserError, match="cannot be exported"):
        export(runs["masks"], "onnx")


def test_one_class_and_bfloat16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    original = Squares.scene

    def of_one_class(self: Squares, index: int) -> Scene:
        scene = original(self, index)
        assert scene.objects is not None
        return dataclasses.replace(
            scene, objects=dataclasses.replace(scene.objects, labels=torch.zeros_like(scene.objects.labels))
        )

    monkeypatch.setattr(Squares, "scene", of_one_class)
    run = train(config(tmp_path / "run", data="one-class", precision="bf16-mixed"), quiet=True)
    assert set(json.loads((run / "result.json").read_text())["final"]["per_class"]) == {"green"}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model": "retinanet_nan"}, "retinanet_nano"),
        ({"model": "mask_rcnn_nano"}, "instance-segmentation"),
        ({"task": "instance-segmentation"}, "is a model of detection"),
        ({"precision": "bf16"}, "bf16-mixed"),
        ({"mixup": 0.5}, "mixup"),
        ({"augment": "rand-m9"}, "none, light"),
        ({"model_kwargs": {"num_classes": 3}}, "--data"),
        ({"model": "retinanet_lavit_tiny"}, "--img-size"),
        ({"window": 3}, "window must be at least 16, or none; got 3"),
        ({"overlap": 1.0}, "overlap"),
        ({"score": 2.0}, "score"),
        ({"detections": 0}, "detections"),
        ({"windw": 64}, "window"),
        ({"augment": "none", "scales": (0.5, 2.0)}, "augmentation"),
    ],
)
def test_mistakes_are_told(changes: dict[str, Any], told: str, tmp_path: Path):
    with pytest.raises(UserError, match=told):
        train(config(tmp_path / "run", **changes), quiet=True)
    assert not (tmp_path / "run" / "config.json").exists()


def test_another_set_must_have_the_classes_of_the_run(runs: dict[str, Path]):
    with pytest.raises(UserError, match="green"):
        evaluate(runs["boxes"], "one-class", device="cpu")


def test_a_detector_whose_attention_cannot_be_swapped_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no attention that can be swapped: what it has is net\.backbone\.body\.block"):
        train(config(tmp_path / "run", swap="external"), quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_run_with_an_inserted_block(runs: dict[str, Path], tmp_path: Path):
    block: dict[str, Any] = {
        "insert": "external",
        "insert_after": "net.backbone.fpn.layer_blocks.0",
        "insert_kwargs": {"num_slots": 4},
    }
    run = train(config(tmp_path / "run", **block, init_from=runs["boxes"], train_only="mixers"), quiet=True)
    before, after = (
        load_file(folder / "checkpoints" / "last" / "model.safetensors") for folder in (runs["boxes"], run)
    )
    assert all(torch.equal(before[name], after[name]) for name in before)
    new = after.keys() - before.keys()
    assert new
    assert all(".layer_blocks.0.inserted." in name for name in new)
    result = json.loads((run / "result.json").read_text())
    assert evaluate(run, device="cpu")["map"] == pytest.approx(result["metrics"]["map"])
    Image.new("RGB", (64, 64)).save(tmp_path / "plain.png")
    assert predict(run, [tmp_path / "plain.png"])


def test_a_start_from_a_run_keeps_its_image_size(runs: dict[str, Path], tmp_path: Path) -> None:
    none = dict.fromkeys(("min_size", "max_size", "img_size"))
    start, given = (config(tmp_path, init_from=runs["boxes"], **{**none, **size}) for size in ({}, {"min_size": 32}))
    kept, own = (Detection.with_absolute_paths(one).options for one in (start, given))
    assert (kept.min_size, kept.max_size, kept.img_size) == ((64,), 64, None)
    assert (own.min_size, own.max_size) == ((32,), None)


@pytest.mark.parametrize("kind", ["boxes", "masks"])
def test_predictions_are_kept(runs: dict[str, Path], kind: str) -> None:
    check_predictions(runs[kind], {"map", "map_50", "map_75", "map_small", "mar"})


@pytest.mark.parametrize("kind", ["boxes", "masks"])
def test_a_report_shows_what_is_there(kind: str, runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "load_scenes", squares)
    task = load_task(runs[kind])
    settings = task.config
    batch = next(iter(task.load_data(settings).test_batches(batch_size=2)))
    for one, image, target in zip(task.eval().show(batch), batch["images"], batch["targets"], strict=True):
        assert isinstance(one.truth, Image.Image)
        drawn = (pil_to_tensor(one.truth) != image.mul(255).byte()).any(0)
        there = target["masks"].any(0) if kind == "masks" else torch.zeros_like(drawn)
        assert drawn[there.bool()].float().mean().nan_to_num(1.0) > 0.9
        assert drawn.any() == (len(target["labels"]) > 0)


@pytest.mark.parametrize(
    ("task", "model"), [("detection", "retinanet_nano"), ("instance-segmentation", "mask_rcnn_nano")]
)
def test_mean_boxes_find_what_is_always_in_one_place(
    task: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The simplest method has one right box of a class that stays, and misses the one that moves."""
    whole = Squares.scene

    def scene(self: Squares, index: int) -> Scene:
        found = whole(self, 1)
        generator = torch.Generator().manual_seed(self.seed * 100 + index)
        left, top = torch.randint(0, 40, (2,), generator=generator).tolist()
        places = torch.tensor([[8.0, 8, 24, 30], [left, top, left + 20, top + 20]])
        masks = torch.zeros(2, self.side, self.side, dtype=torch.bool)
        for mask, (x0, y0, x1, y1) in zip(masks, places.int().tolist()):
            mask[y0:y1, x0:x1] = True
        there = Objects(places, torch.tensor([0, 1]), masks, torch.zeros(2, dtype=torch.bool))
        return dataclasses.replace(found, objects=there, key=index)

    monkeypatch.setattr(Squares, "scene", scene)
    made = config(tmp_path, task=task, model=model, augment="light", crop=48, batch_size=2)
    kind = made.task_class
    data = kind.load_data(made)
    description = json.loads(json.dumps(data.describe(), default=str))
    one = kind(kind.model_from_config(made, description), made, description)
    ((name, rows),) = one.plain_answers(data).items()
    assert name == "mean boxes"
    assert {len(batch["images"]) for batch in data.test_batches(batch_size=2)} == {1}, "without the padding of others"
    assert 0.5 <= float(one.metrics["map"](rows)) < 0.8  # 1 for the class that stays


def test_a_comparison_inserts_a_block_in_a_detector(tmp_path: Path) -> None:
    """Its costs are counted on a device, since a detector finds no boxes on meta."""
    given = {
        name: value for name, value in config(tmp_path).flat().items() if name in ("min_size", "max_size", "score")
    }
    found = tokenmix.compare(
        task="detection",
        model="retinanet_nano",
        data="squares",
        mixers=["external"],
        insert_after="net.backbone.body.net.layer3",
        max_steps=1,
        batch_size=4,
        validation=2,
        threads=1,
        out=tmp_path / "out",
        quiet=True,
        **given,
    )
    (results,) = found.comparisons.values()
    assert [variant.name for variant in results.variants] == ["none", "external", "identity"]
    assert all(variant.macs for variant in results.variants)
    assert "mean boxes" in results.baselines
