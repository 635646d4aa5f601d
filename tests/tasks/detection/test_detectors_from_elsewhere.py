"""torchvision's detectors by name and those of a user's function: trained, compared, opened again; mistakes."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from test_objects import config, squares
from torchvision.models import get_model, get_model_weights

import tokenmix
from tokenmix.errors import UserError
from tokenmix.lab import cli
from tokenmix.lab.data.scenes import SceneData
from tokenmix.lab.tasks.detection import task as objects
from tokenmix.lab.train.load import load_task
from tokenmix.lab.train.run import evaluate, predict, train
from tokenmix.layers import Capabilities, Mixer
from tokenmix.models.detection.other import other_detector
from tokenmix.trust import typed

CHOSEN = {"score": 0.0, "nms": 0.5, "detections": 5}
BOXES = ("faster", "retina", "fcos", "ssd")


class Shifted(Mixer):
    """Each token gets the one before."""

    capabilities = Capabilities(map=None, mask=False, equivariant=False, linear=True)

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return x.roll(1, dims=1)

    def macs(self, num_tokens: int) -> int:
        return 0


def scenes(spec: str, **given: Any) -> SceneData:
    data = squares(spec, **given)
    return dataclasses.replace(data, classes=[*data.classes, "blue"]) if spec == "three" else data


@pytest.fixture(autouse=True)
def _made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "load_scenes", scenes)
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "plugins")


def theirs(out: Path, kind: str, **changes: Any) -> Any:
    task = "instance-segmentation" if kind == "masks" else "detection"
    given = {"task": task, "model": f"toy_detectors:{kind}", "min_size": None, "max_size": None}
    return config(out, **{**given, **changes})


@pytest.mark.parametrize("model", ["faster_rcnn_nano", "retinanet_nano"])
def test_a_mixer_of_the_user_trains_in_our_detectors(model: str, tmp_path: Path) -> None:
    mixer = f"{__name__}:Shifted"
    with typed(mixer):
        run = train(config(tmp_path / "run", model=model, model_kwargs={"mixer": mixer}), quiet=True)
    assert evaluate(run)["samples"] == 3


@pytest.mark.parametrize("kind", [*BOXES, "masks"])
def test_a_detector_trains_and_opens_again(kind: str, tmp_path: Path) -> None:
    run = train(theirs(tmp_path / "run", kind, insert="external", insert_after="backbone.deep"), quiet=True)
    tokenmix.registry.load_plugin("toy_detectors")
    metrics = evaluate(run)
    assert metrics["samples"] == 3
    task = load_task(run)
    # Names of modules are the detector's own.
    assert "backbone.stem.0.weight" in task.model.state_dict()
    (found,) = task.find([torch.rand(3, 50, 70)])
    assert set(found["labels"].tolist()) <= {0, 1}
    file = tmp_path / "a.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (50, 70, 3), np.uint8)).save(file)
    assert predict(run, [file])[0]["label"] in ("green", "red", None)
    assert [block.kind for block in tokenmix.inspect(run, file).maps] == ["slots"]


@pytest.mark.parametrize("kind", BOXES)
def test_losses_are_torchvisions_with_label_0_as_background(kind: str) -> None:
    import toy_detectors

    torch.manual_seed(0)
    with typed(name := f"toy_detectors:{kind}"):
        ours: Any = other_detector(name, num_classes=2, masks=False, **CHOSEN).train()
    torch.manual_seed(0)
    plain = getattr(toy_detectors, kind)(3).train()
    plain.load_state_dict(ours.state_dict())
    boxes = torch.tensor([[5.0, 5.0, 30.0, 40.0], [20.0, 10.0, 60.0, 60.0]])
    targets = [{"boxes": boxes, "labels": torch.tensor([0, 1])}]
    images = [torch.rand(3, 64, 64)]
    torch.manual_seed(1)
    expected = plain(images, [{"boxes": boxes, "labels": torch.tensor([1, 2])}])
    torch.manual_seed(1)
    found = ours(images, targets)
    torch.testing.assert_close(dict(found), dict(expected), rtol=0, atol=0)
    assert targets[0]["labels"].tolist() == [0, 1]


@pytest.mark.parametrize("name", ["fasterrcnn_mobilenet_v3_large_320_fpn", "ssdlite320_mobilenet_v3_large"])
def test_multiply_adds_are_the_published_ones(name: str) -> None:
    weights: Any = get_model_weights(name)
    model: Any = other_detector(f"torchvision:{name}", num_classes=90, masks=False, **CHOSEN)
    # That detector was counted on an image of 4 : 3, brought to 320 x 427 or so.
    if "320_fpn" not in name:
        assert round(model.macs() / 1e9, 3) == weights.DEFAULT.meta["_ops"]
    assert model.img_size == (320, 320)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "fasterrcnn_resnet50_fpn",
        "maskrcnn_resnet50_fpn_v2",
        "retinanet_resnet50_fpn",
        "fcos_resnet50_fpn",
        "ssd300_vgg16",
    ],
)
def test_multiply_adds_of_large_ones(name: str) -> None:
    weights: Any = get_model_weights(name)
    given = {**CHOSEN, "detections": 100}
    model: Any = other_detector(f"torchvision:{name}", num_classes=90, masks="mask" in name, **given)
    assert model.macs() / 1e9 == pytest.approx(weights.DEFAULT.meta["_ops"], abs=1e-3)


def test_weights_for_other_classes_keep_all_but_the_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "ssdlite320_mobilenet_v3_large"
    whole = get_model(name, weights=None, weights_backbone=None).state_dict()
    rows: Any = get_model_weights(name)
    monkeypatch.setattr(type(rows.DEFAULT), "get_state_dict", lambda *args, **kwargs: whole)
    model = other_detector(f"torchvision:{name}", num_classes=3, masks=False, pretrained=True, **CHOSEN)
    differing = {key for key, value in model.state_dict().items() if not torch.equal(value, whole[key])}
    assert differing
    assert all(".classification_head." in key for key in differing)


def test_the_size_in_the_folder_is_the_one_that_was_asked_for(tmp_path: Path) -> None:
    run = train(theirs(tmp_path / "run", "faster", min_size=48, max_size=64, max_steps=1), quiet=True)
    tokenmix.registry.load_plugin("toy_detectors")
    assert load_task(run).data["img_size"] == [48, 48]


def test_a_run_with_other_classes_starts_from_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = train(theirs(tmp_path / "one", "faster", data="three"), quiet=True)
    train(theirs(tmp_path / "two", "faster", init_from=first, max_steps=1), quiet=False)
    assert "the layers of the classes start fresh: theirs are for 3" in capsys.readouterr().err


def test_a_comparison_inserts_into_it(tmp_path: Path) -> None:
    found = tokenmix.compare(
        task="detection",
        model="toy_detectors:faster",
        data="squares",
        mixers=["none", "external"],
        insert_after="backbone.deep",
        max_steps=2,
        batch_size=4,
        threads=1,
        jobs=0,
        out=tmp_path / "out",
        quiet=True,
    )
    none, external, *_ = found.results.variants
    # 64 tokens of width 16, S = 64: the block's own layers and two products, the same second stage.
    assert none.macs < external.macs < 1.2 * none.macs


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("masks", {"task": "detection"}, "finds masks as well, and detection learns from boxes; train instance-segm"),
        ("faster", {"task": "instance-segmentation"}, "finds no masks, and instance-segmentation .* give a Mask R-CNN"),
        ("blocks", {}, "returned a Linear; return a detector of torchvision's"),
        ("fewer", {}, "knows 2 classes; its function gets num_classes=3, with the background, and must build as many"),
        ("ssd", {"min_size": 32}, r"takes images of \(64, 64\); leave the sizes out"),
        ("faster", {"model": "torchvision:resnet18"}, "unknown detector of torchvision 'resnet18'"),
        ("faster", {"model": "torchvision:keypointrcnn_resnet50_fpn"}, "needs keypoints to learn from"),
    ],
)
def test_a_mistake_is_one_line(kind: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        train(theirs(tmp_path / "run", kind, **changes), quiet=True)
    assert not (tmp_path / "run").exists()


def test_cost_says_what_it_measures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(theirs(tmp_path / "run", "faster", max_steps=1), quiet=True)
    tokenmix.registry.load_plugin("toy_detectors")
    assert cli.main(["cost", str(run)]) == 2
    assert "is a run of detection; cost measures runs of image-classification" in capsys.readouterr().err
