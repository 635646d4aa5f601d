"""Questions with their context as token ids: a long context in overlapping parts, each with where the answer lies."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tokenmix.errors import UserError
from tokenmix.tasks.text.data.sequences import Batch, Sequences, token_batch
from tokenmix.tasks.text.data.squad import Question

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["EncodedQuestions"]


class EncodedQuestions(Sequences):
    """[CLS] question [SEP] part of the context [SEP]; parts of one context overlap by `stride` tokens.

    A batch: input_ids, attention_mask and token_type_ids int64 (B, N), start_positions and end_positions int64 (B,),
    index int64 (B,). Positions count tokens of the sequence, the end included; both are 0, [CLS], where the part does
    not hold the whole answer, and where there is none. The first answer is learnt.

    Attributes:
        questions: those that were given.
        sample: int64 (number of parts,): the question that each part belongs to.
        offsets: for each part int32 (N, 2): the characters of the context that a token covers; (-1, -1) outside it.

    Raises:
        UserError: a stride or a length that leaves no room for the context.
    """

    def __init__(
        self,
        questions: Sequence[Question],
        tokenizer: "PreTrainedTokenizerFast",
        *,
        max_length: int = 384,
        stride: int = 128,
        max_question: int = 64,
    ) -> None:
        room = max_length - max_question - 3
        if not 0 <= stride < room:
            raise UserError(
                f"max_length {max_length} leaves {room} tokens for the context beside a question of {max_question}, "
                f"which must be more than the stride {stride}; give a shorter stride, or a larger length"
            )
        self.questions = questions
        self.pad = int(tokenizer.pad_token_id)  # type: ignore[arg-type]
        asked = [_shortened(q.question.strip(), tokenizer, max_question) for q in questions]
        whole = tokenizer(
            asked,
            [q.context for q in questions],
            truncation="only_second",
            max_length=max_length,
            stride=stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        self.sample = np.array(whole["overflow_to_sample_mapping"], dtype=np.int64)
        self.ids = [np.array(row, dtype=np.int32) for row in whole["input_ids"]]
        self.segments = [np.array(row, dtype=np.int8) for row in whole["token_type_ids"]]
        self.offsets = [_in_context(whole["offset_mapping"][i], whole.sequence_ids(i)) for i in range(len(self.ids))]
        spans = [_span(questions[sample], offsets) for sample, offsets in zip(self.sample, self.offsets)]
        self.spans = torch.tensor(spans, dtype=torch.int64).view(-1, 2)

    def __len__(self) -> int:
        return len(self.ids)

    def read(self, indices: Tensor, epoch: int) -> Batch:
        """The batch of these parts, the same in every epoch."""
        return {
            **token_batch(self.ids, self.segments, indices, self.pad),
            "start_positions": self.spans[indices, 0],
            "end_positions": self.spans[indices, 1],
        }


def _shortened(question: str, tokenizer: "PreTrainedTokenizerFast", most: int) -> str:
    """The question up to its last token that is kept."""
    offsets = tokenizer.backend_tokenizer.encode(question, add_special_tokens=False).offsets
    return question if len(offsets) <= most else question[: offsets[most - 1][1]]


def _in_context(offsets: Sequence[tuple[int, int]], sequence: Sequence[int | None]) -> np.ndarray:
    rows = [pair if which == 1 else (-1, -1) for pair, which in zip(offsets, sequence)]
    return np.array(rows, dtype=np.int32).reshape(-1, 2)


def _span(question: Question, offsets: np.ndarray) -> tuple[int, int]:
    """The first and the last token of the first answer, if all of it lies in this part; else (0, 0)."""
    if not question.answers:
        return 0, 0
    text, start = question.answers[0]
    stop = start + len(text)
    touched = np.flatnonzero((offsets[:, 0] < stop) & (offsets[:, 1] > start))
    if not len(touched) or offsets[touched, 1].max() < stop or offsets[touched, 0].min() > start:
        return 0, 0
    return int(touched[0]), int(touched[-1])
