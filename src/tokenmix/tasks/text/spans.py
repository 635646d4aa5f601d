"""Answers as spans of a context: which one logits point at, and how well it agrees with the given ones."""

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tokenmix.tasks.text.data.questions import EncodedQuestions
from tokenmix.tasks.text.data.sequences import Sequences, padded
from tokenmix.train.metrics import Mean

__all__ = ["F1", "ExactMatch", "Span", "WholeQuestions", "best_span"]

BEST, LONGEST = 20, 30


class Span(NamedTuple):
    """Characters of a context, how well they answer, and how well no answer would."""

    begin: int
    end: int
    score: float
    none: float


class WholeQuestions(Sequences):
    """Questions with all parts of their context together, as an answer is chosen among them.

    A batch: the inputs of its parts, for each part `offsets` int64 (N, 2) and `sample` int64, the place of its question
    in `asked`: a list with context and answers of each.
    """

    def __init__(self, parts: EncodedQuestions) -> None:
        self.parts = parts
        self.of = [np.flatnonzero(parts.sample == i) for i in range(len(parts.questions))]

    def __len__(self) -> int:
        return len(self.of)

    def read(self, indices: Tensor, epoch: int) -> dict[str, Any]:
        """The batch of these questions."""
        rows = [self.of[i] for i in indices.tolist()]
        numbers = np.concatenate(rows)
        batch = self.parts.read(torch.from_numpy(numbers), epoch)
        ends = [padded([self.parts.offsets[i][:, side] for i in numbers], -1) for side in (0, 1)]
        sample = torch.from_numpy(np.repeat(np.arange(len(rows)), [len(row) for row in rows]))
        questions = [self.parts.questions[i] for i in indices.tolist()]
        asked = [{"context": q.context, "answers": [text for text, _ in q.answers]} for q in questions]
        inputs = {name: value for name, value in batch.items() if not name.endswith("positions")}
        return {**inputs, "offsets": torch.stack(ends, -1), "sample": sample, "asked": asked, "index": indices}


def best_span(start: Tensor, end: Tensor, offsets: Tensor) -> Span:
    """The best pair of tokens of one question's parts: the end not before the start, at most 30 tokens.

    Shape:
        logits (P, N) of start and end, offsets (P, N, 2), negative outside the context.
    """
    outside = offsets[..., 0] < 0
    none = float((start[:, 0] + end[:, 0]).min())
    found = Span(0, 0, float("-inf"), none)
    starts, stopped = (logits.masked_fill(outside, -torch.inf) for logits in (start, end))
    for s, e, where, out in zip(starts, stopped, offsets, outside):
        count = min(BEST, int((~out).sum()))
        begins, stops = s.topk(count).indices, e.topk(count).indices
        length = stops[None] - begins[:, None]
        score = (s[begins][:, None] + e[stops]).masked_fill((length < 0) | (length >= LONGEST), -torch.inf)
        if count and float(score.max()) > found.score:
            i, j = divmod(int(score.argmax()), count)
            found = Span(int(where[begins[i], 0]), int(where[stops[j], 1]), float(score.max()), none)
    return found


class ExactMatch(Mean):
    """Share of answers that are one of those given, but for case, punctuation and articles (SQuAD's measure)."""

    def update(self, answers: Sequence[str], given: Sequence[Sequence[str]]) -> None:
        """Add answers, "" for none, and for each those given, none if it has none."""
        for answer, wanted in zip(answers, given):
            self.total = self.total + max(self.agreement(_words(answer), _words(text)) for text in wanted or [""])
            self.count = self.count + 1

    def agreement(self, ours: list[str], theirs: list[str]) -> float:
        """Of two lists of words, in 0..1."""
        return float(ours == theirs)


class F1(ExactMatch):
    """Mean of 2 PR / (P + R) over the words of an answer, against the given one that it is closest to."""

    def agreement(self, ours: list[str], theirs: list[str]) -> float:
        """Of two lists of words; of an empty one, whether both are."""
        if not ours or not theirs:
            return float(ours == theirs)
        shared = sum((Counter(ours) & Counter(theirs)).values())
        return 2 * shared / (len(ours) + len(theirs))


def _words(text: str) -> list[str]:
    kept = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", kept).split()
