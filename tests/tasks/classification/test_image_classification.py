"""Image classification: loss, metrics, and data that it cannot learn from."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.metrics import confusion_matrix, log_loss, recall_score, top_k_accuracy_score
from torch import Tensor, nn

from tokenmix.errors import UserError
from tokenmix.lab.data.images import read_image
from tokenmix.lab.tasks.classification.task import ImageClassification
from tokenmix.lab.train.sources import make_config

CONFIG = make_config(data="digits", limit=60, limit_eval=30, batch_size=10)
DESCRIPTION: dict[str, Any] = {
    "classes": list("abcdefg"),
    "channels": 1,
    "img_size": [2, 2],
    "mean": [0.0],
    "std": [1.0],
}


class Flat(nn.Module):
    def __init__(self, classes: int = 7) -> None:
        super().__init__()
        self.head = nn.Linear(4, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(images.flatten(1))


def batch(count: int = 8, classes: int = 7) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "image": torch.randn(count, 1, 2, 2, generator=generator),
        "label": torch.randint(classes, (count,), generator=generator),
        "index": torch.arange(count),
    }


def task(**changes: Any) -> ImageClassification:
    torch.manual_seed(0)
    return ImageClassification(Flat(), CONFIG.replace(**changes), DESCRIPTION)


def test_loss_is_smoothed_cross_entropy():
    made = batch()
    found, _ = task(smoothing=0.2).loss(made)
    log_p = task().model(made["image"]).log_softmax(-1)
    target = 0.8 * F.one_hot(made["label"], 7) + 0.2 / 7
    torch.testing.assert_close(found, -(target * log_p).sum(-1).mean())


@pytest.mark.parametrize("settings", [{"mixup": 0.4}, {"cutmix": 1.0}, {"mixup": 0.4, "cutmix": 1.0}])
def test_mixing_is_seeded_and_leaves_the_batch_alone(settings):
    made, mixing = batch(), task(**settings, smoothing=0.0)
    images = made["image"].clone()
    losses = []
    for seed in (1, 1, 2):
        np.random.seed(seed)
        losses.append(mixing.loss(made)[0].item())
    assert losses[0] == losses[1] != losses[2]
    assert torch.equal(made["image"], images)
    assert mixing.loss(batch(7))[0].isfinite(), "what is left of a batch with an unreadable file may be odd"


def test_metrics_agree_with_scikit_learn():
    scored, logits, labels = task(), [], []
    for number, count in enumerate((8, 5)):
        made = {**batch(count), "index": 10 * number + torch.arange(count)}
        scored.validation_step(made, number)
        logits.append(scored.model(made["image"]).detach())
        labels.append(made["label"])
    scored.on_validation_epoch_end()
    probabilities, truth = torch.cat(logits).double().softmax(-1).numpy(), torch.cat(labels).numpy()
    every = list(range(7))
    results = scored.results
    assert results["accuracy"] == pytest.approx((probabilities.argmax(-1) == truth).mean())
    assert results["top5"] == pytest.approx(top_k_accuracy_score(truth, probabilities, k=5, labels=every))
    assert results["loss"] == pytest.approx(log_loss(truth, probabilities, labels=every), rel=1e-5)
    assert results["confusion"] == confusion_matrix(truth, probabilities.argmax(-1), labels=every).tolist()
    named = {name: value for name, value in results["recall"].items() if not math.isnan(value)}
    recalls = recall_score(truth, probabilities.argmax(-1), labels=np.unique(truth), average=None)
    assert list(named.values()) == pytest.approx(recalls.tolist())
    assert list(named) == ["abcdefg"[i] for i in np.unique(truth)]


def test_top5_needs_more_than_five_classes():
    few = ImageClassification(Flat(5), CONFIG, {**DESCRIPTION, "classes": list("abcde")})
    assert "top5" not in few.numbers()


def folder_of(path: Path, classes: str, colour: bool = False) -> str:
    rng = np.random.default_rng(0)
    for label in classes:
        (path / label).mkdir(parents=True)
        for i in range(6):
            pixels = rng.integers(0, 255, (8, 8, 3) if colour else (8, 8)).astype(np.uint8)
            Image.fromarray(pixels).save(path / label / f"{i}.png")
    return f"folder:{path}"


def test_one_class_is_no_classification(tmp_path):
    spec = folder_of(tmp_path, "a")
    with pytest.raises(UserError, match=r"only one class \('a'\)"):
        ImageClassification.load_data(CONFIG.replace(data=spec))


def test_data_of_other_classes_is_refused(tmp_path):
    like = ImageClassification.load_data(CONFIG).describe()
    spec = folder_of(tmp_path, "ab", colour=True)
    with pytest.raises(UserError, match=r"has the classes a, b; the run was trained on 0, 1, 2, \.\.\. \(10\)"):
        ImageClassification.load_data(CONFIG.replace(data=spec), like=like)


def test_other_data_is_prepared_as_the_runs_own(tmp_path):
    own = CONFIG.replace(data=folder_of(tmp_path / "own", "ab", colour=True), img_size=8)
    like = ImageClassification.load_data(own).describe()
    dark = {**like, "mean": [0.1] * len(like["mean"])}
    plain, shifted = (ImageClassification.load_data(own, like=d).test_batches(batch_size=2) for d in (like, dark))
    one, two = next(iter(plain))["image"], next(iter(shifted))["image"]
    shift = torch.tensor([(m - 0.1) / s for m, s in zip(like["mean"], like["std"])]).view(-1, 1, 1)
    torch.testing.assert_close(two, one + shift)


def test_a_convolutional_model_of_timm(tmp_path):
    description = ImageClassification.load_data(CONFIG).describe()
    config = CONFIG.replace(model="resnet10t")
    ImageClassification.check(config, 10)
    model = ImageClassification.build_model(config, {**description, "img_size": [32, 32]})
    assert model(torch.zeros(2, 1, 32, 32)).shape == (2, 10)


def test_inspect_shows_the_crop_that_predictions_are_made_of(tmp_path):
    file = tmp_path / "a.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (16, 16), dtype=np.uint8)).save(file)
    classifier = task()
    classifier.data = {**DESCRIPTION, "crop_pct": 0.25}
    seen: list[Tensor] = []
    classifier.model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    (row,) = classifier.predict([file])
    assert row["label"] in DESCRIPTION["classes"]
    shown, inputs = ImageClassification.view(classifier.model, file, classifier.data)
    wanted = read_image(file, 1, (2, 2), crop_pct=0.25) / 255
    assert not torch.equal(wanted, read_image(file, 1, (2, 2)) / 255)
    assert torch.equal(shown, wanted)
    assert torch.equal(inputs, wanted[None])
    assert torch.equal(seen[0], wanted[None])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "mixer_nan"}, "unknown model 'mixer_nan'; did you mean mixer_nano"),
        ({"mixup": -0.1}, "mixup must be at least 0, got -0.1"),
        ({"smoothing": 1.5}, r"smoothing must be in \[0, 1\), got 1.5"),
    ],
)
def test_settings_are_checked_before_data_are_read(change, message):
    with pytest.raises(UserError, match=message):
        ImageClassification.check(CONFIG.replace(**change), 10)
