"""Simple baselines on a task's data, scored with the task's metric."""

import math
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tokenmix.errors import one_line
from tokenmix.lab.compare.results import metric_name
from tokenmix.lab.data.fetch import log
from tokenmix.lab.train.metrics import Rows, joined
from tokenmix.lab.train.task import TaskData, TaskModule

MOST = 10_000
"""Largest number of training samples for a baseline."""
MOST_TREES = 200
FEW_CLASSES = 20
"""With more, the forest is of extremely randomised trees."""
MOST_COUNTS = 100_000_000
"""Largest number of class counts, of 8 bytes, in a forest."""
SMALLEST = 1e-6
"""Probability of a class without training samples, for a finite logarithm."""

Features = Tensor | list[str] | None
Predictor = Callable[[Features, Tensor], Tensor]
"""Log-probabilities (n, classes, ...) for features of n samples and targets (n, ...) of that shape."""


def fit_baselines(task: TaskModule, data: TaskData) -> dict[str, float]:
    """Score of each baseline of the task on the test samples."""
    scores: dict[str, float] = {}

    def answered() -> Iterator[tuple[str, Rows]]:
        yield from _fitted(task, data)
        yield from task.plain_answers(data).items()

    for name, rows in answered():
        score = float(task.metrics[task.monitor](rows))
        log(f"{name}: {metric_name(task.monitor)} " + (f"{score:.4f}" if math.isfinite(score) else "is not defined"))
        if math.isfinite(score):
            scores[name] = score
    return scores


def _fitted(task: TaskModule, data: TaskData) -> Iterator[tuple[str, Rows]]:
    """Evaluation rows of each named baseline on the test samples, fitted to at most `MOST` training samples."""
    if not task.baselines or task.data.get("classes") == []:  # Numeric labels have no classes.
        return
    # Targets with several positions are flattened.
    given, wanted, seen = list[Any](), list[Tensor](), 0
    for some, true in task.plain_samples(data, "train"):
        given.append(some)
        wanted.append(true.flatten())
        seen += len(true)
        if seen >= MOST:
            break
    features: Features = None
    if given[0] is not None:
        features = torch.cat(given) if isinstance(given[0], Tensor) else [text for part in given for text in part]
    targets = torch.cat(wanted)
    predictors = dict[str, Predictor]()
    for name in task.baselines:
        try:
            predictors[name] = BASELINES[name](features, targets, task.num_targets())
        except ValueError as error:  # samples of one class, or texts without words
            log(f"the baseline {name} is left out ({one_line(error)})")
    parts, seen = {name: list[Rows]() for name in predictors}, 0
    for some, true in task.plain_samples(data, "test"):
        index = torch.arange(seen, seen := seen + len(true))
        for name, predict in predictors.items():
            parts[name].append(joined([task.judged(predict(some, true), true, index)]))
    yield from ((name, joined(rows)) for name, rows in parts.items())


def frequencies(features: Features, targets: Tensor, classes: int) -> Predictor:
    """Class frequencies for every sample: the majority class, or the unigram model of words."""
    known = targets[(targets >= 0) & (targets < classes)]
    counts = torch.bincount(known, minlength=classes).double().clamp_min(SMALLEST * max(1, len(known)))
    logs = (counts / counts.sum()).log().float()

    def predict(_: Features, wanted: Tensor) -> Tensor:
        return logs.view(1, -1, *[1] * (wanted.dim() - 1)).expand(len(wanted), -1, *wanted.shape[1:])

    return predict


def nearest_mean(features: Features, targets: Tensor, classes: int) -> Predictor:
    """The class with the nearest mean of the standardised features."""
    assert isinstance(features, Tensor)
    mean, scale = features.mean(0), features.std(0).clamp_min(1e-6)
    scaled = (features - mean) / scale
    there = targets.unique()
    centres = torch.stack([scaled[targets == label].mean(0) for label in there])

    def predict(given: Features, _: Tensor) -> Tensor:
        assert isinstance(given, Tensor)
        answers = torch.full((len(given), classes), -1e4)
        answers[:, there] = -torch.cdist((given - mean) / scale, centres)
        return answers.log_softmax(-1)

    return predict


def by_sklearn(name: str, features: Features, targets: Tensor, classes: int) -> Predictor:
    """Logistic regression on standardised features, or on TF-IDF of words and word pairs; or a random forest."""
    from sklearn.ensemble import ExtraTreesClassifier, RandomForestClassifier
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from threadpoolctl import threadpool_limits

    # Splits of a random forest take samples times classes, those at random thresholds the sum; nodes hold all classes.
    forest = RandomForestClassifier if classes <= FEW_CLASSES else ExtraTreesClassifier
    trees = max(1, min(MOST_TREES, MOST_COUNTS // max(1, 2 * len(targets) * classes)))
    words = TfidfVectorizer(ngram_range=(1, 2), max_features=50_000, sublinear_tf=True)
    model: Any = {
        "logistic regression": make_pipeline(StandardScaler(), LogisticRegression(max_iter=100, C=0.1)),
        "random forest": forest(trees, random_state=0),
        "TF-IDF": make_pipeline(words, LogisticRegression(max_iter=200, C=10)),
    }[name]

    # One thread: several threads wait long for each other if another program runs.
    with warnings.catch_warnings(), threadpool_limits(1):
        warnings.simplefilter("ignore")
        model.fit(features.numpy() if isinstance(features, Tensor) else features, targets.numpy())

    def predict(given: Features, wanted: Tensor) -> Tensor:
        found = model.predict_proba(given.numpy() if isinstance(given, Tensor) else given)
        answers = torch.full((len(wanted), classes), SMALLEST)
        answers[:, torch.from_numpy(model.classes_)] = torch.from_numpy(found).float()
        return answers.clamp_min(SMALLEST).log()

    return predict


BASELINES: dict[str, Callable[[Features, Tensor, int], Predictor]] = {
    "majority": frequencies,
    "unigram": frequencies,
    "nearest mean": nearest_mean,
    **{name: partial(by_sklearn, name) for name in ("logistic regression", "random forest", "TF-IDF")},
}
