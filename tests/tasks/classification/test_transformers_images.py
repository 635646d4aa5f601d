"""Classifiers of images of transformers: trained, compared, continued and opened without their folder."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageClassification, Dinov2Config, ResNetConfig, SwinConfig, ViTConfig

import tokenmix
from tokenmix.errors import UserError
from tokenmix.lab import cli
from tokenmix.lab.train.config import TrainConfig
from tokenmix.lab.train.load import load_run, load_task
from tokenmix.lab.train.run import evaluate, train
from tokenmix.lab.train.sources import make_config

WIDTH = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
KINDS: dict[str, Any] = {
    "vit": ViTConfig(**WIDTH, intermediate_size=64, image_size=16, patch_size=8),
    "swin": SwinConfig(image_size=16, patch_size=4, embed_dim=16, depths=[1, 1], num_heads=[2, 2], window_size=2),
    "dinov2": Dinov2Config(**WIDTH, image_size=16, patch_size=8),
    "resnet": ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("theirs")
    for name, config in KINDS.items():
        torch.manual_seed(0)
        config.num_labels = 3
        AutoModelForImageClassification.from_config(config).save_pretrained(root / name)
    return root


def settings(place: Path, out: Path, **changes: Any) -> TrainConfig:
    given: dict[str, Any] = {"model": f"transformers:{place}", "data": "digits", "limit": 64, "limit_eval": 32}
    given |= {"max_steps": 2, "batch_size": 16, "threads": 1, "img_size": 16, "device": "cpu", "out": out}
    return make_config(**{**given, **changes})


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_starts_with_the_weights_of_the_folder_and_opens_without_it(
    kind: str, folder: Path, tmp_path: Path
) -> None:
    theirs = tmp_path / kind
    shutil.copytree(folder / kind, theirs)
    run = train(settings(theirs, tmp_path / "run", pretrained=True, lr=1e-12, min_lr=0.0), quiet=True)
    expected = dict(AutoModelForImageClassification.from_pretrained(theirs).base_model.named_parameters())
    shutil.rmtree(theirs)
    found = dict(load_run(run)[0].base_model.named_parameters())  # type: ignore[union-attr]
    torch.testing.assert_close({name: found[name] for name in expected}, expected, rtol=0, atol=1e-6)
    assert evaluate(run)["samples"] == 32


def test_new_weights_take_the_size_of_the_data_and_published_ones_do_not(folder: Path, tmp_path: Path) -> None:
    run = train(settings(folder / "vit", tmp_path / "run", img_size=24), quiet=True)
    assert load_run(run)[0].config.image_size == 24  # type: ignore[union-attr]
    with pytest.raises(UserError, match="does not run on images"):
        train(settings(folder / "vit", tmp_path / "other", img_size=24, pretrained=True), quiet=True)
    kwargs = {"intermediate_size": 32}
    with pytest.raises(UserError, match=r"have another .* than the model; leave --model-kwargs out"):
        train(settings(folder / "vit", tmp_path / "other", pretrained=True, model_kwargs=kwargs), quiet=True)
    assert not (tmp_path / "other").exists()


def test_a_run_continues_without_the_folder(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenmix.lab.train import trainer

    theirs = tmp_path / "vit"
    shutil.copytree(folder / "vit", theirs)
    given = settings(theirs, tmp_path / "run", max_steps=None, epochs=2, pretrained=True)
    whole = load_run(train(given.replace(out=tmp_path / "whole"), quiet=True))[0].state_dict()

    class Stop(trainer.StopRequest):
        steps = 0

        def ask(self) -> Any:
            Stop.steps += 1
            return lambda: Stop.steps == 3

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "StopRequest", Stop)
        with pytest.raises(KeyboardInterrupt):
            train(given, quiet=True)
    shutil.rmtree(theirs)
    found = load_run(train(make_config(resume=tmp_path / "run"), quiet=True))[0].state_dict()
    torch.testing.assert_close(found, whole, rtol=0, atol=0)


def test_a_comparison_swaps_their_attention_and_the_cost_of_a_run_is_measured(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = tokenmix.compare(
        mixers=["external", "linear"],
        model=f"transformers:{folder / 'vit'}",
        pretrained=True,
        data="digits",
        img_size=16,
        limit=64,
        limit_eval=32,
        max_steps=2,
        batch_size=16,
        threads=1,
        controls=True,
        out=tmp_path / "out",
        quiet=True,
    )
    assert [variant.name for variant in found.results.variants] == ["original", "external", "linear", "identity"]
    assert all(variant.macs for variant in found.results.variants)
    run = tmp_path / "out" / "runs" / "external-seed0"
    assert "ExternalAttention" in repr(load_task(run).model)
    capsys.readouterr()
    assert cli.main(["cost", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["macs"] > 0


@pytest.mark.parametrize("change", [{"hidden_size": 10**7}, {"model_type": "nothing"}, {"model_type": "bert"}])
def test_a_strangers_architecture_is_one_line(change: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    run = train(settings(folder / "vit", tmp_path / "run"), quiet=True)
    file = run / "data.json"
    data = json.loads(file.read_text())
    data["architecture"] |= change
    file.write_text(json.dumps(data))
    with pytest.raises(UserError):
        evaluate(run)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "transformers:nowhere"}, "nowhere has no config.json; give the folder that save_pretrained wrote"),
        ({"model_kwargs": {"hidden_act": "nothing"}}, "cannot be built by transformers"),
        ({"task": "image-generation"}, "unknown model 'transformers:"),
    ],
)
def test_mistakes_are_one_line(changes: dict[str, Any], message: str, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        train(settings(folder / "vit", tmp_path / "run", **changes), quiet=True)
    assert not (tmp_path / "run").exists()
