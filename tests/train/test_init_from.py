"""Starting from weights of another image size or with other classes; anything else that differs stays an error."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tokenmix.checkpoints import resize
from tokenmix.errors import UserError
from tokenmix.lab.train.checkpoint import initial_weights
from tokenmix.lab.train.run import train
from tokenmix.lab.train.sources import base_comparison, make_config
from tokenmix.models import create_model

CONFIG = make_config(
    data="digits",
    model="gmlp_nano",
    model_kwargs={"depth": 1},
    epochs=1,
    max_steps=1,
    batch_size=64,
    limit=64,
    limit_eval=32,
    img_size=8,
    threads=1,
    device="cpu",
    lr=1e-12,
    min_lr=0.0,
)


# Far from what any seed draws, so that what was taken over can be reported from what was drawn.
TRAINED = CONFIG.replace(lr=0.02, max_steps=4, epochs=4, seed=1)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(TRAINED.replace(out=tmp_path_factory.mktemp("init") / "small"), quiet=True)


def weights(run: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(run / "model.safetensors")


def continued(start: Path, out: Path, **changes: Any) -> dict[str, torch.Tensor]:
    return weights(train(CONFIG.replace(init_from=start, out=out, **changes), quiet=True))


def test_a_run_brings_its_data_to_the_same_task(start: Path):
    for given in ({}, {"model": "vit_nano"}):
        assert make_config(init_from=start, **given).data.data == "digits"
        assert base_comparison("image-classification", start, **given).data.data == "digits"
    assert make_config(init_from=start, data="emoji").data.data == "emoji"
    assert make_config(init_from=start).data.limit is None
    assert make_config("semantic-segmentation", init_from=start, model="eanet_seg_nano").data.data != "digits"


@pytest.mark.parametrize("model", ["gmlp_nano", "vit_nano"])
def test_another_image_size(tmp_path: Path, model: str):
    """Gates and positions are interpolated as the model's own `set_input_size` does it."""
    small = train(TRAINED.replace(model=model, out=tmp_path / "small"), quiet=True)
    large = continued(small, tmp_path / "large", model=model, img_size=16)
    wanted = create_model(model, img_size=16, in_chans=1, num_classes=10, depth=1)
    expected = resize(weights(small), wanted, img_size=8)
    assert any(expected[key].shape != value.shape for key, value in weights(small).items())
    for key, value in expected.items():
        torch.testing.assert_close(large[key], value, atol=1e-6, rtol=0)


def test_as_many_other_classes_leave_the_head_fresh(start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    other = shutil.copytree(start, tmp_path / "other")
    described = (other / "data.json").read_text()
    (other / "data.json").write_text(described.replace('"9"', '"nine"'))
    assert described != (other / "data.json").read_text()
    fresh = continued(other, tmp_path / "run")
    assert f"the head starts fresh: {other} has other classes\n" in capsys.readouterr().err
    drawn = weights(train(CONFIG.replace(out=tmp_path / "drawn"), quiet=True))
    torch.testing.assert_close(fresh["head.weight"], drawn["head.weight"], atol=1e-6, rtol=0)
    assert not torch.allclose(fresh["norm.weight"], drawn["norm.weight"], atol=1e-6, rtol=0)
    kept = continued(start, tmp_path / "kept")
    assert not torch.allclose(kept["head.weight"], drawn["head.weight"], atol=1e-3)


def test_other_classes_leave_the_head_fresh(start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / "two"
    weights_of_two = {**weights(start), "head.weight": torch.ones(2, 64), "head.bias": torch.ones(2)}
    folder.mkdir()
    safetensors.torch.save_file(weights_of_two, folder / "model.safetensors")
    fresh = continued(folder, tmp_path / "run")
    assert capsys.readouterr().err == f"tokenmix: the head starts fresh: {folder} has 2 classes, this run 10\n"
    drawn = weights(train(CONFIG.replace(out=tmp_path / "drawn"), quiet=True))
    for key, value in weights(start).items():
        expected = drawn[key] if key.startswith("head.") else value
        torch.testing.assert_close(fresh[key], expected, atol=1e-6, rtol=0)


def test_another_number_of_channels_is_told(start: Path):
    with pytest.raises(UserError, match=r"trained on images of 1 channel\(s\) and this data has 3"):
        initial_weights(start, create_model("gmlp_nano", img_size=8, in_chans=3, num_classes=10, depth=1))


def test_both_at_once(start: Path, tmp_path: Path):
    changed = {**weights(start), "head.weight": torch.ones(2, 64), "head.bias": torch.ones(2)}
    safetensors.torch.save_file(changed, tmp_path / "two.safetensors")
    large = continued(tmp_path / "two.safetensors", tmp_path / "run", img_size=16)
    assert large["head.weight"].shape == (10, 64)
    assert large["blocks.0.mixer.gating.weight"].shape != weights(start)["blocks.0.mixer.gating.weight"].shape


def test_the_same_size_is_left_as_it_is(start: Path):
    model = create_model("gmlp_nano", img_size=8, in_chans=1, num_classes=10, depth=1)
    assert all(torch.equal(value, weights(start)[key]) for key, value in initial_weights(start, model).items())


def test_the_size_that_a_run_states_is_used(tmp_path: Path):
    """A grid that is no square cannot be read off the shapes."""
    model = create_model("gmlp_nano", img_size=(8, 16), in_chans=1, num_classes=10, depth=1)
    wide = tmp_path / "wide"
    wide.mkdir()
    safetensors.torch.save_file(dict(model.state_dict()), wide / "model.safetensors")
    wanted = create_model("gmlp_nano", img_size=16, in_chans=1, num_classes=10, depth=1)
    with pytest.raises(UserError, match=r"wide: .* not form a square grid"):
        initial_weights(wide, wanted)
    (wide / "config.json").write_text("{}")
    (wide / "data.json").write_text('{"img_size": [8, 16]}')
    found = initial_weights(wide, wanted)
    assert {key: value.shape for key, value in found.items()} == {
        key: value.shape for key, value in wanted.state_dict().items()
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_kwargs": {"depth": 2}}, r"another model .*missing: blocks\.1"),
        (
            {"model_kwargs": {"depth": 1, "embed_dim": 32}},
            r"another model .*other shape: stem\.proj\.weight \(64, 1, 4, 4\) for \(32,",
        ),
        ({"model": "vit_nano"}, r"another model .*unexpected: blocks\.0\.mixer"),
    ],
)
def test_anything_else_is_an_error(start: Path, tmp_path: Path, changes: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        continued(start, tmp_path / "run", **changes)
    assert not (tmp_path / "run").exists()


def test_a_model_of_timm(tmp_path: Path):
    timms = train(CONFIG.replace(model="resnet10t", model_kwargs={}, img_size=32, out=tmp_path / "a"), quiet=True)
    again = continued(timms, tmp_path / "b", model="resnet10t", model_kwargs={}, img_size=48)
    assert torch.allclose(again["fc.weight"], weights(timms)["fc.weight"], atol=1e-6)
