"""`tokenmix info`: sizes that are asked for, warnings, and the published figures next to those of the preset."""

import json
from pathlib import Path
from typing import Any

import pytest
import timm

from tokenmix.lab.cli import main
from tokenmix.lab.registry import get_task
from tokenmix.lab.train.sources import make_config
from tokenmix.registry import MODELS


def printed(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    assert main(["info", *args, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_published_figures_stand_beside_those_of_the_preset_whatever_size_is_asked_for(capsys):
    here = printed(capsys, "gmlp_tiny", "--img-size", "64")
    assert here["image"] == [64, 64]
    assert here["preset"]["image"] == [224, 224]
    assert here["preset"]["parameters"] == pytest.approx(5.867e6, rel=0.002)
    assert here["preset"]["macs"] == pytest.approx(1.33e9, rel=0.01)
    assert here["macs"] < here["preset"]["macs"] / 8
    assert main(["info", "gmlp_tiny", "--img-size", "64"]) == 0
    shown = capsys.readouterr().out
    assert "multiply-adds 1.4 G at 224 px published, 1.33 G here" in shown
    assert "0 to 29, each" in shown


@pytest.mark.parametrize("size", ["32x48", "32,48"])
def test_an_image_need_not_be_square(size, capsys):
    summary = printed(capsys, "gmlp_nano", "--img-size", size)
    assert (summary["image"], summary["tokens"]) == ([32, 48], 8 * 12)


@pytest.mark.parametrize("size", ["large", "32x48x3", "-32", ""])
def test_a_size_that_is_none_is_one_line(size, capsys):
    assert main(["info", "gmlp_nano", f"--img-size={size}"]) == 2
    error = capsys.readouterr().err
    assert "height x width as in 224x160" in error
    assert len(error.splitlines()) == 1


def test_less_attention_that_does_not_pay_is_told_in_every_skeleton(capsys):
    (line,) = printed(capsys, "mixer_nano", "--model-kwargs", "mixer=less")["warnings"]
    assert "do not pay at 64 tokens" in line
    few = printed(capsys, "mixer_nano", "--model-kwargs", "mixer=less", "patch_size=8")
    assert (few["tokens"], few["warnings"]) == (16, [])
    assert printed(capsys, "mixer_nano")["warnings"] == []
    (stage,) = printed(capsys, "lavit_tiny", "--img-size", "256")["warnings"]
    assert "stage 2:" in stage


def test_a_warning_is_one_line_in_a_narrow_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["info", "mixer_nano", "--model-kwargs", "mixer=less"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning:")]
    assert line.endswith("wider model")


def test_every_model_is_of_a_task_that_takes_it():
    for entry in MODELS:
        for task in entry.tasks:
            size = {"img_size": 224} if task == "image-classification" else {}
            get_task(task).check(make_config(task=task, model=entry.name, **size), 16)


@pytest.mark.parametrize(("points", "tokens"), [(512, 64), (2000, 64)])
def test_a_point_model_is_counted_for_so_many_points(points, tokens, capsys):
    summary = printed(capsys, "pct_cls_nano", "--num-points", str(points), "--model-kwargs", "mixer=external")
    assert (summary["task"], summary["mixer"], summary["tokens"]) == ("point-classification", "external", tokens)
    assert summary["macs"] == sum(row["macs"] for row in summary["blocks"])
    assert summary["parameters"] == sum(row["parameters"] for row in summary["blocks"])


def test_published_figures_of_a_part_stand_beside_that_part(capsys):
    assert main(["info", "eanet_seg_resnet50", "--img-size", "65"]) == 0
    assert "its block: parameters 0.55 M published, 0.59 M here" in capsys.readouterr().out
    assert main(["info", "pct_cls", "--num-points", "64"]) == 0
    assert "parameters 2.88 M published, 2.88 M here" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["info", "pct_cls", "--img-size", "32"], "--num-points N"),
        (["info", "pct_cls", "--num-points", "0"], "at least 1 point"),
        (["info", "gmlp_nano", "--num-points", "9"], "takes images"),
        (["info", "sagan", "--model-kwargs", "mixer=self"], "has no argument 'mixer'"),
        (
            ["train", "image-classification", "--model", "gmlp_text_nano"],
            "is a model of masked-lm, text-class",
        ),
        (["train", "image-classification", "--model", "retinanet_nano"], "retinanet_nano is a model of detection"),
        (["train", "detection", "--model", "vit_nano"], "example --model retinanet_nano"),
        (["train", "detection", "--model", "mask_rcnn_nano"], "is a model of instance-segmentation, not of detection"),
        (["swap", "gmlp_text_nano", "--to", "external"], "is a model of masked-lm"),
        (["cost", "pct_cls"], "tokenmix info pct_cls"),
        (["inspect", "sagan"], "sagan is of image-generation"),
        (["compare", "--task", "detection"], "the task is the first word: tokenmix compare detection"),
    ],
)
def test_a_model_in_the_wrong_place_is_one_line_with_its_task(args, words, capsys):
    assert main(args) == 2
    error = capsys.readouterr().err
    assert words in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(("name", "size"), [("resnet18", 224), ("timm:test_vit", 160), ("test_vit", 160)])
def test_models_of_timm_are_counted_at_their_own_size(name: str, size: int, capsys: pytest.CaptureFixture[str]):
    own = timm.create_model(name.removeprefix("timm:"))
    summary = printed(capsys, name)
    assert summary["image"] == [size, size]
    assert summary["parameters"] == sum(p.numel() for p in own.parameters())
    assert 0 < printed(capsys, name, "--img-size", "64")["macs"] < summary["macs"] / 4


def test_a_folder_is_no_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["info", str(tmp_path)]) == 2
    assert f"tokenmix cost {tmp_path}" in capsys.readouterr().err
