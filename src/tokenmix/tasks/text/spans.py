"""Answers as spans of a context: which one logits point at, and how well it agrees with the given ones."""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchmetrics.text import SQuAD

from tokenmix.tasks.text.data.questions import EncodedQuestions
from tokenmix.tasks.text.data.sequences import Sequences, padded

__all__ = ["Span", "SpanAgreement", "WholeQuestions", "best_span"]

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
        asked = [{"context": q.context, "answers": [text for text, _ in q.answers] or [""]} for q in questions]
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


class SpanAgreement(SQuAD):
    """SQuAD's exact match and F1 of words, as shares in 0..1; torchmetrics has them in per cent."""

    def compute(self) -> dict[str, Tensor]:
        """Both so far."""
        return {name: value / 100 for name, value in super().compute().items()}
