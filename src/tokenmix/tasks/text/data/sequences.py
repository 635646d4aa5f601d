"""Texts as token ids, in batches padded to their longest."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tokenmix.data.indexed import IndexedDataset
from tokenmix.errors import UserError
from tokenmix.tasks.text.data.labelled import LabelledText

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["Batch", "EncodedText", "Sequences", "padded", "token_batch"]

Batch = dict[str, Tensor]


class Sequences(IndexedDataset):
    """Sequences of token ids.

    A batch holds input_ids and attention_mask int64 (B, N), what is to be learned from them, and index int64 (B,).
    """

    unit = "sequences"


def padded(rows: list[np.ndarray], fill: int) -> Tensor:
    """int64 (B, N) with N that of the longest row; the others end in `fill`."""
    return pad_sequence([torch.from_numpy(row).long() for row in rows], batch_first=True, padding_value=fill)


def token_batch(ids: Sequence[np.ndarray], segments: Sequence[np.ndarray], indices: Tensor, pad: int) -> Batch:
    """The chosen rows of tokens with their segments, padded, and which they are: what a model takes, and index."""
    places = indices.tolist()
    return {
        "input_ids": padded([ids[i] for i in places], pad),
        "attention_mask": padded([np.ones(len(ids[i]), np.int64) for i in places], 0),
        "token_type_ids": padded([segments[i] for i in places], 0),
        "index": indices,
    }


class EncodedText(Sequences):
    """[CLS] text [SEP], or [CLS] text [SEP] text_pair [SEP], cut to `max_length`: of a pair, the longer one first.

    A batch: input_ids, attention_mask and token_type_ids int64 (B, N) with N that of its longest, labels int64 (B,) or
    float32 (B,), index int64 (B,).

    Attributes:
        cut: how many of the texts were too long.
    """

    def __init__(self, texts: LabelledText, tokenizer: "PreTrainedTokenizerFast", *, max_length: int) -> None:
        least = 3 if texts.pairs is None else 5
        if max_length < least:
            raise UserError(f"a length of {max_length} leaves no room for the text; give {least} or more")
        self.labels = texts.labels
        self.pad = int(tokenizer.pad_token_id)  # type: ignore[arg-type]
        pairs = None if texts.pairs is None else list(texts.pairs)
        whole = tokenizer(
            list(texts.texts), pairs, truncation="longest_first", max_length=max_length, return_overflowing_tokens=True
        )
        # What overflowed comes as further rows of the same sample; the first is the one that is kept.
        sample = np.array(whole["overflow_to_sample_mapping"])
        first = np.unique(sample, return_index=True)[1]
        self.cut = int((np.bincount(sample) > 1).sum())
        self.ids = [np.array(whole["input_ids"][i], dtype=np.int32) for i in first]
        self.segments = [np.array(whole["token_type_ids"][i], dtype=np.int8) for i in first]

    def __len__(self) -> int:
        return len(self.ids)

    def read(self, indices: Tensor, epoch: int) -> Batch:
        """The batch of these samples, the same in every epoch."""
        return {**token_batch(self.ids, self.segments, indices, self.pad), "labels": self.labels[indices]}
