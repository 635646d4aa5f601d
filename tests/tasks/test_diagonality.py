"""The diagonality loss as a part of training: what it reaches, what it costs when it is off, runs that have it."""

import copy
import csv
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
from torch import Tensor, nn

import tokenmix
from tokenmix import create_model
from tokenmix.errors import UserError
from tokenmix.lab import cli
from tokenmix.lab.registry import get_task
from tokenmix.lab.tasks.classification.task import ImageClassification
from tokenmix.lab.train import trainer
from tokenmix.lab.train.run import train
from tokenmix.lab.train.sources import make_config
from tokenmix.layers import LessAttention
from tokenmix.losses import diagonality_loss
from tokenmix.ops.less import Scores

LESS = {"mixer": "less", "depth": 3, "patch_size": 4}
CONFIG = make_config(
    data="digits",
    model="mixer_nano",
    model_kwargs=LESS,
    epochs=1,
    batch_size=20,
    limit=80,
    limit_eval=20,
    diagonality=0.5,
    threads=1,
    device="cpu",
    log_every=1,
    checkpoint_every=2,
    lr=1e-3,
)
DESCRIPTION: dict[str, Any] = {"classes": list("abc"), "channels": 1, "img_size": [32, 32], "mean": [0.0], "std": [1.0]}
MODELS = {
    "mixer_nano": {"mixer": "less", "depth": 3, "patch_size": 8},
    "lavit_nano": {"embed_dims": (8, 8, 8, 16), "num_heads": (1, 1, 2, 2)},
}


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "image": torch.randn(4, 1, 32, 32, generator=generator),
        "label": torch.randint(3, (4,), generator=generator),
    }


def task(name: str = "mixer_nano", **changes: Any) -> ImageClassification:
    """The task with a small model that is no longer at its start, where Theta and Psi are the identity."""
    torch.manual_seed(0)
    model = create_model(name, img_size=32, in_chans=1, num_classes=3, **MODELS[name])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return ImageClassification(model, CONFIG.replace(model=name, **changes), DESCRIPTION)


def layers(model: nn.Module) -> list[LessAttention]:
    return [module for module in model.modules() if isinstance(module, LessAttention)]


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_is_added_and_reaches_theta_and_psi(name):
    with_loss, without = task(name), task(name, diagonality=0.0)
    made = batch()
    total, logs = with_loss.loss(made)
    entropy, nothing = without.loss(made)
    assert nothing == {}
    torch.testing.assert_close(total, entropy + 0.5 * logs["diagonality"])
    assert not logs["diagonality"].requires_grad
    # The scores reach the logits as well: the difference of the gradients is the loss's own.
    for loss, owner in ((total, with_loss), (entropy, without)):
        loss.backward()
        assert all(p.grad is not None for p in owner.parameters()), "ddp waits for every gradient"
    for ours, plain in zip(layers(with_loss.model), layers(without.model), strict=True):
        for part in ("theta", "psi", "theta_bias", "psi_bias"):
            assert not torch.allclose(getattr(ours, part).grad, getattr(plain, part).grad, rtol=1e-3, atol=1e-9), part


SCENE_TASKS = {
    # Name, arguments, and whether `part_weight`, here 2, is of images, or of pixels, which do not weigh the scores.
    "semantic-segmentation": ("fpn_seg_nano", {"backbone": "lavit_nano", "width": 8, "head_width": 8}, 1.0),
    "instance-segmentation": ("mask_rcnn_lavit_nano", {}, 2.0),
}


@pytest.mark.parametrize("of", SCENE_TASKS)
def test_scenes_have_it_too(of):
    name, kwargs, image_weight = SCENE_TASKS[of]
    model = create_model(name, img_size=64, num_classes=2, **kwargs)
    config = make_config(task=of, data="digits", model=name, model_kwargs=kwargs)
    description = {**DESCRIPTION, "classes": ["a", "b"], "channels": 3, "img_size": [64, 64], "ignore": 255}
    made: dict[str, Any] = {"image": torch.randn(2, 3, 64, 64), "classes": torch.randint(2, (2, 64, 64))}
    boxes, masks = torch.tensor([[8.0, 8.0, 40.0, 40.0]]), torch.ones(1, 64, 64, dtype=torch.uint8)
    target = {"boxes": boxes, "labels": torch.tensor([1]), "masks": masks, "iscrowd": torch.tensor([0])}
    made |= {"images": list(made["image"].sigmoid()), "targets": [target, target]}
    totals = []
    for weight in (0.0, 0.5):
        torch.manual_seed(0)  # Detectors draw the boxes that count.
        task = get_task(of)(model, config.replace(diagonality=weight), description)
        task.part_weight = 2.0
        totals.append(task.loss(made))
    (plain, parts), (total, logs) = totals
    assert logs["diagonality"] > 0
    assert "diagonality" not in parts
    torch.testing.assert_close(total, plain + 0.5 * image_weight * logs["diagonality"])
    total.backward()
    assert all(layer.theta.grad.abs().sum() > 0 and layer.kept is None for layer in layers(model))


def test_attention_that_was_swapped_has_it_too():
    model = timm.create_model("vit_tiny_patch16_224", depth=2, img_size=32, patch_size=8, in_chans=1, num_classes=3)
    tokenmix.swap_attention(model, "less")
    trained = ImageClassification(model, CONFIG, DESCRIPTION)
    assert trained.loss(batch())[1]["diagonality"] > 0


@pytest.mark.parametrize("name", MODELS)
def test_hinge_is_a_mean_over_layers_and_the_printed_form_a_sum(name):
    for form, reduce in (("hinge", torch.mean), ("printed", torch.sum)):
        trained = task(name, diagonality_form=form)
        _, scores = trained.model.forward_with_scores(batch()["image"])  # type: ignore[operator]
        assert len(scores) == len(layers(trained.model)) > 1
        expected = reduce(torch.stack([diagonality_loss(s.matrix(), form) for s in scores]))
        torch.testing.assert_close(trained.loss(batch())[1]["diagonality"], expected.detach())


def test_scores_handed_out_are_those_of_the_maps():
    model = task().model.eval()
    images = batch()["image"]
    logits, scores = model.forward_with_scores(images)  # type: ignore[operator]
    torch.testing.assert_close(logits, model(images))
    maps = model.attention_maps(images)[1:]  # type: ignore[operator]
    for made, used in zip(scores, maps, strict=True):
        torch.testing.assert_close(made.matrix().softmax(-1), used.map)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_scores_of_compiled_models(name):
    model, images = task(name).model, batch()["image"]
    logits, scores = model.forward_with_scores(images)  # type: ignore[operator]
    whole = torch.compile(model.forward_with_scores, fullgraph=True, backend="eager")
    in_place = copy.deepcopy(model)
    in_place.compile(backend="eager")
    in_place(images)
    for found, made in (whole(images), in_place.forward_with_scores(images)):  # type: ignore[operator]
        torch.testing.assert_close(found, logits)
        assert len(made) == len(scores) == len(layers(model))
        for ours, theirs in zip(made, scores, strict=True):
            torch.testing.assert_close(ours.matrix(), theirs.matrix())


def test_off_it_makes_no_map(monkeypatch):
    def refused(self):
        raise AssertionError("an N x N map was made")

    monkeypatch.setattr(Scores, "matrix", refused)
    task(diagonality=0.0).loss(batch())[0].backward()
    with pytest.raises(AssertionError, match="map was made"):
        task().loss(batch())


@pytest.mark.parametrize("name", MODELS)
def test_blocks_computed_again_change_no_gradient(name):
    plain, again = task(name), task(name, grad_checkpointing=True)
    again.model.set_grad_checkpointing()  # type: ignore[operator]
    for each in (plain, again):
        each.loss(batch())[0].backward()
    for ours, theirs in zip(plain.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def test_computed_again_it_keeps_no_map():
    def kept(**changes: Any) -> int:
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
            task(**changes)._diagonality(
                [Scores(torch.randn(1, 1, 64, 2, requires_grad=True), torch.randn(1, 1, 64, 2))]
            )
        return max(sizes, default=0)

    assert kept() >= 64 * 64
    assert kept(grad_checkpointing=True) <= 64 * 2


def test_mixed_images_have_it_too():
    mixing = task(mixup=0.4, smoothing=0.0)
    losses = []
    for seed in (1, 1, 2):
        np.random.seed(seed)
        losses.append(mixing.loss(batch())[1]["diagonality"].item())
    assert losses[0] == losses[1] != losses[2], "it is taken of the mixed images"


@pytest.mark.parametrize("change", [{"model_kwargs": {"mixer": "self"}}, {"model": "eanet_nano", "model_kwargs": {}}])
def test_a_model_without_such_scores_is_one_line(tmp_path, change):
    with pytest.raises(UserError, match=r"diagonality=0.5 acts on the scores of less-attention, and '.*_nano'"):
        train(CONFIG.replace(out=tmp_path / "run", **change), quiet=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"diagonality": -1.0}, "diagonality must be at least 0, got -1.0"),
        ({"diagonality": float("nan")}, "diagonality must be a finite number, got nan"),
        ({"diagonality_form": "hing"}, "diagonality_form='hing' is not valid; give one of hinge, printed"),
    ],
)
def test_settings_are_checked(change, message):
    with pytest.raises(UserError, match=message):
        ImageClassification.check(CONFIG.replace(**change), 20)


def rows(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open(newline="") as file:
        return [
            {k: v for k, v in row.items() if k not in ("seconds", "images_per_second")} for row in csv.DictReader(file)
        ]


def weights(run: Path) -> dict[str, Tensor]:
    return safetensors.torch.load_file(run / "checkpoints" / "last" / "model.safetensors")


def test_the_command_logs_a_column_of_its_own(tmp_path):
    shared = ["train", "--data", "digits", "--model", "mixer_nano", "--model-kwargs", "mixer=less", "depth=2"]
    shared += ["--limit", "80", "--limit-eval", "20", "--batch-size", "20", "--epochs", "1", "--device", "cpu"]
    shared += ["--threads", "1", "--log-every", "2"]
    cli.main([*shared, "--diagonality", "1", "--diagonality-form", "printed", "--out", str(tmp_path / "with")])
    cli.main([*shared, "--diagonality", "0", "--out", str(tmp_path / "without")])
    cli.main([*shared, "--out", str(tmp_path / "plain")])
    assert all(np.isfinite(float(row["train_diagonality"])) for row in rows(tmp_path / "with"))
    assert "train_diagonality" not in rows(tmp_path / "without")[0]
    assert rows(tmp_path / "without") == rows(tmp_path / "plain")
    plain, without, trained = (weights(tmp_path / name) for name in ("plain", "without", "with"))
    assert all(torch.equal(value, without[key]) for key, value in plain.items())
    assert not torch.equal(trained["blocks.1.mixer.theta"], plain["blocks.1.mixer.theta"])


def test_a_killed_run_goes_on_bit_for_bit(tmp_path, monkeypatch):
    config = CONFIG.replace(mixup=0.4, epochs=2, log_every=3, grad_checkpointing=True)
    whole = train(config.replace(out=tmp_path / "whole"), quiet=True)
    start = trainer.TrainingLoop.start_batch

    def killed(self, *args):
        if self.progress.step == 3:
            raise KeyError("killed")
        start(self, *args)

    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(trainer.TrainingLoop, "start_batch", killed)
        with pytest.raises(KeyError):
            train(config.replace(out=run), quiet=True)
    train(make_config(resume=run), quiet=True)
    assert rows(run) == rows(whole)
    assert all(torch.equal(value, weights(run)[key]) for key, value in weights(whole).items())


WORKER = """
import dataclasses, json, sys
from pathlib import Path
from tokenmix.lab.train.sources import make_config
from tokenmix.lab.train.distributed import process_group
from tokenmix.lab.train.run import train

config = make_config(**json.loads(sys.argv[2]))
with process_group("cpu"):
    for strategy in ("ddp", "fsdp"):
        train(config.replace(strategy=strategy, out=Path(sys.argv[1]) / strategy), quiet=True)
"""


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path):
    (tmp_path / "worker.py").write_text(WORKER)
    config = CONFIG.replace(batch_size=10, out=None)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node",
            "2",
            str(tmp_path / "worker.py"),
            str(tmp_path),
            json.dumps(dataclasses.asdict(config)),
        ],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    one = train(CONFIG.replace(out=tmp_path / "one"), quiet=True)
    for strategy in ("ddp", "fsdp"):
        for ours, theirs in zip(rows(tmp_path / strategy), rows(one), strict=True):
            assert float(ours["train_diagonality"]) == pytest.approx(float(theirs["train_diagonality"]), rel=1e-3)
        trained = weights(tmp_path / strategy)
        for key, value in weights(one).items():
            torch.testing.assert_close(trained[key], value, rtol=1e-3, atol=3e-4, msg=lambda m, key=key: f"{key}: {m}")
