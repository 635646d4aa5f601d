"""Every metric of ours against torchmetrics', which the package does not need."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenmix.lab.tasks.classes import Calibration, Confusion, RankArea
from tokenmix.lab.tasks.text.classification import Correlation
from tokenmix.lab.tasks.text.question_answering import agreement
from tokenmix.lab.train.metrics import (
    MEASURES,
    Accuracy,
    ClassCounts,
    CrossEntropy,
    Mean,
    Metrics,
    Perplexity,
    f1_of,
    iou_of,
    recall_of,
)

theirs = pytest.importorskip("torchmetrics")
CLASSES = 7


def batches(classes: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Logits and labels; the last class neither occurs nor is predicted, one before it is only predicted."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for size in (20, 5, 33):
        logits = 2 * torch.randn(size, classes, generator=generator)
        if classes > 3:
            logits[:, -1] = -20
        labels = torch.randint(max(2, classes - 2), (size,), generator=generator)
        logits += 2 * torch.nn.functional.one_hot(labels, classes)
        found.append((logits, labels))
    return found


def same(ours: Any, other: Any, given: list[tuple[Tensor, ...]], to_theirs: Callable[..., Any] = lambda *x: x) -> None:
    for _ in range(2):  # once more after a reset
        for metric in (ours, other):
            metric.reset()
        for values in given:
            ours.update(*values)
            other.update(*to_theirs(*values))
        found = ours.compute()
        found = next(iter(found.values())) if isinstance(found, dict) else found
        torch.testing.assert_close(found, other.compute(), check_dtype=False, rtol=1e-5, atol=1e-6, equal_nan=True)


def probabilities(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return logits.softmax(-1), labels


@pytest.mark.parametrize("classes", [2, CLASSES])
@pytest.mark.parametrize("seed", range(3))
def test_metrics_of_classes(classes: int, seed: int) -> None:
    given, kinds = batches(classes, seed), theirs.classification
    shared: dict[str, Any] = {"num_classes": classes, "validate_args": False}
    for measure, other in (
        (MEASURES["accuracy"], kinds.MulticlassAccuracy(average="micro", **shared)),
        (MEASURES["macro_f1"], kinds.MulticlassF1Score(average="macro", **shared)),
        (MEASURES["matthews"], kinds.MulticlassMatthewsCorrCoef(**shared)),
        (recall_of, kinds.MulticlassRecall(average="none", zero_division=float("nan"), **shared)),
        (lambda counts: iou_of(counts).nanmean(), kinds.MulticlassJaccardIndex(average="macro", **shared)),
        (lambda counts: f1_of(counts).nan_to_num(0.0), kinds.MulticlassF1Score(average="none", **shared)),
    ):
        same(ClassCounts(classes, {"it": measure}), other, given)
    same(Confusion(classes), kinds.MulticlassConfusionMatrix(**shared), given)
    same(Calibration(), kinds.MulticlassCalibrationError(n_bins=15, norm="l1", **shared), given, probabilities)
    top = min(5, classes)
    same(Accuracy(top), kinds.MulticlassAccuracy(top_k=top, average="micro", **shared), given)


@pytest.mark.parametrize("seed", range(3))
def test_area_under_the_curve(seed: int) -> None:
    rounded = [(logits.round(), labels) for logits, labels in batches(2, seed)]  # with ties
    same(RankArea(), theirs.classification.BinaryAUROC(), rounded, lambda x, y: (x.softmax(-1)[:, 1], y))


@pytest.mark.parametrize("ignore", [0, 255])
def test_ignored_pixels(ignore: int) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(3, 4, 6, 5, generator=generator)
    labels = torch.randint(4, (3, 6, 5), generator=generator)
    labels[torch.rand(3, 6, 5, generator=generator) < 0.3] = ignore
    given = [(logits[i : i + 1], labels[i : i + 1]) for i in range(3)]
    kinds, shared = theirs.classification, {"num_classes": 4, "ignore_index": ignore, "validate_args": False}
    same(
        ClassCounts(4, {"it": lambda counts: iou_of(counts).nan_to_num(-1)}, ignore),
        kinds.MulticlassJaccardIndex(average="none", zero_division=-1, **shared),
        given,
    )
    same(ClassCounts(4, MEASURES, ignore), kinds.MulticlassAccuracy(average="micro", **shared), given)
    mean = torch.nn.functional.cross_entropy(logits, labels, ignore_index=ignore)
    metric = CrossEntropy(ignore)
    for batch in given:
        metric.update(*batch)
    torch.testing.assert_close(metric.compute().float(), mean)


def test_means_and_perplexity() -> None:
    given = batches(CLASSES, 0)
    same(Mean(), theirs.MeanMetric(), [(logits,) for logits, _ in given])
    same(Perplexity(), theirs.text.Perplexity(), given, lambda x, y: (x[None], y[None]))


def test_correlations() -> None:
    generator = torch.Generator().manual_seed(2)
    given = [(torch.randn(n, generator=generator).mul(2).round(), torch.rand(n, generator=generator)) for n in (9, 4)]
    ours = Correlation()
    for values in given:
        ours.update(*values)
    found = ours.compute()
    for name, other in (("pearson", theirs.PearsonCorrCoef()), ("spearman", theirs.SpearmanCorrCoef())):
        for values in given:
            other.update(*values)
        torch.testing.assert_close(found[name].float(), other.compute(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        ("road.", ["the Road", "a lane"]),
        ("", [""]),
        ("red ship", ["big red ship", "A red-ship"]),
        ("moon", [""]),
        ("the", [""]),
        ("an apple, an orange", ["apple apple orange"]),
    ],
)
def test_agreement_of_answers(answer: str, wanted: list[str]) -> None:
    told = theirs.functional.text.squad(
        [{"id": "0", "prediction_text": answer}], [{"id": "0", "answers": {"text": wanted}}]
    )
    exact, f1 = agreement(answer, wanted)
    assert exact == pytest.approx(told["exact_match"].item() / 100)
    assert f1 == pytest.approx(told["f1"].item() / 100)


def test_metrics_of_torchmetrics_serve_as_well() -> None:
    metrics = Metrics({"mse": theirs.MeanSquaredError(), "mean": theirs.MeanAbsoluteError()})
    metrics.reset(torch.device("cpu"))
    metrics.update(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]))
    assert metrics.compute() == {"mse": 2.0, "mean": 1.0}
    assert metrics.higher_is_better() == {"mse": False, "mean": False}
