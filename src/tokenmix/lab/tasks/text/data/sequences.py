"""Batches of token ids: texts padded to the longest, or windows of running text with masked tokens."""

from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tokenmix.errors import UserError
from tokenmix.lab.data.indexed import IndexedDataset, hash_indices
from tokenmix.lab.tasks.text.data.corpus import Tokens, groups
from tokenmix.lab.tasks.text.data.labelled import LabelledText
from tokenmix.lab.tasks.text.tokenizer import block_characters, tokenizing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


Batch = dict[str, Tensor]
Masking = Literal["token", "whole-word"]
IGNORED = -100
"""Label of a position without a prediction; cross-entropy's `ignore_index`."""
# Purposes in `hash_indices`.
SHIFT, SEQUENCE, CHOICE, ACTION, RANDOM = 10, 11, 12, 13, 14


def padded(rows: list[np.ndarray], fill: int) -> Tensor:
    """Stack rows as int64 (B, N), padded with `fill` to the longest."""
    return pad_sequence([torch.from_numpy(row).long() for row in rows], batch_first=True, padding_value=fill)


def token_batch(ids: Sequence[np.ndarray], segments: Sequence[np.ndarray], indices: Tensor, pad: int) -> Batch:
    """Padded token rows with their segments and indices: a model's inputs, and `index`."""
    places = indices.tolist()
    return {
        "input_ids": padded([ids[i] for i in places], pad),
        "attention_mask": padded([np.ones(len(ids[i]), np.int64) for i in places], 0),
        "token_type_ids": padded([segments[i] for i in places], 0),
        "index": indices,
    }


class Rows(Sequence[np.ndarray]):
    """Integer rows of different lengths, concatenated in one array."""

    def __init__(self, code: str) -> None:
        self._flat, self._ends = array(code), array("q", [0])

    def append(self, row: Iterable[int]) -> None:
        self._flat.extend(row)
        self._ends.append(len(self._flat))

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, place: Any) -> Any:
        if not 0 <= place < len(self):
            raise IndexError(f"there are {len(self)} rows, got {place}")
        begin, end = self._ends[place], self._ends[place + 1]
        return np.frombuffer(self._flat, self._flat.typecode, end - begin, begin * self._flat.itemsize)


class EncodedText(IndexedDataset):
    """[CLS] text [SEP], or [CLS] text [SEP] text_pair [SEP], truncated to `max_length`; in a pair the longer one first.

    A batch: input_ids, attention_mask and token_type_ids int64 (B, N) with N of its longest, labels int64 (B,) or
    float32 (B,), index int64 (B,). `cut` is the number of truncated texts.
    """

    unit = "sequences"

    def __init__(self, texts: LabelledText, tokenizer: "PreTrainedTokenizerFast", *, max_length: int) -> None:
        least = 3 if texts.pairs is None else 5
        if max_length < least:
            raise UserError(f"a length of {max_length} leaves no room for the text; give {least} or more")
        self.labels = texts.labels
        self.pad = int(tokenizer.pad_token_id)  # type: ignore[arg-type]
        backend, most = tokenizer.backend_tokenizer, block_characters(tokenizer)
        # No kept token is further from the beginning, or, if the end is kept, from the end.
        longest = max(most // 2, 100 * max_length)
        kept = slice(-longest, None) if tokenizer.truncation_side == "left" else slice(longest)
        columns = [column for column in (texts.texts, texts.pairs) if column is not None]
        self.ids, self.segments, self.cut = Rows("i"), Rows("b"), 0
        with tokenizing("the tokenizer cannot read these texts"):
            backend.no_padding()
            backend.enable_truncation(max_length, strategy="longest_first", direction=tokenizer.truncation_side)
            rows = (tuple(text[kept] for text in row) for row in zip(*columns))
            for group in groups(rows, most, lambda row: sum(map(len, row))):
                for encoding in backend.encode_batch_fast([row if row[1:] else row[0] for row in group]):
                    self.ids.append(encoding.ids)
                    self.segments.append(encoding.type_ids)
                    self.cut += bool(encoding.overflowing)
            backend.no_truncation()

    def __len__(self) -> int:
        return len(self.ids)

    def read(self, indices: Tensor, epoch: int) -> Batch:
        return {**token_batch(self.ids, self.segments, indices, self.pad), "labels": self.labels[indices]}


class PackedText(IndexedDataset):
    """Documents cut into sequences of one length, with some of their tokens masked.

    Sequence i of an epoch is [CLS], the n - 2 tokens from (n - 2) i + s on, and [SEP]; [SEP] also separates documents.
    In training each epoch draws a new s, which moves the cuts. In testing s is 0, masks are equal for all seeds and
    epochs, and the last sequence is padded with [PAD].

    A batch: input_ids, attention_mask (0 at [PAD]) and labels (-100 at unmasked tokens), all int64 (B, n), and index
    int64 (B,).

    Args:
        tokens: one part of `tokenized`.
        tokenizer: the tokenizer that made them.
        length: n, with [CLS] and [SEP].
        part: `train` changes cuts and masks in each epoch, `test` does not.
        masking: mask single tokens, or all tokens of a word.
        share: mean share of masked tokens.
        seed: seed of cuts and masks in training.

    Raises:
        UserError: a length without room for tokens, or less text than one sequence.
    """

    unit = "sequences"

    def __init__(
        self,
        tokens: Tokens,
        tokenizer: "PreTrainedTokenizerFast",
        *,
        length: int,
        part: Literal["train", "test"],
        masking: Masking = "token",
        share: float = 0.15,
        seed: int = 0,
    ) -> None:
        if length < 3:
            raise UserError(f"a length of {length} leaves no token between [CLS] and [SEP]; give 3 or more")
        self.window = length - 2
        if part == "train" and len(tokens) < self.window:
            raise UserError(
                f"{len(tokens)} tokens of text do not fill one sequence of {length}; give more text, or a length "
                f"of {max(len(tokens) + 2, 3)} or less"
            )
        self.tokens, self.length, self.part, self.masking = tokens, length, part, masking
        self.share, self.seed = share, seed if part == "train" else 0
        self.special = torch.tensor(sorted(set(tokenizer.all_special_ids)))
        self.ordinary = torch.tensor(sorted(set(range(len(tokenizer))) - set(self.special.tolist())))
        ids = {name: getattr(tokenizer, f"{name}_token_id") for name in ("cls", "sep", "mask", "pad")}
        if absent := [name for name, value in ids.items() if not isinstance(value, int)]:
            raise UserError(f"the tokenizer has no {absent[0].upper()} token; train one with tokenmix train-tokenizer")
        self.cls, self.sep, self.mask, self.pad = ids.values()

    def __len__(self) -> int:
        total = len(self.tokens)
        if self.part == "test":
            return -(-total // self.window)
        # The same number for every shift.
        return max(1, (total - self.window + 1) // self.window)

    def read(self, indices: Tensor, epoch: int) -> Batch:
        epoch = epoch if self.part == "train" else 0
        ids, units = self._windows(indices, epoch)
        inputs, labels = self._masked(ids, units, indices, epoch)
        return {"input_ids": inputs, "attention_mask": (ids != self.pad).long(), "labels": labels, "index": indices}

    def _windows(self, indices: Tensor, epoch: int) -> tuple[Tensor, Tensor]:
        """Ids (B, n), and the index of each token's masking unit, -1 for special tokens."""
        ids = np.full((len(indices), self.length), self.pad, dtype=np.int64)
        starts = np.ones((len(indices), self.length), dtype=np.int64)
        room, shift = len(self.tokens) - len(self) * self.window, 0
        if self.part == "train" and room > 0:
            bits = hash_indices(self.seed, epoch, torch.zeros(1, dtype=torch.int64), SHIFT)
            shift = int(bits[0] % np.uint64(min(room + 1, self.window)))
        for row, index in enumerate(indices.tolist()):
            begin = index * self.window + shift
            window, begins = self.tokens.read(begin, self.window)
            ids[row, 0], ids[row, len(window) + 1] = self.cls, self.sep
            ids[row, 1 : len(window) + 1] = window
            starts[row, 1 : len(window) + 1] = begins
        whole = torch.from_numpy(ids)
        places = np.broadcast_to(np.arange(self.length), ids.shape) if self.masking == "token" else starts.cumsum(1)
        units = torch.from_numpy(np.array(places, dtype=np.int64))
        return whole, units.masked_fill(torch.isin(whole, self.special), -1)

    def _masked(self, ids: Tensor, units: Tensor, indices: Tensor, epoch: int) -> tuple[Tensor, Tensor]:
        """Inputs and labels of masked language modelling.

        Each unit, a token or a word, is chosen with probability `share`. Of the tokens of chosen units 80 % become the
        mask, 10 % an ordinary token drawn uniformly, and 10 % stay. Labels are the ids at chosen positions and -100
        elsewhere.

        Paper: Devlin et al., "BERT", arXiv:1810.04805, section 3.1. BERT masks exactly 15 % of a sequence; here the
        share is a mean.

        Shape:
            ids and units int64 (B, N), units -1 at positions that are never chosen; indices (B,).
        """
        rows = hash_indices(self.seed, epoch, indices, SEQUENCE)[:, None]
        chosen = (_uniform(self.seed, epoch, rows, units.numpy(), CHOICE) < self.share) & (units >= 0).numpy()
        places = np.broadcast_to(np.arange(self.length), ids.shape)
        action = _uniform(self.seed, epoch, rows, places, ACTION)
        drawn = (_uniform(self.seed, epoch, rows, places, RANDOM) * len(self.ordinary)).astype(np.int64)
        picked = torch.from_numpy(chosen)
        labels = torch.where(picked, ids, IGNORED)
        inputs = torch.where(picked & torch.from_numpy(action < 0.8), self.mask, ids)
        other = self.ordinary[torch.from_numpy(drawn)]
        return torch.where(picked & torch.from_numpy(action >= 0.9), other, inputs), labels


def _uniform(seed: int, epoch: int, rows: np.ndarray, places: np.ndarray, purpose: int) -> np.ndarray:
    """Uniform number in [0, 1) for each (row, position)."""
    keys = (rows + places.astype(np.uint64)).astype(np.int64)
    bits = hash_indices(seed, epoch, torch.from_numpy(keys), purpose)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
