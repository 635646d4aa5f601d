"""Questions about texts, from SQuAD (arXiv:1606.05250 and arXiv:1806.03822) or the hub's SQuAD, and as token ids."""

import unicodedata
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tokenmix.errors import UserError
from tokenmix.files import Values
from tokenmix.lab.data.indexed import DataSet, IndexedDataset
from tokenmix.lab.data.lookup import DataRequest, load_data
from tokenmix.lab.data.reading import parse_json
from tokenmix.lab.tasks.text.corpus import Corpus, block_characters, groups, tokenizing
from tokenmix.lab.tasks.text.files import open_table, read_lines
from tokenmix.lab.tasks.text.labelled import Batch, LabelledData, Rows, load_table, padded, token_batch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


VERSIONS = ("v2.0", "v1.1")
LONGEST = 4
"""Characters per block of a context, all of whose tokens are needed at once."""


@dataclass(frozen=True)
class Question:
    """A question, its context, and its answers as (text, start in the context), possibly none."""

    id: str
    question: str
    context: str
    answers: tuple[tuple[str, int], ...]


class QuestionData(DataSet[list[Question]]):
    """Questions for training and testing, without classes."""

    @property
    def unanswerable(self) -> bool:
        return any(not question.answers for question in [*self.train, *self.test])


def load_questions(spec: str, *, root: Path | None = None) -> QuestionData:
    """Questions about texts, for training and testing.

    Args:
        spec: `squad:PATH`, a folder with train-v1.1.json and dev-v1.1.json, or with those of v2.0; or `hf:NAME`, a
            hub data set with SQuAD's columns.
        root: the cache; $TOKENMIX_DATA or ~/.cache/tokenmix/data if not given.

    Raises:
        UserError: unknown set, another layout, a damaged file, or an answer that does not occur in its context.
    """
    return load_data(spec, "questions", root=root)


def load_squad(request: DataRequest) -> QuestionData:
    """A folder with train-v1.1.json and dev-v1.1.json, or with those of v2.0."""
    folder = request.path
    for version in VERSIONS:
        files = [folder / f"{part}-{version}.json" for part in ("train", "dev")]
        if all(file.exists() for file in files):
            train, test = (read_squad(file) for file in files)
            return QuestionData(train, test, [], f"SQuAD {version}: {folder.resolve()}")
    wanted = " or ".join(f"train-{version}.json with dev-{version}.json" for version in reversed(VERSIONS))
    raise UserError(f"{str(folder)!r} has no {wanted}; give the folder that holds them")


def read_squad(path: Path) -> list[Question]:
    whole = parse_json("".join(read_lines(path)), path)
    try:
        questions = []
        asked = [(p["context"], q) for article in whole["data"] for p in article["paragraphs"] for q in p["qas"]]
        for context, given in asked:
            found = [] if given.get("is_impossible") else given["answers"]
            answers = tuple((answer["text"], answer["answer_start"]) for answer in found)
            questions.append(_checked(path, Question(str(given["id"]), given["question"], context, answers)))
    except (AttributeError, KeyError, TypeError) as error:
        raise UserError(f"{path} has not SQuAD's layout ({error!r}); it needs data, paragraphs, qas") from None
    if not questions:
        raise UserError(f"{path} holds no question; fetch the file again")
    return questions


def load_hub(request: DataRequest) -> Corpus | LabelledData | QuestionData:
    """`hf:NAME[:CONFIG]` of the Hugging Face hub: a corpus, labelled text, or questions with SQuAD's columns."""
    if request.kind != "questions":
        return load_table(request)
    table = open_table(request)
    if len(table.parts) < 2 or not {"id", "question", "context", "answers"} <= set(table.types):
        raise UserError(
            f"{request.spec} has {len(table.parts)} parts with the columns {', '.join(table.types)}; questions need "
            "two parts with id, question, context, answers, as rajpurkar/squad has"
        )
    sides = []
    for part in table.parts:
        sides.append([])
        for where, row in part():
            if isinstance(row, dict):
                answers = tuple(zip(row["answers"]["text"], row["answers"]["answer_start"]))
                question = Question(row["id"], row["question"], row["context"], answers)
                sides[-1].append(_checked(where, question))
    train, test = sides
    return QuestionData(train, test, [], table.source)


def _checked(where: str | Path, asked: Question) -> Question:
    context = asked.context
    if not (isinstance(context, str) and isinstance(asked.question, str)):
        raise UserError(f"{where}: question {asked.id!r} or its context is not text; correct it, or remove it")
    for text, start in asked.answers:
        if not (isinstance(text, str) and type(start) is int):  # True is an int as well.
            raise UserError(
                f"{where}: question {asked.id!r} has the answer {text!r} at {start!r}; give text and a whole number"
            )
        if not text or start < 0 or context[start : start + len(text)] != text:
            inside = f"there stands {context[max(start, 0) : max(start, 0) + len(text)]!r}"
            told = inside if 0 <= start < len(context) else f"the context has {len(context)} characters"
            raise UserError(
                f"{where}: question {asked.id!r} has the answer {text!r} at {start}, but {told}; correct answer_start"
            )
    return asked


class EncodedQuestions(IndexedDataset):
    """[CLS] question [SEP] part of the context [SEP]; parts of one context overlap by `stride` tokens.

    A batch: input_ids, attention_mask and token_type_ids int64 (B, N), start_positions and end_positions int64 (B,),
    index int64 (B,). Positions count tokens of the sequence, end included. Both are 0, [CLS], if the part lacks the
    whole answer, or if there is none. The first answer is learned.

    `sample` int64 (number of parts,) is the question of each part, and `offsets` has for each part int32 (N, 2), the
    characters of the context that a token covers; (-1, -1) outside it. `cut` counts questions with more than
    `max_question` tokens. `UserError` if the stride or length leaves no room for the context.
    """

    unit = "sequences"

    def __init__(
        self,
        questions: Sequence[Question],
        tokenizer: "PreTrainedTokenizerFast",
        *,
        max_length: int = 384,
        stride: int = 128,
        max_question: int = 64,
    ) -> None:
        room = max_length - max_question - tokenizer.num_special_tokens_to_add(pair=True)
        if not 0 <= stride < room:
            raise UserError(
                f"max_length {max_length} leaves {room} tokens for the context next to a question of {max_question}, "
                f"which must be more than the stride {stride}; give a shorter stride, or a larger length"
            )
        self.questions, self.cut = questions, 0
        self.pad = int(tokenizer.pad_token_id)  # type: ignore[arg-type]
        self.ids, self.segments, self.offsets, sample = Rows("i"), Rows("b"), list[np.ndarray](), array("q")
        most = block_characters(tokenizer)
        for group in groups(enumerate(questions), most, lambda pair: len(pair[1].question) + len(pair[1].context)):
            asked, contexts = [q.question.strip() for _, q in group], [q.context for _, q in group]
            for _, question in group:
                if len(question.context) > LONGEST * most:
                    size = f"{len(question.context):,} characters"
                    raise UserError(f"the context of question {question.id!r} has {size}; split it")
            with tokenizing("the tokenizer cannot read these questions"):
                for i, text in enumerate(asked):
                    # Up to the last kept token.
                    ends = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).offsets
                    if len(ends) > max_question:
                        asked[i], self.cut = text[: ends[max_question - 1][1]], self.cut + 1
                whole = tokenizer(
                    asked,
                    contexts,
                    truncation="only_second",
                    max_length=max_length,
                    stride=stride,
                    return_overflowing_tokens=True,
                    return_offsets_mapping=True,
                    return_token_type_ids=True,
                )
            for part, place in enumerate(whole["overflow_to_sample_mapping"]):
                sample.append(group[place][0])
                self.ids.append(whole["input_ids"][part])
                self.segments.append(whole["token_type_ids"][part])
                pairs, which = whole["offset_mapping"][part], whole.sequence_ids(part)
                self.offsets.append(_in_context(pairs, which, contexts[place]))
        self.sample = np.array(sample, dtype=np.int64)
        spans = [_span(questions[sample], offsets) for sample, offsets in zip(self.sample, self.offsets)]
        self.spans = torch.tensor(spans, dtype=torch.int64).view(-1, 2)

    def __len__(self) -> int:
        return len(self.ids)

    def read(self, indices: Tensor, epoch: int) -> Batch:
        return {
            **token_batch(self.ids, self.segments, indices, self.pad),
            "start_positions": self.spans[indices, 0],
            "end_positions": self.spans[indices, 1],
        }


class WholeQuestions(IndexedDataset):
    """Questions with all parts of their context together, to choose one answer.

    A batch: the model's inputs for its parts; for each part `offsets` int64 (N, 2), and `sample` int64, the index of
    its question in `asked`; `asked` lists question, context and answers.
    """

    unit = "sequences"

    def __init__(self, parts: EncodedQuestions) -> None:
        self.parts = parts
        self.of = [np.flatnonzero(parts.sample == i) for i in range(len(parts.questions))]

    def __len__(self) -> int:
        return len(self.of)

    def read(self, indices: Tensor, epoch: int) -> Values:
        rows = [self.of[i] for i in indices.tolist()]
        numbers = np.concatenate(rows)
        batch = self.parts.read(torch.from_numpy(numbers), epoch)
        ends = [padded([self.parts.offsets[i][:, side] for i in numbers], -1) for side in (0, 1)]
        sample = torch.from_numpy(np.repeat(np.arange(len(rows)), [len(row) for row in rows]))
        questions = [self.parts.questions[i] for i in indices.tolist()]
        asked = [
            {"question": q.question, "context": q.context, "answers": [text for text, _ in q.answers] or [""]}
            for q in questions
        ]
        inputs = {name: value for name, value in batch.items() if not name.endswith("positions")}
        return {**inputs, "offsets": torch.stack(ends, -1), "sample": sample, "asked": asked, "index": indices}


def _in_context(offsets: Sequence[tuple[int, int]], sequence: Sequence[int | None], context: str) -> np.ndarray:
    """Whole characters that each context token covers; (-1, -1) elsewhere.

    For a decomposed character, e and an accent, the tokenizer only covers the first code point.
    """
    rows = np.array([pair if which == 1 else (-1, -1) for pair, which in zip(offsets, sequence)], dtype=np.int32)
    rows = rows.reshape(-1, 2)
    if not unicodedata.is_normalized("NFC", context):
        rows[:, 1] = [_character_end(context, end) for end in rows[:, 1].tolist()]
    return rows


def _character_end(context: str, end: int) -> int:
    """End of the character with the code point `context[end - 1]`: accents and Hangul's letters may follow."""
    character = context[max(end - 1, 0) : max(end, 0)]
    # Unicode's stream-safe format has at most 30 combining characters in a row.
    for following in context[end : end + 30] if character else "":
        longer = unicodedata.normalize("NFC", character + following)
        if len(longer) > 1 and not unicodedata.combining(following):
            break
        character, end = longer, end + 1
    return end


def _span(question: Question, offsets: np.ndarray) -> tuple[int, int]:
    """First and last token of the first answer, if this part contains it; else (0, 0)."""
    if not question.answers:
        return 0, 0
    text, start = question.answers[0]
    stop = start + len(text)
    touched = np.flatnonzero((offsets[:, 0] < stop) & (offsets[:, 1] > start))
    if not len(touched) or offsets[touched, 1].max() < stop or offsets[touched, 0].min() > start:
        return 0, 0
    return int(touched[0]), int(touched[-1])
