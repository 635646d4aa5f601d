"""A GAN on the embedded digits: it trains, resumes bit for bit, is judged and generates; mistakes in one line."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image

from tokenmix.errors import UserError
from tokenmix.lab.cli import main
from tokenmix.lab.data.images import load_images
from tokenmix.lab.tasks.generation.features import InceptionFeatures, RunFeatures
from tokenmix.lab.tasks.generation.task import ImageGeneration, between, generate, keep_classes, noise_of
from tokenmix.lab.train import trainer
from tokenmix.lab.train.checkpoint import read_checkpoint
from tokenmix.lab.train.export import export
from tokenmix.lab.train.load import load_task
from tokenmix.lab.train.run import evaluate, predict, train
from tokenmix.lab.train.sources import make_config
from tokenmix.models import create_model

# Three batches an epoch, each cut into two steps of the discriminator. Nothing that a GAN keeps is left out.
CONFIG = make_config(
    task="image-generation",
    model="sagan_nano",
    model_kwargs={"width": 4, "latent_dim": 4},
    data="digits",
    img_size=32,
    epochs=2,
    batch_size=8,
    limit=24,
    limit_eval=20,
    validation=20,
    threads=1,
    device="cpu",
    log_every=2,
    checkpoint_every=2,
    ema=0.9,
    d_steps=2,
    classes=("1", "4", "7"),
    columns=2,
)


@pytest.fixture(scope="module")
def judge(tmp_path_factory) -> Path:
    return train(
        make_config(
            model="vit_nano",
            model_kwargs={"depth": 1},
            data="digits",
            max_steps=3,
            batch_size=32,
            limit_eval=10,
            device="cpu",
            out=tmp_path_factory.mktemp("judge") / "run",
        ),
        quiet=True,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory, judge) -> Path:
    out = tmp_path_factory.mktemp("gan") / "run"
    with pytest.MonkeyPatch.context() as patch:
        # Named from where the training is started; what comes later may be started anywhere.
        patch.chdir(judge.parent)
        return train(CONFIG.replace(features=judge.name, monitor="feature_kd", out=out), quiet=True)


def test_it_leaves_numbers_and_pictures(run):
    result = json.loads((run / "result.json").read_text())
    names = {"thumbnail_fd", "feature_fd", "feature_kd", "class_score", "class_match"}
    assert set(result["metrics"]) == names
    assert result["steps"] == 6
    gan = create_model("sagan_nano", num_classes=3, channels=1, img_size=32, **CONFIG.model.model_kwargs)
    assert result["parameters"] == sum(p.numel() for p in gan.parameters()), "the average is no part of them"
    assert 1 <= result["metrics"]["class_score"] <= 10
    header = (run / "metrics.csv").read_text().splitlines()[0].split(",")
    assert {"train_loss", "train_d_loss", "train_g_loss", "val_feature_fd"} <= set(header)
    assert {p.name for p in (run / "samples").iterdir()} == {"step-000003.png", "step-000006.png", "interpolation.png"}
    # Three rows of two images of 32 px, 2 px between.
    assert Image.open(run / "samples" / "step-000006.png").size == (2 * 34 + 2, 3 * 34 + 2)
    data = json.loads((run / "data.json").read_text())
    assert (data["classes"], data["mean"], data["std"]) == (["1", "4", "7"], [0.5], [0.5])


def test_eval_repeats_the_run_and_takes_another_judge(run, judge):
    result = json.loads((run / "result.json").read_text())["metrics"]
    again = evaluate(run, device="cpu")
    for name, value in result.items():
        assert again[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    assert "feature_fd" not in evaluate(run, device="cpu", options={"features": None})


@pytest.mark.parametrize("images", [8, 5, 3])
def test_unreadable_files_do_not_change_the_number_of_steps(run, images):
    """Each step of each network exchanges gradients with the other ranks."""
    task, steps = load_task(run), []
    task.config = task.config.replace(d_steps=4)

    class Optimizer:
        def __init__(self, name: str) -> None:
            self.name = name

        def zero_grad(self, set_to_none: bool) -> None:
            pass

        def step(self) -> None:
            steps.append(self.name)

    task.optimizers = [Optimizer("D"), Optimizer("G")]
    logs = task.training_step({"image": torch.randn(images, 1, 32, 32), "label": torch.zeros(images).long()}, 0)["logs"]
    assert "".join(steps) == "DDDDG"
    assert logs["loss"].isfinite()


class Killed(BaseException):
    """Stands for the end of the process."""


@pytest.mark.parametrize("model", ["sagan_nano", pytest.param("eagan_nano", marks=pytest.mark.slow)])
def test_resume_is_bit_equal_in_mid_epoch(tmp_path, monkeypatch, model):
    config = CONFIG.replace(model=model)
    whole = train(config.replace(out=tmp_path / "whole"), quiet=True)
    step, steps = trainer.TrainingLoop.start_batch, [0]

    def killed(self: Any, *args: Any) -> None:
        steps[0] += 1
        if steps[0] == 6:  # the last saved step is the fourth, in the middle of the second epoch
            raise Killed
        step(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(trainer.TrainingLoop, "start_batch", killed)
        with pytest.raises(Killed):
            train(config.replace(out=tmp_path / "run"), quiet=True)
    saved = read_checkpoint(tmp_path / "run" / "checkpoints" / "last")
    assert saved.progress.step == 4
    # Six steps of the discriminator's and of the generator's Adam: eight and four are kept, each with its count.
    counts = [{float(s["step"]) for s in kept["state"].values()} for kept in saved.state["optimizers"]]
    assert counts == [{8.0}, {4.0}]
    assert any(key.endswith("parametrizations.weight.0._u") for key in saved.weights)
    train(make_config(resume=tmp_path / "run"), quiet=True)
    for name in ("last", "best"):
        one, two = (read_checkpoint(tmp_path / run / "checkpoints" / name) for run in ("whole", "run"))
        assert one.weights.keys() == two.weights.keys()
        assert all(torch.equal(one.weights[key], two.weights[key]) for key in one.weights)
    results = [json.loads((run / "result.json").read_text())["metrics"] for run in (whole, tmp_path / "run")]
    assert results[0] == results[1]


def test_each_step_moves_its_own_network(tmp_path, monkeypatch):
    """Two steps of the judge and one of the generator for a batch; the average follows the generator alone."""
    seen = []
    step = torch.optim.Adam.step

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(self.param_groups[0]["lr"])
        return step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.Adam, "step", noted)
    out = train(CONFIG.replace(max_steps=2, lr_g=0.002, lr_d=0.001, out=tmp_path / "run"), quiet=True)
    assert seen == [0.001, 0.001, 0.002] * 2
    weights = safetensors.torch.load_file(out / "model.safetensors")
    own, averaged = (weights[f"{name}.last.bias"] for name in ("generator", "average"))
    assert not torch.equal(own, averaged)


def test_bfloat16(tmp_path):
    config = CONFIG.replace(max_steps=2, precision="bf16-mixed", out=tmp_path / "run")
    weights = safetensors.torch.load_file(train(config, quiet=True) / "model.safetensors")
    assert all(value.dtype == torch.float32 for value in weights.values() if value.is_floating_point())


def test_generate(run, tmp_path):
    rows = generate(run, tmp_path / "all", num=2, seed=3, interpolate=4)
    assert [(row["class"], row["images"]) for row in rows] == [("1", 2), ("4", 2), ("7", 2)]
    assert len(list((tmp_path / "all").glob("00*.png"))) == 6
    assert Image.open(tmp_path / "all" / "grid.png").size == (2 * 34 + 2, 3 * 34 + 2)
    assert Image.open(tmp_path / "all" / "strips.png").size == (4 * 34 + 2, 3 * 34 + 2)
    generate(run, tmp_path / "some", classes=["7"], num=3, seed=3)
    for number in range(2):
        name = f"002-7-{number:04d}.png"
        assert (tmp_path / "some" / name).read_bytes() == (tmp_path / "all" / name).read_bytes()
    generate(run, tmp_path / "other", classes=["7"], num=1, seed=4)
    assert (tmp_path / "other" / "002-7-0000.png").read_bytes() != (tmp_path / "all" / "002-7-0000.png").read_bytes()


def test_each_class_has_rows_of_its_own_in_the_grid(run, tmp_path):
    generate(run, tmp_path, classes=["1", "7"], num=9)
    grid = torch.from_numpy(np.array(Image.open(tmp_path / "grid.png").convert("L")))
    assert grid.shape == (4 * 34 + 2, 8 * 34 + 2)
    for row, name in ((0, "000-1-0000.png"), (1, "000-1-0008.png"), (2, "002-7-0000.png"), (3, "002-7-0008.png")):
        wanted = torch.from_numpy(np.array(Image.open(tmp_path / name)))
        assert torch.equal(grid[row * 34 + 2 :, 2:][:32, :32], wanted)
    assert (grid[36:68, 36:] == 255).all()


@pytest.mark.slow
@pytest.mark.parametrize("file_format", ["torch-export", "onnx"])
def test_what_generates_is_exported(run, tmp_path, file_format):
    out = export(run, file_format, tmp_path / "model")
    if file_format == "torch-export":
        task = load_task(run)
        noise, labels = torch.randn(3, 4), torch.tensor([0, 1, 2])
        with torch.no_grad():
            found = torch.export.load(out).module()(noise, labels)
            torch.testing.assert_close(found, task.model.average(noise, labels), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num", "0"], "num must be at least 1, got 0"),
        (["--interpolate", "1"], "interpolate must be at least 2, got 1"),
        (["--classes", "1,5"], "unknown class '5'"),
        (["--classes", "4,4"], "class '4' is given twice"),
    ],
)
def test_generate_says_what_is_wrong(run, tmp_path, capsys, arguments, message):
    assert main(["generate", str(run), "--out", str(tmp_path / "out"), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_generate_takes_a_run_of_a_gan(judge, tmp_path):
    with pytest.raises(UserError, match=r"is a run of image-classification; generate takes one of image-generation"):
        generate(judge, tmp_path / "out")


def test_predict_points_to_generate(run):
    with pytest.raises(UserError, match="use: tokenmix generate RUN"):
        predict(run, ["a.png"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"img_size": None}, "those of digits have 8 x 8; give --img-size 32"),
        ({"img_size": 48}, "have 48 x 48"),
        ({"model": "vit_nano"}, "vit_nano is a model of image-classification, not of"),
        ({"model_kwargs": {"depth": 2}}, "depth"),
        ({"model_kwargs": {"img_size": 64}}, "img_size=64 is set elsewhere; use --data"),
        ({"lr": 1e-3}, "unknown option of image-generation 'lr'; did you mean lr_"),
        ({"mixup": 0.2}, "image-generation has no option mixup, which is one of image-classification"),
        ({"clip_grad": None}, "unknown option of image-generation 'clip_grad'"),
        ({"augment": "rand-m9"}, "augment='rand-m9' is not valid; give one of none, light"),
        ({"precision": "bf16"}, "cannot be trained with precision=bf16; give one of 32, bf16-mixed"),
        ({"accumulate": 2}, "unknown option of image-generation 'accumulate'"),
        ({"classes": "3"}, "needs at least two, got 3; digits has 0, 1, 2, 3, 4"),
        ({"classes": "3,x"}, "unknown class of digits 'x'"),
        ({"classes": ("3", "3")}, "'3' is given twice"),
        ({"d_steps": 3}, "a batch of 8 cannot be cut into d_steps=3"),
        ({"d_steps": 8}, "batch norm needs two images"),
        ({"lr_g": 0.0}, "lr_g must be a positive number, got 0.0"),
        ({"beta1": 1.0}, r"beta1 must be in \[0, 1\)"),
        ({"ema": 2.0}, r"ema must be in \(0, 1\), or none; got 2.0"),
        ({"columns": 0}, "columns must be at least 1"),
        ({"limit_eval": 1}, "needs 2 test images or more, there are 1 of digits"),
        ({"limit_eval": 9, "features": "inception"}, "needs 10 test images or more"),
        ({"features": "nowhere"}, "features=/.*/nowhere is not a run folder"),
    ],
)
def test_mistakes(tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        train(CONFIG.replace(**changes, out=tmp_path / "run"), quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_judge_of_other_data_is_refused(judge, run):
    features = RunFeatures(judge)
    features.check(["7", "1"], 1)
    assert features.wanted(torch.tensor([1, 0])).tolist() == [1, 7]
    with pytest.raises(UserError, match="unknown class for the classifier"):
        features.check(["boot", "1"], 1)
    with pytest.raises(UserError, match=r"images of 1 channel\(s\), these have 3"):
        features.check(["1"], 3)
    with pytest.raises(UserError, match="is a run of image-generation; give a run folder of image-classification"):
        RunFeatures(run)


def test_the_judge_sees_images_as_it_was_trained(judge):
    features = RunFeatures(judge)
    digits = load_images("digits", limit_eval=8).test
    images, _ = digits.pixels(torch.arange(8))
    task = load_task(judge)
    data = task.data
    wanted = (images.float() / 255 - data["mean"][0]) / data["std"][0]
    with torch.no_grad():
        torch.testing.assert_close(features(images.float() / 127.5 - 1)[1], task.model(wanted), rtol=1e-4, atol=1e-4)


def no_network(*args: Any, **kwargs: Any) -> Any:
    raise OSError("no network")


def test_inception_without_its_weights_is_one_line(tmp_path, monkeypatch):
    """Torch-fidelity may be missing, and then its weights too: neither waits nor falls back."""
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr("urllib.request.urlopen", no_network)
    with pytest.raises(UserError, match=r"^features=inception.*features=RUN, a run folder"):
        InceptionFeatures()
    assert not list(tmp_path.rglob("*.partial"))
    assert "torch_fidelity" in sys.modules or not list(tmp_path.rglob("*.pth"))


def test_noise_depends_on_the_place_alone():
    places = torch.tensor([5, 0, 3])
    noise = noise_of(places, 4, seed=1)
    torch.testing.assert_close(noise[1:2], noise_of(torch.tensor([0]), 4, seed=1))
    assert not torch.equal(noise, noise_of(places, 4, seed=2))
    assert not torch.equal(noise, noise_of(places, 4, seed=1, group=1))
    many = noise_of(torch.arange(2000), 16, seed=0)
    assert many.mean().abs() < 0.03
    assert many.std().item() == pytest.approx(1, abs=0.02)


def test_the_way_between_two_noises_keeps_their_length():
    first, last = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    path = between(first, last, 5)
    torch.testing.assert_close(path.norm(dim=1), torch.ones(5))
    torch.testing.assert_close(path[[0, 4]], torch.stack([first, last]))
    torch.testing.assert_close(between(first, first, 3), first.expand(3, 2))


def test_classes_of_files_keep_their_numbers(tmp_path):
    """Sets of files make subsets anew from the files' own labels."""
    for number, name in enumerate(("apple", "boat", "cat")):
        for i in range(6):
            path = tmp_path / name / f"{i}.png"
            path.parent.mkdir(exist_ok=True)
            Image.new("RGB", (40, 40), (number * 100, i, 0)).save(path)
    images = load_images(f"folder:{tmp_path}", img_size=32)
    kept = keep_classes(images, ["cat", "apple"], limit=6, limit_eval=None, seed=0)
    assert kept.classes == ["cat", "apple"]
    pictures, _ = kept.train.pixels(torch.arange(6))
    red = pictures[:, 0].float().mean((1, 2)).round().tolist()
    assert [{200.0: 0, 0.0: 1}[level] for level in red] == kept.train.labels.tolist()
    assert sorted(kept.train.labels.tolist()) == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("flip", "augment", "both"), [(True, "light", True), (False, "light", False), (True, "none", False)]
)
def test_images_are_mirrored_where_the_data_allows(run, flip, augment, both):
    task = load_task(run)
    config, data = task.config, task.data
    build: Callable[..., ImageGeneration] = ImageGeneration
    task = build(task.model, config.replace(augment=augment), {**data, "flip": flip})
    images = torch.arange(2.0).expand(40, 1, 2, 2)
    torch.manual_seed(0)
    assert (len(task._mirrored(images)[:, 0, 0, 0].unique()) == 2) == both
