"""The size of images: kept, stated, and checked before any image is read."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import tokenmix
from tokenmix.errors import UserError
from tokenmix.lab.registry import TASKS, TaskEntry
from tokenmix.lab.tasks.classification.task import ImageClassification
from tokenmix.lab.tasks.images import with_resized_positions
from tokenmix.lab.train import load_run
from tokenmix.lab.train.config import TrainConfig
from tokenmix.lab.train.folder import RunFolder
from tokenmix.lab.train.run import predict, train
from tokenmix.lab.train.sources import make_config
from tokenmix.lab.train.task import input_sizes, size_note

SHORT: dict[str, Any] = {
    "model": "vit_nano",
    "model_kwargs": {"depth": 1, "embed_dim": 16},
    "batch_size": 4,
    "max_steps": 1,
    "device": "cpu",
    "validation": 0,
}


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    for label, name in enumerate(("cat", "dog")):
        (tmp_path / "set" / name).mkdir(parents=True)
        for i in range(6):
            pixels = np.random.default_rng(10 * label + i).integers(0, 256, (30, 40, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "set" / name / f"{i}.png")
    return tmp_path / "set"


def test_a_run_keeps_the_size_that_it_starts_from(
    photographs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    data = {"data": f"folder:{photographs}"}
    first = train(make_config(**SHORT, **data, img_size=24, out=tmp_path / "first"))
    assert "tokenmix: images of 24 x 24 px, patches of 4 px, 36 tokens" in capsys.readouterr().err
    second = train(make_config(**SHORT, **data, init_from=first, out=tmp_path / "second"), quiet=True)
    for run in (first, second):
        assert json.loads((run / "data.json").read_text())["img_size"] == [24, 24]
        result = json.loads((run / "result.json").read_text())
        assert (result["img_size"], result["patch_size"], result["num_tokens"]) == ([24, 24], 4, 36)
    assert json.loads((second / "config.json").read_text())["config"]["options"]["img_size"] == 24
    third = train(make_config(**SHORT, **data, init_from=first, img_size=32, out=tmp_path / "third"), quiet=True)
    assert json.loads((third / "data.json").read_text())["img_size"] == [32, 32]
    # By itself an image of 80 px would have patches of 5 px, whose weights are others.
    fourth = train(make_config(**SHORT, **data, init_from=first, img_size=80, out=tmp_path / "fourth"), quiet=True)
    result = json.loads((fourth / "result.json").read_text())
    assert (result["patch_size"], result["num_tokens"]) == (4, 400)


@pytest.mark.parametrize("part", ["model.safetensors", "checkpoints/best", "checkpoints/last/model.safetensors"])
def test_weights_inside_a_run_are_those_of_the_run(
    photographs: Path, tmp_path: Path, part: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    data = {"data": f"folder:{photographs}"}
    first = train(make_config(**SHORT, **data, img_size=24, out=tmp_path / "first"), quiet=True)
    monkeypatch.chdir((first / part).parent)
    # Model and size are the run's, and no file counts as edited.
    short = {name: value for name, value in SHORT.items() if not name.startswith("model")}
    second = train(make_config(**short, **data, init_from=Path(Path(part).name), out=tmp_path / "second"), quiet=True)
    result = json.loads((second / "result.json").read_text())
    assert (result["model"], result["img_size"]) == ("vit_nano", [24, 24])
    assert capsys.readouterr().err == ""
    monkeypatch.chdir(first)
    assert RunFolder.of_weights(Path("resnet50")) is None, "a name is not a file of this run"


def test_photographs_in_grey(photographs: Path, tmp_path: Path):
    grey = {**SHORT, "data": f"folder:{photographs}", "img_size": 16, "in_chans": 1}
    run = train(make_config(**grey, out=tmp_path / "run"), quiet=True)
    assert json.loads((run / "data.json").read_text())["channels"] == 1
    assert load_run(run)[0].in_chans == 1
    assert predict(run, [photographs / "cat" / "0.png"])[0]["label"] in ("cat", "dog")
    with pytest.raises(UserError, match=r"--in-chans 1"):
        train(make_config(**{**grey, "in_chans": 3}, init_from=run, out=tmp_path / "other"), quiet=True)
    with pytest.raises(UserError, match=r"in_chans=1 is set elsewhere; use --in-chans"):
        train(make_config(**{**grey, "model_kwargs": {"in_chans": 1}}, out=tmp_path / "other"), quiet=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"img_size": 31}, "image size 31 x 31 is not a multiple of the patch size 4"),
        ({"model_kwargs": {"patch_size": 7}}, "image size 64 x 64 is not a multiple of the patch size 7"),
        ({"data": "digits", "model_kwargs": {"patch_size": 3}}, "image size 8 x 8 is not a multiple of the patch"),
        ({"model": "vit_tiny_patch16_224", "img_size": 30, "model_kwargs": {}}, "patch size 16; give --img-size 32"),
    ],
)
def test_patches_that_do_not_fit_are_found_before_any_image_is_read(
    photographs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], message: str
):
    monkeypatch.setattr(
        "tokenmix.lab.tasks.classification.task.load_images", lambda *a, **k: pytest.fail("images were read")
    )
    config = make_config(**{**SHORT, "data": f"folder:{photographs}", **given}, out=tmp_path / "run")
    with pytest.raises(UserError, match=message):
        train(config, quiet=True)
    assert not (tmp_path / "run").exists()


class Staged:
    img_size, patch_size, grid_sizes, num_tokens = (16, 32), 2, [(8, 16), (4, 8)], 32


class OneSide(ImageClassification):
    """A user's task, whose description of the data has one number for the size."""

    @classmethod
    def load_data(cls, config: TrainConfig, like: Any = None) -> Any:
        data = super().load_data(config)
        described = data.describe() | {"img_size": 8}
        data.describe = lambda: described  # type: ignore[method-assign]
        return data

    @classmethod
    def build_model(cls, config: TrainConfig, data: Any) -> nn.Module:
        return tokenmix.create_model(config.model.model, num_classes=10, in_chans=1, img_size=data["img_size"])


def test_a_size_of_a_users_own_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    options = "tokenmix.lab.tasks.classification:ClassificationOptions"
    monkeypatch.setitem(TASKS._entries, "own", TaskEntry(name="own", about="own", task=OneSide, options=options))
    run = train(make_config("own", **SHORT | {"model_kwargs": {}}, data="digits", out=tmp_path / "run"), quiet=True)
    assert load_run(run)[0].img_size == (8, 8)


def test_sizes_in_words():
    assert size_note(input_sizes(Staged())) == "images of 16 x 32 px, patches of 2 px, 128, then 32 tokens"
    assert size_note(input_sizes(object(), [8, 8])) == "images of 8 x 8 px"
    assert input_sizes(object()) == {}


@pytest.mark.parametrize("other", [(3, 8, 8), "small", 0.5])
def test_an_attribute_of_another_meaning_is_no_size(other: object):
    assert input_sizes(SimpleNamespace(img_size=other)) == {}


@pytest.mark.parametrize("prefix", [0, 1])
def test_positions_of_an_own_model_are_interpolated(prefix: int):
    given, own = torch.randn(1, prefix + 16, 8), torch.zeros(1, prefix + 36, 8)
    other = {"pos_embed": given, "pos_bias": torch.zeros(1, 15, 8), "head.weight": torch.zeros(2, 8)}
    found = with_resized_positions(other, {**other, "pos_embed": own, "pos_bias": torch.zeros(1, 36, 8)})
    assert found["pos_embed"].shape == own.shape
    torch.testing.assert_close(found["pos_embed"][:, :prefix], given[:, :prefix])
    assert found["pos_bias"] is other["pos_bias"]
