"""Runs of torchvision's models and of models that a user's function builds, in every verb."""

import json
import shutil
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest
import torch
import torch.nn.functional as F
import torchvision
from PIL import Image
from torch import nn
from torchvision.models import WeightsEnum

import tokenmix
from runs import stopped_at
from tokenmix import registry
from tokenmix.errors import UserError
from tokenmix.lab.cli import main
from tokenmix.lab.train.checkpoint import read_weights
from tokenmix.lab.train.load import load_run
from tokenmix.lab.train.run import train
from tokenmix.lab.train.sources import make_config
from tokenmix.models.foreign import create_foreign, load_foreign, with_fresh_head
from tokenmix.trust import only_typed, typed
from verbs import printed, refused

MODULE = """
from collections import namedtuple

import torch
from torch import nn
from torchvision.models import VisionTransformer

Answer = namedtuple("Answer", "logits aux_logits")


def vit(num_classes, img_size, depth=2):
    return VisionTransformer(img_size, 4, depth, 2, 16, 32, num_classes=num_classes)


class Net(nn.Module):
    def __init__(self, num_classes, in_chans, form="plain"):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(in_chans, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.fc, self.form = nn.Linear(8, num_classes), form

    def forward(self, x):
        y = self.fc(self.body(x).mean((2, 3)))
        return {"plain": y, "dict": {"logits": y}, "tuple": Answer(y, y), "list": [y]}[self.form]


class Token(Net):
    def __init__(self, num_classes, in_chans):
        super().__init__(num_classes, in_chans)
        self.token = nn.Parameter(torch.zeros(1, num_classes))

    def forward(self, x):
        return super().forward(x) + self.token.expand(len(x), -1)


class Pixels(nn.Module):
    def __init__(self, num_classes, form="dict"):
        super().__init__()
        self.body, self.head, self.form = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, num_classes, 1), form

    def forward(self, x):
        y = self.head(self.body(x).relu())
        return {"out": y, "aux": y} if self.form == "dict" else y


def thousand():
    return Net(1000, 1)


def broken(num_classes):
    raise KeyError("weights")


def number(num_classes):
    return num_classes
"""
SHORT = ["--data", "digits", "--max-steps", "2", "--batch-size", "16", "--limit", "64", "--limit-eval", "32"]
SMALL = "torchvision:shufflenet_v2_x0_5"
SIZES: dict[str, Any] = {"num_classes": 3, "in_chans": 1, "img_size": (16, 16)}


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of the user's here, which nobody has imported by `--import`."""
    (tmp_path / "their_net.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_imported", [])
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (18, 14), (90, 20, 150)).save("picture.png")


def refused_last(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The last line of a run that was stopped, after those of its start."""
    capsys.readouterr()
    assert main(words) == 2
    return capsys.readouterr().err.splitlines()[-1]


def create(name: str, kind: Any = "classifier", **given: Any) -> nn.Module:
    with typed(name):
        return create_foreign(name, kind, **{**SIZES, **given}).eval()


def test_a_model_of_torchvision_in_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    size = ["--img-size", "32", "--insert", "external", "--insert-after", "stage3"]
    printed(capsys, "train", "--model", SMALL, *SHORT, *size, "--out", "run")
    result = json.loads(Path("run/result.json").read_text())["metrics"]
    assert json.loads(printed(capsys, "eval", "run", "--json"))["loss"] == pytest.approx(result["loss"], abs=1e-5)
    assert "picture.png" in printed(capsys, "predict", "run", "picture.png")
    assert "stage3.inserted" in printed(capsys, "inspect", "run", "picture.png", "--out", "maps")
    assert f"loads a model of {SMALL} with external" in refused(capsys, "export", "run", "--format", "hub")
    printed(capsys, "train", "--init-from", "run", *SHORT, *size, "--out", "second")
    assert load_run(Path("second"))[1].model.model == SMALL


def test_a_model_of_the_users_is_exported_and_has_no_maps(capsys: pytest.CaptureFixture[str]) -> None:
    printed(capsys, "train", "--model", "their_net:Net", *SHORT, "--out", "run")
    words = ["--import", "their_net", "inspect", "run", "picture.png", "--out", "maps"]
    assert "Net has no token mixer" in refused(capsys, *words)
    printed(capsys, "--import", "their_net", "export", "run", "--format", "torch-export")


def test_attention_of_the_users_model_is_swapped(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "their_net:vit", "--model-kwargs", "depth=1", *SHORT, "--swap", "external", "--out", "run"]
    printed(capsys, "train", *words)
    names = read_weights(Path("run"))
    assert [name for name in names if "mixer" in name]
    assert not [name for name in names if "encoder_layer_1" in name]
    assert "encoder_layer_1" in printed(capsys, "swap", "their_net:vit", "--to", "external", "--img-size", "16")
    rows = json.loads(printed(capsys, "info", "their_net:vit", "--img-size", "16", "--json"))
    assert rows["parameters"] == sum(p.numel() for p in create("their_net:vit", num_classes=1000).parameters())
    assert rows["macs"] > 17 * 16 * 16 * 12 * 2, "the linear layers of two blocks"


def test_a_file_names_no_code(capsys: pytest.CaptureFixture[str]) -> None:
    printed(capsys, "train", "--model", "their_net:Net", *SHORT, "--out", "run")
    for words in (["eval", "run"], ["predict", "run", "picture.png"], ["train", "--init-from", "run", *SHORT]):
        assert "a file names code, their_net:Net" in refused(capsys, *words)
    printed(capsys, "--import", "their_net", "eval", "run")
    with only_typed(frozenset()):
        assert isinstance(load_foreign("their_net:thousand", {}), nn.Module), "its module was given by --import"
        with pytest.raises(UserError, match="only imports from elsewhere"):
            load_foreign("their_net:namedtuple", {}, typename="a", field_names="b")
        for name in ("torch.hub:load", "os:system", "json:loads"):
            with pytest.raises(UserError, match=f"a file names code, {name}"):
                load_foreign(name, {})


def test_a_stopped_run_goes_on_bit_for_bit(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "--model", "their_net:Net", *SHORT, "--checkpoint-every", "1", "--threads", "1"]
    printed(capsys, *words, "--device", "cpu", "--out", "whole")
    with stopped_at(2, error=UserError("stopped")):
        assert "the checkpoint of step 1 is kept" in refused_last(capsys, *words, "--device", "cpu", "--out", "run")
    with pytest.raises(UserError, match="a file names code"):
        train(make_config(resume=Path("run")), quiet=True)
    printed(capsys, "--import", "their_net", "train", "--resume", "run")
    found, wanted = read_weights(Path("run")), read_weights(Path("whole"))
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


@pytest.mark.parametrize("form", ["plain", "dict", "tuple"])
def test_outputs_of_a_classifier_are_unwrapped(form: str) -> None:
    model, x = create("their_net:Net", form=form), torch.randn(2, 1, 16, 16)
    expected = model.fc(model.body(x).mean((2, 3)))  # type: ignore[operator]
    torch.testing.assert_close(model(x), expected)


def test_a_classifier_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    Path("their_hf.py").write_text(
        "from transformers import ViTConfig, ViTForImageClassification\n"
        "def make(num_classes, in_chans, img_size):\n"
        "    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)\n"
        "    of_data = dict(image_size=img_size, num_channels=in_chans, num_labels=num_classes, patch_size=4)\n"
        "    return ViTForImageClassification(ViTConfig(**sizes, **of_data))\n"
    )
    model, x = create("their_hf:make"), torch.randn(2, 1, 16, 16)
    assert isinstance(model, transformers.PreTrainedModel)
    torch.testing.assert_close(model(x), model.forward(x).logits)


@pytest.mark.parametrize("form", ["plain", "dict"])
def test_coarse_logits_become_those_of_pixels(form: str) -> None:
    model, x = create("their_net:Pixels", "segmenter", in_chans=3, form=form), torch.randn(2, 3, 16, 12)
    coarse = model.head(model.body(x).relu())  # type: ignore[operator]
    torch.testing.assert_close(model(x), F.interpolate(coarse, size=(16, 12), mode="bilinear", align_corners=False))


def test_grey_images_are_repeated_for_three_channels() -> None:
    model, x = create(SMALL, img_size=(32, 32)), torch.randn(2, 1, 32, 32)
    plain = torchvision.models.shufflenet_v2_x0_5(num_classes=3).eval()
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(x), plain(torch.cat([x, x, x], 1)))


def test_pretrained_weights_but_for_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = torchvision.models.shufflenet_v2_x0_5().state_dict()
    monkeypatch.setattr(WeightsEnum, "get_state_dict", lambda *args, **kwargs: stored)
    own = create(SMALL, img_size=(32, 32), pretrained=True).state_dict()
    assert own["fc.weight"].shape == (3, 1024)
    assert all(torch.equal(own[name], value) for name, value in stored.items() if not name.startswith("fc."))
    whole = create(SMALL, img_size=(32, 32), num_classes=1000, weights="IMAGENET1K_V1").state_dict()
    assert torch.equal(whole["fc.weight"], stored["fc.weight"])


def test_without_a_connection_there_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unreachable(*args: Any, **kwargs: Any) -> None:
        raise URLError("no name")

    monkeypatch.setattr(WeightsEnum, "get_state_dict", unreachable)
    words = ["train", "--model", SMALL, "--model-kwargs", "pretrained=True", *SHORT]
    assert "connect to the internet, or give --init-from FILE" in refused(capsys, *words)


def test_a_head_for_other_classes_starts_fresh() -> None:
    model, other = create("their_net:Net"), create("their_net:Net", num_classes=5)
    weights, theirs = with_fresh_head(other.state_dict(), model, 3)
    assert theirs == 5
    assert torch.equal(weights["fc.weight"], model.state_dict()["fc.weight"])
    assert torch.equal(weights["body.0.weight"], other.state_dict()["body.0.weight"])
    wider = {**other.state_dict(), "body.0.weight": torch.zeros(9, 1, 3, 3)}
    assert with_fresh_head(wider, model, 3)[1] is None, "another model"
    assert with_fresh_head({"fc.bias": torch.tensor(1.0)}, model, 3)[1] is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["their_net:broken"], "their_net:broken(num_classes=10) fails with KeyError"),
        (["their_net:number"], "returned a int; return an nn.Module"),
        (["their_net:thousand"], "returns (2, 1000) and not logits (B, 10)"),
        (["their_net:Net", "--model-kwargs", "form=list"], "returns a list; return logits"),
        (["their_net:Net", "--model-kwargs", "depth=3"], "unexpected keyword argument 'depth'"),
        (["their_net:vit", "--img-size", "18"], "their_net:vit"),
        (["their_net:Nat"], "did you mean Net"),
        (["no_such_net:Net"], "cannot import 'no_such_net'"),
        (["torchvision:resnet81"], "did you mean resnet18"),
        (["torchvision:vit_b_16", "--img-size", "40"], "of side 40 (AssertionError: Input shape indivisible"),
        (["torchvision:fcn_resnet50"], "unknown classifier of torchvision"),
        ([SMALL, "--model-kwargs", "weights=V9"], "known: DEFAULT, IMAGENET1K_V1"),
    ],
)
def test_mistakes_are_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refused(capsys, "train", "--model", *words, *SHORT, "--out", "run")
    assert not Path("run").exists()


def write_scenes(place: Path) -> None:
    for part, count in (("train", 4), ("val", 2)):
        for i in range(count):
            mask = torch.zeros(20 + 4 * (i % 2), 24, dtype=torch.uint8)
            mask[:, 4 + 5 * i :] = 1
            for kind, pixels in (("images", mask * 200), ("masks", mask)):
                folder = place / part / kind
                folder.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels.numpy()).save(folder / f"{i}.png")


def test_a_segmenter_from_elsewhere_in_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    write_scenes(Path("scenes"))
    data = ["semantic-segmentation", "--data", "masks:scenes", "--crop", "16", "--validation", "0"]
    words = [*data, "--max-steps", "2", "--batch-size", "2", "--out", "run", "--insert", "external"]
    printed(capsys, "train", *words, "--insert-after", "body", "--model", "their_net:Pixels")
    assert "a file names code" in refused(capsys, "eval", "run")
    result = json.loads(Path("run/result.json").read_text())["metrics"]

    def verb(*words: str) -> str:
        return printed(capsys, "--import", "their_net", *words)

    assert json.loads(verb("eval", "run", "--json"))["loss"] == pytest.approx(result["loss"], abs=1e-5)
    verb("eval", "run", "--way", "sliding", "--window", "16")
    verb("predict", "run", "picture.png", "--out", "masks")
    assert Image.open("masks/picture-mask.png").size == (18, 14)
    assert "body.inserted" in verb("inspect", "run", "picture.png", "--out", "maps")
    verb("export", "run", "--format", "torch-export")


def test_a_segmenter_of_torchvision_answers_for_pixels() -> None:
    sizes: dict[str, Any] = {"in_chans": 3, "img_size": (32, 32)}
    model = create("torchvision:lraspp_mobilenet_v3_large", "segmenter", **sizes)
    x = torch.randn(2, 3, 40, 32)
    torch.testing.assert_close(model(x), model.forward(x)["out"])
    with pytest.raises(UserError, match="unknown segmenter of torchvision 'resnet18'"):
        create("torchvision:resnet18", "segmenter", **sizes)


def test_a_segmenter_of_transformers() -> None:
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    sizes: dict[str, Any] = {"depths": [1] * 4, "hidden_sizes": [8, 16, 24, 32], "num_attention_heads": [1] * 4}
    sizes["sr_ratios"] = [1] * 4
    SegformerForSemanticSegmentation(SegformerConfig(num_labels=7, decoder_hidden_size=16, **sizes)).save_pretrained(
        "segformer"
    )
    write_scenes(Path("scenes"))
    given: dict[str, Any] = {"data": "masks:scenes", "crop": 16, "validation": 0, "max_steps": 2, "batch_size": 2}
    run = tokenmix.train(
        task="semantic-segmentation",
        model="transformers:segformer",
        pretrained=True,
        insert="external",
        insert_after="segformer.stages.3",
        threads=1,
        out="theirs",
        quiet=True,
        lr=1e-12,
        min_lr=0.0,
        **given,
    )
    expected = dict(SegformerForSemanticSegmentation.from_pretrained("segformer").segformer.named_parameters())
    shutil.rmtree("segformer")
    found = dict(load_run(run.path)[0].segformer.named_parameters())  # type: ignore[union-attr]
    torch.testing.assert_close({name: found[name] for name in expected}, expected, rtol=0, atol=1e-6)
    assert 0 <= run.best <= 1


def test_a_model_with_a_fixed_batch_is_not_exported(capsys: pytest.CaptureFixture[str]) -> None:
    printed(capsys, "train", "--model", "their_net:Token", *SHORT, "--out", "run")
    told = refused(capsys, "--import", "their_net", "export", "run", "--format", "torch-export")
    assert "their_net:Token cannot be exported to torch-export" in told
    assert "x.shape[0], not len(x)" in told


def test_a_result_opens_the_model_that_its_caller_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "named_here.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    run = tokenmix.train(model="named_here:Net", data="digits", max_steps=2, out=tmp_path / "run", quiet=True)
    assert type(run.model).__name__ == "Net"
    with pytest.raises(UserError, match="a file names code"):
        load_run(run.path)


def test_changed_code_of_a_run_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (code := tmp_path / "edited_net.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    run = tokenmix.train(model="edited_net:Net", data="digits", max_steps=2, out=tmp_path / "run", quiet=True)
    assert run.model is not None
    assert "changed since" not in capsys.readouterr().err
    code.write_text(MODULE.replace("mean((2, 3))", "sum((2, 3))"))
    with typed("edited_net:Net"):
        load_run(run.path)
    assert "the module edited_net changed since" in capsys.readouterr().err
