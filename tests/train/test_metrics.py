"""Every metric of ours against torchmetrics', which the package does not need."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenmix.lab.tasks.classes import ClassTask
from tokenmix.lab.tasks.classification.task import ImageClassification
from tokenmix.lab.tasks.segmentation.task import SemanticSegmentation
from tokenmix.lab.tasks.text.classification import TextClassification
from tokenmix.lab.tasks.text.masked_lm import MaskedLM
from tokenmix.lab.tasks.text.question_answering import agreement
from tokenmix.lab.train.metrics import Metric, f1_of, joined
from tokenmix.lab.train.sources import make_config

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


def rows_of(task: Any, given: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """What an evaluation of these batches keeps."""
    sizes = [len(labels) for _, labels in given]
    indices = torch.arange(sum(sizes)).split(sizes)
    return joined([task.judged(*batch, index) for batch, index in zip(given, indices)])


def same(found: Any, other: Any, given: list[tuple[Tensor, ...]]) -> None:
    for values in given:
        other.update(*values)
    found = list(found.values()) if isinstance(found, dict) else found
    torch.testing.assert_close(
        torch.tensor(found), other.compute(), check_dtype=False, rtol=1e-5, atol=1e-6, equal_nan=True
    )


@pytest.mark.parametrize("classes", [2, CLASSES])
@pytest.mark.parametrize("seed", range(3))
def test_metrics_of_classes(classes: int, seed: int) -> None:
    given, kinds = batches(classes, seed), theirs.classification
    likely = [(logits.softmax(-1), labels) for logits, labels in given]
    data = {"classes": [str(i) for i in range(classes)], "metrics": ["matthews"]}
    rows = rows_of(ClassTask.__new__(ImageClassification), given)
    found = {name: metric(rows) for name, metric in ImageClassification.make_metrics(make_config(), data).items()}
    shared: dict[str, Any] = {"num_classes": classes, "validate_args": False}
    same(found["accuracy"], kinds.MulticlassAccuracy(average="micro", **shared), given)
    same(found["macro_f1"], kinds.MulticlassF1Score(average="macro", **shared), given)
    same(found["matthews"], kinds.MulticlassMatthewsCorrCoef(**shared), given)
    same(found["recall"], kinds.MulticlassRecall(average="none", zero_division=float("nan"), **shared), given)
    same(found["confusion"], kinds.MulticlassConfusionMatrix(**shared), given)
    same(found["ece"], kinds.MulticlassCalibrationError(n_bins=15, norm="l1", **shared), likely)
    assert all(type(count) is int for row in found["confusion"] for count in row)
    if classes > 5:
        same(found["top5"], kinds.MulticlassAccuracy(top_k=5, average="micro", **shared), given)
    logits, labels = (torch.cat(column) for column in zip(*given))
    assert found["loss"] == pytest.approx(torch.nn.functional.cross_entropy(logits.double(), labels).item(), rel=1e-5)
    counts = torch.tensor(found["confusion"])
    counts = torch.stack([counts.diagonal(), counts.sum(1), counts.sum(0)])
    same(f1_of(counts).nan_to_num(0.0).tolist(), kinds.MulticlassF1Score(average="none", **shared), given)


@pytest.mark.parametrize("seed", range(3))
def test_area_under_the_curve(seed: int) -> None:
    rounded = [(logits.round(), labels) for logits, labels in batches(2, seed)]  # with ties
    rows = rows_of(ClassTask.__new__(ImageClassification), rounded)
    likely = [(logits.softmax(-1)[:, 1], labels) for logits, labels in rounded]
    metrics = ImageClassification.make_metrics(make_config(), {"classes": ["a", "b"]})
    same(metrics["auc"](rows), theirs.classification.BinaryAUROC(), likely)


@pytest.mark.parametrize("ignore", [0, 255])
def test_ignored_pixels(ignore: int) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(3, 4, 6, 5, generator=generator)
    labels = torch.randint(4, (3, 6, 5), generator=generator)
    labels[torch.rand(3, 6, 5, generator=generator) < 0.3] = ignore
    given = [(logits[i : i + 1], labels[i : i + 1]) for i in range(3)]
    kinds, shared = theirs.classification, {"num_classes": 4, "ignore_index": ignore, "validate_args": False}
    config, data = make_config("semantic-segmentation", data="toy"), {"classes": ["a", "b", "c", "d"], "ignore": ignore}
    task = SemanticSegmentation(torch.nn.Identity(), config, data)
    rows = rows_of(task, given)
    found = {name: metric(rows) for name, metric in task.metrics.items()}
    same(found["class_iou"], kinds.MulticlassJaccardIndex(average="none", zero_division=-1, **shared), given)
    same(found["accuracy"], kinds.MulticlassAccuracy(average="micro", **shared), given)
    mean = torch.nn.functional.cross_entropy(logits, labels, ignore_index=ignore)
    assert found["loss"] == pytest.approx(mean.item(), rel=1e-6)


def test_perplexity() -> None:
    given = batches(CLASSES, 0)
    rows = rows_of(MaskedLM.__new__(MaskedLM), given)
    metrics = MaskedLM.make_metrics(make_config("masked-lm", data="toy"), {})
    same(metrics["perplexity"](rows), theirs.text.Perplexity(), [(x[None], y[None]) for x, y in given])
    assert metrics["perplexity"](rows) == pytest.approx(math.exp(metrics["loss"](rows)))


def test_correlations() -> None:
    generator = torch.Generator().manual_seed(2)
    value, label = torch.randn(13, generator=generator).mul(2).round(), torch.rand(13, generator=generator)
    metrics = TextClassification.make_metrics(make_config("text-classification", data="toy"), {"classes": []})
    others = {
        "pearson": theirs.PearsonCorrCoef(),
        "spearman": theirs.SpearmanCorrCoef(),
        "rmse": theirs.MeanSquaredError(squared=False),
    }
    for name, other in others.items():
        expected = other(value, label).item()
        assert metrics[name]({"value": value, "label": label}) == pytest.approx(expected, rel=1e-4, abs=1e-5)


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


def test_a_weight_is_a_number_of_rows() -> None:
    """Of a mean, of a function of sums, and of a function of columns, such as one of torchmetrics'."""
    rows = {"index": torch.arange(3), "a": torch.tensor([1.0, 2.0, 5.0]), "b": torch.tensor([1.0, 4.0, 3.0])}
    weights = torch.tensor([[1.0, 1, 1], [2, 0, 1]], dtype=torch.float64)
    mean = Metric.mean(lambda rows: rows["a"])
    sums = Metric.of_sums(lambda sums: sums[:, 0] / sums[:, 1], lambda rows: torch.stack([rows["a"], rows["b"]], 1))
    columns = Metric.of_columns(theirs.functional.mean_squared_error, "a", "b", higher_is_better=False)
    stateful = Metric.of_columns(theirs.MeanSquaredError(), "a", "b", higher_is_better=False)
    for metric, wanted in ((mean, [8 / 3, 7 / 3]), (sums, [1, 7 / 5]), (columns, [8 / 3, 4 / 3])):
        assert metric.measure(rows, weights).tolist() == pytest.approx(wanted)
        assert metric(rows) == pytest.approx(wanted[0])
    assert stateful.measure(rows, weights).tolist() == pytest.approx([8 / 3, 4 / 3])


def test_parts_of_a_sample_are_added_up() -> None:
    def part(index: list[int], a: list[int], table: list[int], b: list[float]) -> dict[str, Tensor]:
        columns = {"index": index, "a": a, "t.index": table, "t.b": b}
        return {name: torch.tensor(values) for name, values in columns.items()}

    rows = joined([part([4, 1], [1, 2], [4], [1.0]), part([4], [10], [1], [0.0])])
    assert {name: values.tolist() for name, values in rows.items()} == {
        "index": [1, 4],
        "a": [2, 11],
        "t.index": [1, 4],
        "t.b": [0.0, 1.0],
    }
