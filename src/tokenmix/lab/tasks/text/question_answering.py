"""Question answering: the span of a context that answers a question, or no answer."""

import json
import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tokenmix.errors import UserError
from tokenmix.files import Values, user_path
from tokenmix.lab.data.fetch import log
from tokenmix.lab.data.indexed import hold_out
from tokenmix.lab.tasks.text.questions import (
    EncodedQuestions,
    Question,
    WholeQuestions,
    load_questions,
    read_squad,
)
from tokenmix.lab.tasks.text.task import Sentence, TextData, TextTask, hub_form, inputs_of, read_sentences
from tokenmix.lab.train.config import TrainConfig
from tokenmix.lab.train.metrics import Metric, Rows, joined
from tokenmix.lab.train.programs import Batch, Description, HubForm, Shown
from tokenmix.text.heads import GMLPForQuestionAnswering

AT_ONCE = 16
BEST, LONGEST = 20, 30
AROUND = 10
"""Words on either side of an answer for the baseline."""


class Span(NamedTuple):
    """Characters of a context, their score as an answer, and the score of no answer."""

    begin: int
    end: int
    score: float
    none: float


def agreement(answer: str, wanted: Sequence[str]) -> tuple[float, float]:
    """Exact match and word F1 with the best-matching true answer, without articles, punctuation and case.

    If one side has no words, both scores are 1 if the other has none, else 0.
    """
    scores = []
    ours = _words(answer)
    for theirs in map(_words, wanted):
        common = sum((Counter(ours) & Counter(theirs)).values())
        f1 = 2 * common / (len(ours) + len(theirs)) if ours and theirs else float(ours == theirs)
        scores.append((float(ours == theirs), f1))
    return max(exact for exact, _ in scores), max(f1 for _, f1 in scores)


def agreement_rows(answers: Sequence[str], batch: Batch) -> Rows:
    """Evaluation rows of the answers to a batch of questions."""
    rows = [agreement(text, asked["answers"]) for text, asked in zip(answers, batch["asked"], strict=True)]
    exact, f1 = torch.tensor(rows).view(-1, 2).unbind(1)
    return {"index": batch["index"], "exact_match": exact, "f1": f1}


def near_question(question: str, context: str, length: int) -> str:
    """The `length` words of the context nearest to words of the question, preferably without containing any.

        score_i = sum_(outside) w_j / d_ij - sum_(inside) w_j,   d_ij <= 10

    w_j is 1 over the count of word j in the context if the question contains it, else 0. d_ij is the distance of word j
    from the span that begins at word i.
    """
    found = list(re.finditer(r"\w+", context))
    words, asked = [place[0].lower() for place in found], set(re.findall(r"\w+", question.lower()))
    length, often = min(length, len(words)), Counter(words)
    if not words:
        return ""
    weights = np.pad([(word in asked) / often[word] for word in words], AROUND)
    falling = 1 / np.arange(1, AROUND + 1)
    scores = np.correlate(weights, np.concatenate([falling[::-1], -np.ones(length), falling]), "valid")
    begin = int(scores.argmax())
    return context[found[begin].start() : found[begin + length - 1].end()]


def _words(text: str) -> list[str]:
    plain = text.lower().translate(str.maketrans("", "", string.punctuation))
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


class QuestionAnswering(TextTask):
    """Start and end of the answer, by two cross-entropies over the tokens.

    A long context is cut into windows of `seq_len` tokens that share `doc_stride`; the target of a window without the
    answer is [CLS]. If the data has questions without an answer, none is given if [CLS] scores higher than the best
    span.
    """

    monitor: str = "f1"
    auto: ClassVar[str] = "AutoModelForQuestionAnswering"
    hub: ClassVar[HubForm | None] = hub_form("question-answering", auto)
    network: ClassVar[type[Any]] = GMLPForQuestionAnswering

    @classmethod
    def load_data(cls, config: TrainConfig, like: Description | None = None) -> TextData:
        data = load_questions(config.data.data)
        texts = [text for q in data.train for text in (q.question, q.context)]
        tokenizer, length, description = cls.tokenization(config, like, texts)
        stride = config.options.doc_stride if like is None else int(like["doc_stride"])
        asked = config.data.validation, config.data.limit
        kept, held = hold_out(torch.zeros(len(data.train)), *asked, data.groups)
        encoded = partial(_encoded, tokenizer=tokenizer, length=length, stride=stride)
        lengths = [len(q.answers[0][0].split()) for q in data.train if q.answers]
        description |= {"doc_stride": stride, "unanswerable": data.unanswerable, "source": data.source}
        description["answer_words"] = round(median(lengths)) if lengths else 1
        return TextData(
            encoded([data.train[i] for i in kept]),
            WholeQuestions(encoded(data.test)),
            WholeQuestions(encoded([data.train[i] for i in held])) if len(held) else None,
            tokenizer=tokenizer,
            config=config,
            description=description,
        )

    def loss(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        return self.model(**inputs_of(batch, self.model)).loss, {}

    def evaluate(self, batch: Batch) -> Rows:
        return agreement_rows([text for text, _ in self._answers(batch)], batch)

    @classmethod
    def make_metrics(cls, config: TrainConfig, data: Description) -> dict[str, Metric]:
        """Exact match and word F1, as in SQuAD."""
        return {"exact_match": Metric.mean(itemgetter("exact_match")), "f1": Metric.mean(itemgetter("f1"))}

    def plain_answers(self, data: TextData) -> dict[str, Rows]:
        """Words near the question's, as many as answers usually have; and no answer, if some questions have none."""
        found: dict[str, list[Rows]] = {"word overlap": [], **({"no answer": []} if self.data["unanswerable"] else {})}
        for batch in data.test_batches(batch_size=AT_ONCE):
            near = [near_question(q["question"], q["context"], self.data["answer_words"]) for q in batch["asked"]]
            for rows, answers in zip(found.values(), (near, [""] * len(near))):
                rows.append(agreement_rows(answers, batch))
        return {name: joined(rows) for name, rows in found.items()}

    def show(self, batch: Batch) -> list[Shown]:
        return [
            Shown(asked["question"], next(iter(asked["answers"]), "") or "-", answer or "-")
            for (answer, _), asked in zip(self._answers(batch), batch["asked"])
        ]

    def predict(self, inputs: Sequence[str | Path]) -> list[Values]:
        """Answer and its characters in the context; `margin` is the score of the answer minus that of no answer.

        Inputs are lines with a question and its context, separated by a tab or as JSON, or files in SQuAD's layout.
        """
        asked: list[Question] = []
        for given in inputs:
            if str(given).endswith(".json"):
                asked += read_squad(user_path(given))
            else:
                asked += map(_question, read_sentences([given]))
        parts = _encoded(asked, self.tokenizer(), int(self.data["seq_len"]), int(self.data["doc_stride"]))
        whole, answers = WholeQuestions(parts), []
        for numbers in torch.arange(len(asked)).split(AT_ONCE):
            batch = whole.read(numbers, 0)
            moved = {k: v.to(self.device) if isinstance(v, Tensor) else v for k, v in batch.items()}
            for (text, span), one in zip(self._answers(moved), batch["asked"]):
                begin = one["context"].index(text, span.begin) if text else None
                place = {"begin": begin, "end": None if begin is None else begin + len(text)}
                margin = round(span.score - span.none, 6)
                answers.append({"question": one["question"], "answer": text, **place, "margin": margin})
        return answers

    def _answers(self, batch: Batch) -> list[tuple[str, Span]]:
        """The answer to each question, "" for none, and the best span."""
        out, found = self.model(**inputs_of(batch, self.model)), []
        start, end = out.start_logits.float(), out.end_logits.float()
        for i, asked in enumerate(batch["asked"]):
            row = batch["sample"] == i
            span = best_span(start[row], end[row], batch["offsets"][row])
            answered = not self.data["unanswerable"] or span.score >= span.none
            # Pieces of some tokenizers begin with the space before a word.
            found.append((asked["context"][span.begin : span.end].strip() if answered else "", span))
        return found


def _encoded(questions: Sequence[Question], tokenizer: Any, length: int, stride: int) -> EncodedQuestions:
    """Encode in windows of `length`; a question takes at most half of what the overlap leaves."""
    longest = max(1, (length - stride - tokenizer.num_special_tokens_to_add(pair=True)) // 2)
    found = EncodedQuestions(questions, tokenizer, max_length=length, stride=stride, max_question=longest)
    if found.cut:
        log(
            f"{found.cut} of {len(questions)} questions have more than {longest} tokens and were cut; a larger "
            "--seq-len or a smaller --doc-stride leaves room"
        )
    return found


def _question(line: Sentence) -> Question:
    """Parse a JSON line with "question" and "context", or both separated by a tab."""
    question, _, context = line.text.partition("\t")
    if line.text.startswith("{"):
        try:
            row = json.loads(line.text)
            question, context = row["question"], row["context"]
        except (ValueError, KeyError, RecursionError) as error:
            what = f"{error} is missing" if isinstance(error, KeyError) else f"not JSON: {error}"
            raise UserError(f'{line.where}: {what}; a line is {{"question": ..., "context": ...}}, both text') from None
    if not (isinstance(question, str) and isinstance(context, str) and question.strip() and context.strip()):
        raise UserError(
            f"{line.where}: give a question and its context with a tab between them, or as JSON: "
            '{"question": ..., "context": ...}'
        )
    return Question(line.where, question.strip(), context.strip(), ())


def best_span(start: Tensor, end: Tensor, offsets: Tensor) -> Span:
    """Best pair of tokens in one question's parts: the end not before the start, at most 30 tokens.

    Shape: logits (P, N) of start and end, offsets (P, N, 2), negative outside the context.
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
