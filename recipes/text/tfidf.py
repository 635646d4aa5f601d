"""What counting words gets: a trained model that does not beat it has earned no claim."""

from typing import Any

import numpy as np

from tokenmix.errors import UserError
from tokenmix.lab.tasks.text.data.labelled import LabelledData, LabelledText

__all__ = ["tfidf_baseline"]


def tfidf_baseline(data: LabelledData) -> dict[str, float]:
    """TF-IDF of words and pairs of words, and a logistic regression: accuracy, macro F1 and the majority's share.

    Of two texts, the features of both, what they share and where they differ stand side by side. Words are counted in
    the training part alone.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import f1_score

    if not data.classes:
        raise UserError(f"{data.spec} has numbers for labels; the TF-IDF base is for classes")
    train, test = _features(data)
    model = LogisticRegression(C=10, max_iter=500)
    model.fit(train, data.train.labels.numpy())
    truth, answers = data.test.labels.numpy(), model.predict(test)
    return {
        "accuracy": float(np.mean(answers == truth)),
        "macro_f1": float(f1_score(truth, answers, average="macro")),
        "majority": float((truth == np.bincount(data.train.labels.numpy()).argmax()).mean()),
    }


def _features(data: LabelledData) -> tuple[Any, Any]:
    from scipy.sparse import hstack
    from sklearn.feature_extraction.text import TfidfVectorizer

    words = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, min_df=1 if len(data.train) < 1000 else 2)
    words.fit([*data.train.texts, *(data.train.pairs or ())])

    def of(part: LabelledText) -> Any:
        first = words.transform(part.texts)
        if part.pairs is None:
            return first
        second = words.transform(part.pairs)
        return hstack([first, second, first.multiply(second), abs(first - second)]).tocsr()

    return of(data.train), of(data.test)
