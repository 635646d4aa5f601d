"""Metrics of classes of unequal size, weights of the loss, a balanced order, and the metric that is monitored."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import balanced_accuracy_score, f1_score, matthews_corrcoef, roc_auc_score
from torch import Tensor, nn

from predictions import check_predictions
from tokenmix.errors import UserError
from tokenmix.lab.data.indexed import IndexedDataset, balanced_order
from tokenmix.lab.tasks.classes import balanced_weights, is_unbalanced, rank_area
from tokenmix.lab.tasks.classification.task import ImageClassification
from tokenmix.lab.train.checkpoint import read_weights
from tokenmix.lab.train.metrics import read_predictions
from tokenmix.lab.train.run import train
from tokenmix.lab.train.sources import make_config
from tokenmix.lab.train.trainer import TrainingLoop
from verbs import refused


def description(**sizes: int) -> dict[str, Any]:
    return {"classes": list(sizes), "counts": {"train": sizes}, "channels": 1, "img_size": [1, 1]}


class Given(nn.Module):
    """Logits that are the pixels."""

    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(1)


def judged(logits: Tensor, labels: Tensor, data: dict[str, Any]) -> ImageClassification:
    """The task after an evaluation in two batches."""
    task = ImageClassification(Given(), make_config(data="digits"), data)
    index = torch.arange(len(labels))
    task.on_validation_epoch_start()
    for number, part in enumerate((slice(0, 7), slice(7, None))):
        task.validation_step(
            {"image": logits[part, :, None, None], "label": labels[part], "index": index[part]}, number
        )
    task.on_validation_epoch_end()
    return task


def calibration(probabilities: np.ndarray, labels: np.ndarray) -> float:
    """The mean over samples of the distance of confidence and accuracy in their bin of fifteen."""
    confidence, right = probabilities.max(1), probabilities.argmax(1) == labels
    total = 0.0
    for low in range(15):
        inside = (confidence >= low / 15) & (confidence < (low + 1) / 15 + (low == 14))
        if inside.any():
            total += inside.sum() * abs(confidence[inside].mean() - right[inside].mean())
    return total / len(labels)


@pytest.mark.parametrize("classes", [2, 4])
def test_metrics_are_scikit_learns(classes: int) -> None:
    generator = torch.Generator().manual_seed(classes)
    labels = torch.where(torch.rand(90, generator=generator) < 0.7, 0, torch.arange(90) % classes)
    logits = torch.randn(90, classes, generator=generator) + 2 * F.one_hot(labels, classes)
    logits[5] = logits[6] = logits[7]  # ties of the rank area
    sizes = {name: 10 - i for i, name in enumerate("abcd"[:classes])}
    task = judged(logits, labels, {**description(**sizes), "metrics": ["matthews"]})
    truth, probabilities = labels.numpy(), logits.double().softmax(1).numpy()
    predicted = probabilities.argmax(1)
    wanted = {
        "accuracy": (predicted == truth).mean(),
        "balanced_accuracy": balanced_accuracy_score(truth, predicted),
        "macro_f1": f1_score(truth, predicted, average="macro"),
        "ece": calibration(probabilities, truth),
        "matthews": matthews_corrcoef(truth, predicted),
    }
    if classes == 2:
        wanted |= {"auc": roc_auc_score(truth, probabilities[:, 1]), "f1": f1_score(truth, predicted, pos_label=1)}
    for name, value in wanted.items():
        assert task.results[name] == pytest.approx(value, abs=1e-5), name


def test_f1_is_of_the_smaller_class() -> None:
    labels, logits = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1]), torch.tensor([[1.0, 0], [0, 1.0]]).repeat(4, 1)
    for sizes, positive in (({"defect": 3, "fine": 5}, 0), ({"fine": 5, "odd": 3}, 1), ({"a": 4, "b": 4}, 1)):
        task = judged(logits, labels, description(**sizes))
        wanted = f1_score(labels, logits.argmax(1), pos_label=positive)
        assert task.results["f1"] == pytest.approx(wanted), sizes


def test_the_area_counts_pairs() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 6, (30,), generator=generator)
    positive = torch.rand(30, generator=generator) < 0.4
    weights = torch.randint(0, 3, (2, 30), generator=generator).double()
    for row, found in zip(weights, rank_area(weights, positive, scores)):
        won = total = 0.0
        for i in positive.nonzero()[:, 0]:
            for j in (~positive).nonzero()[:, 0]:
                pairs = row[i] * row[j]
                won, total = won + pairs * ((scores[i] > scores[j]) + 0.5 * (scores[i] == scores[j])), total + pairs
        assert found.item() == pytest.approx(float(won / total))


def test_one_class_has_no_area() -> None:
    task = judged(torch.randn(9, 2), torch.zeros(9, dtype=torch.long), description(a=5, b=5))
    assert np.isnan(task.results["auc"])
    assert np.isnan(task.results["recall"]["b"])


@pytest.mark.parametrize(
    ("sizes", "unbalanced"),
    [
        ((72, 28), True),
        ((60, 40), False),
        ((5, 5, 5), False),
        ((30, 10, 10), True),
        ((19, 10, 10), False),
        ((5,), False),
    ],
)
def test_balanced_accuracy_is_monitored_where_one_class_is_large(sizes: tuple[int, ...], unbalanced: bool) -> None:
    assert is_unbalanced(sizes) == unbalanced
    named = description(**{f"c{i}": size for i, size in enumerate(sizes)})
    task = ImageClassification(Given(), make_config(data="digits"), named)
    assert task.monitor == ("balanced_accuracy" if unbalanced else "accuracy")
    assert task.mode == "max"
    chosen = ImageClassification(Given(), make_config(data="digits", monitor="loss"), named)
    assert (chosen.monitor, chosen.mode) == ("loss", "min")


def test_weights_make_classes_count_alike() -> None:
    weights = balanced_weights([6, 3, 0, 1])
    assert weights.tolist() == pytest.approx([10 / 18, 10 / 9, 0, 10 / 3])
    config = make_config(data="digits", class_weights="balanced", smoothing=0.0)
    task = ImageClassification(Given(), config, description(a=6, b=3, c=1))
    logits, labels = torch.randn(10, 3), torch.tensor([0] * 6 + [1] * 3 + [2])
    batch = {"image": logits[:, :, None, None], "label": labels}
    each = -logits.log_softmax(1)[torch.arange(10), labels]
    by_class = [each[labels == c].mean() for c in range(3)]
    torch.testing.assert_close(task.loss(batch)[0], torch.stack(by_class).mean())


class Numbered(IndexedDataset):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def read(self, indices: Tensor, epoch: int) -> Tensor:
        return indices


def test_a_balanced_epoch_has_as_many_of_each_class() -> None:
    labels = torch.tensor([0] * 70 + [1] * 20 + [2] * 8)
    data = balanced_order(Numbered(98), labels, "balanced")
    order = data.training_order(3, 5, 0, 1)
    assert len(order) == 98
    assert np.array_equal(order, data.training_order(3, 5, 0, 1)), "a function of seed and epoch"
    assert not np.array_equal(order, data.training_order(3, 6, 0, 1))
    assert sorted(np.bincount(labels[order]).tolist()) == [32, 33, 33]
    times = np.bincount(order, minlength=98)
    for label in range(3):
        own = times[labels.numpy() == label]
        assert own.max() - own.min() <= 1, "samples of a class come equally often"
    shares = [data.training_order(3, 5, rank, 3) for rank in range(3)]
    assert {len(share) for share in shares} == {33}
    together = np.stack(shares, 1).flatten()
    assert np.array_equal(together, [*order, order[0]]), "the samples of one process, in steps of three"
    plain = Numbered(98)
    assert balanced_order(plain, labels, "shuffle") is plain


def test_shards_are_not_read_in_a_balanced_order() -> None:
    shards = Numbered(8)
    shards.reads_in_order = True
    with pytest.raises(UserError, match="--class-weights balanced instead of --sampler balanced"):
        balanced_order(shards, torch.zeros(8), "balanced")


def test_a_run_with_these_options(tmp_path: Path) -> None:
    config = make_config(
        data="digits",
        model="vit_nano",
        model_kwargs={"depth": 1},
        limit=128,
        limit_eval=60,
        validation=40,
        batch_size=32,
        epochs=2,
        device="cpu",
        threads=1,
        monitor="loss",
        class_weights="balanced",
        sampler="balanced",
        out=tmp_path / "run",
    )
    run = train(config, quiet=True)
    check_predictions(run, {"accuracy", "balanced_accuracy", "macro_f1", "ece", "loss", "top5"})
    result = json.loads((run / "result.json").read_text())
    assert result["validation"]["loss"] <= result["validation_final"]["loss"]
    assert set(result["metrics"]["recall"]) == set(json.loads((run / "data.json").read_text())["classes"])


def test_an_unknown_metric_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ("train", "image-classification", "--data", "digits", "--monitor", "acuracy", "--out", str(tmp_path / "r"))
    assert "unknown metric of image-classification 'acuracy'; did you mean accuracy" in refused(capsys, *words)
    assert not (tmp_path / "r").exists()


def test_a_balanced_run_resumes_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(
        data="digits",
        model="vit_nano",
        model_kwargs={"depth": 1},
        limit=96,
        limit_eval=20,
        validation=0,
        batch_size=16,
        epochs=2,
        checkpoint_every=2,
        device="cpu",
        threads=1,
        sampler="balanced",
    )
    whole, run = train(config.replace(out=tmp_path / "whole"), quiet=True), tmp_path / "run"
    step = TrainingLoop.start_batch

    def killed(self: TrainingLoop) -> None:
        if self.progress.step == 9:
            raise KeyError("killed")
        step(self)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingLoop, "start_batch", killed)
        with pytest.raises(KeyError):
            train(config.replace(out=run), quiet=True)
    train(make_config(resume=run), quiet=True)
    ours, theirs = read_weights(run), read_weights(whole)
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
    said, before = (read_predictions(folder) or {} for folder in (run, whole))
    assert said.keys() == before.keys()
    assert all(torch.equal(said[name], value) for name, value in before.items())
