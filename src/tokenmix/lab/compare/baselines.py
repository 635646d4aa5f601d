"""The simplest methods on a task's data, scored with the task's own metric: what a network has to beat."""

import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenmix.lab.data.fetch import log
from tokenmix.lab.train.metrics import Rows, joined
from tokenmix.lab.train.task import TaskData, TaskModule

MOST = 10_000
"""Training samples that a baseline is fitted to."""
MOST_TREES = 200
SMALLEST = 1e-6
"""Probability of a class that never occurred, so that its logarithm is finite."""

Features = Tensor | list[str] | None
Predictor = Callable[[Features, Tensor], Tensor]
"""Logarithms of probabilities (n, classes, ...) for features of n samples and targets (n, ...) of that shape."""


def fit_baselines(task: TaskModule, data: TaskData) -> dict[str, float]:
    """The score of each baseline that the task names, on the test samples."""
    scores: dict[str, float] = {}
    if not task.baselines:
        return scores
    features, targets = _gathered(task, data)
    for name in task.baselines:
        start = time.monotonic()
        predict = BASELINES[name](features, targets, task.num_targets())
        parts, seen = list[Rows](), 0
        for given, wanted in task.plain_samples(data, "test"):
            index = torch.arange(seen, seen := seen + len(wanted))
            parts.append(joined([task.judged(predict(given, wanted), wanted, index)]))
        scores[name] = float(task.metrics[task.monitor](joined(parts)))
        log(f"{name}: {task.monitor} {scores[name]:.4f} in {time.monotonic() - start:.0f} s")
    return scores


def _gathered(task: TaskModule, data: TaskData) -> tuple[Features, Tensor]:
    """Features and targets of at most `MOST` training samples; targets that are one for each of several places flat."""
    parts: list[Tensor | list[str]] = []
    targets: list[Tensor] = []
    seen = 0
    for given, wanted in task.plain_samples(data, "train"):
        targets.append(wanted.flatten())
        parts += [] if given is None else [given]
        seen += len(wanted)
        if seen >= MOST:
            break
    if not parts:
        return None, torch.cat(targets)
    if isinstance(parts[0], Tensor):
        return torch.cat([part for part in parts if isinstance(part, Tensor)]), torch.cat(targets)
    texts = [text for part in parts if not isinstance(part, Tensor) for text in part]
    return texts, torch.cat(targets)


def frequencies(features: Features, targets: Tensor, classes: int) -> Predictor:
    """How often each class occurs, for every sample: the majority class, or the unigram model of words."""
    known = targets[(targets >= 0) & (targets < classes)]
    counts = torch.bincount(known, minlength=classes).double().clamp_min(SMALLEST * max(1, len(known)))
    logs = (counts / counts.sum()).log().float()

    def predict(_: Features, wanted: Tensor) -> Tensor:
        return logs.view(1, -1, *[1] * (wanted.dim() - 1)).expand(len(wanted), -1, *wanted.shape[1:])

    return predict


def nearest_mean(features: Features, targets: Tensor, classes: int) -> Predictor:
    """The class whose mean of the standardized features is nearest."""
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


def logistic_regression(features: Features, targets: Tensor, classes: int) -> Predictor:
    """Multinomial logistic regression on the standardized features."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=100, C=0.1))
    return _by_sklearn(model, features, targets, classes)


def random_forest(features: Features, targets: Tensor, classes: int) -> Predictor:
    """A forest of 200 trees."""
    from sklearn.ensemble import RandomForestClassifier

    return _by_sklearn(RandomForestClassifier(MOST_TREES, random_state=0), features, targets, classes)


def tfidf(features: Features, targets: Tensor, classes: int) -> Predictor:
    """Logistic regression on TF-IDF of words and pairs of words."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    words = TfidfVectorizer(ngram_range=(1, 2), max_features=50_000, sublinear_tf=True)
    return _by_sklearn(make_pipeline(words, LogisticRegression(max_iter=200, C=10)), features, targets, classes)


def _by_sklearn(model: Any, features: Features, targets: Tensor, classes: int) -> Predictor:
    from threadpoolctl import threadpool_limits

    def plain(given: Features) -> Any:
        return given.numpy() if isinstance(given, Tensor) else given

    # One thread: several wait long for each other where another program runs.
    with warnings.catch_warnings(), threadpool_limits(1):
        warnings.simplefilter("ignore")
        model.fit(plain(features), targets.numpy())

    def predict(given: Features, wanted: Tensor) -> Tensor:
        answers = torch.full((len(wanted), classes), SMALLEST)
        answers[:, torch.from_numpy(model.classes_)] = torch.from_numpy(model.predict_proba(plain(given))).float()
        return answers.clamp_min(SMALLEST).log()

    return predict


BASELINES: dict[str, Callable[[Features, Tensor, int], Predictor]] = {
    "majority": frequencies,
    "unigram": frequencies,
    "nearest mean": nearest_mean,
    "logistic regression": logistic_regression,
    "random forest": random_forest,
    "TF-IDF": tfidf,
}
