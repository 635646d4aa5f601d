"""Sequences of `tokenmix.data.text` as what a task learns from, with the tokenizer that goes into the run folder."""

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tokenmix.data.text import Sequences, make_text_loader
from tokenmix.errors import UserError
from tokenmix.tasks.base import TOKENIZER, TaskData, TaskRecipe
from tokenmix.tokenizer import save_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["Subset", "TextData"]


class Subset(Sequences):
    """`count` of a set's sequences, evenly spread over it, so that no document has them all."""

    def __init__(self, whole: Sequences, count: int) -> None:
        self.whole, self.count = whole, min(count, len(whole))

    def __len__(self) -> int:
        return self.count

    def read(self, indices: Tensor, epoch: int) -> dict[str, Tensor]:
        """The batch of these sequences."""
        return self.whole.read(indices * len(self.whole) // self.count, epoch)


class TextData(TaskData):
    """Sequences for training and testing.

    Args:
        train: sequences to learn from.
        test: those held out.
        tokenizer: that which encoded them.
        config: the run's config.
        description: what the run folder keeps beside vocabulary, length and numbers.
        length: the longest sequence.
    """

    unit = "sequences"

    def __init__(
        self,
        train: Sequences,
        test: Sequences,
        *,
        tokenizer: "PreTrainedTokenizerFast",
        config: TaskRecipe,
        length: int,
        description: dict[str, Any],
    ) -> None:
        self.train = train if config.limit is None else Subset(train, config.limit)
        self.test = test if config.limit_eval is None else Subset(test, config.limit_eval)
        self.num_train, self.num_test = len(self.train), len(self.test)
        self.tokenizer = tokenizer
        self.description = {
            "vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "seq_len": length,
            "train": self.num_train, "test": self.num_test, **description,
        }  # fmt: skip
        self._shared: dict[str, Any] = {
            "seed": config.seed, "workers": config.workers, "pin_memory": torch.cuda.is_available()
        }  # fmt: skip

    def describe(self) -> dict[str, Any]:
        """Vocabulary, length, numbers of sequences, source."""
        return self.description

    def save(self, run: Path) -> None:
        """Keep the tokenizer in the run folder."""
        # It notes the length that it was last called with; the next call gives its own.
        self.tokenizer.backend_tokenizer.no_truncation()
        save_tokenizer(self.tokenizer, run / TOKENIZER)

    def train_batches(self, *, batch_size: int, epoch: int, start: int) -> Iterable[Any]:
        """Full batches of an epoch from batch `start` on."""
        loader = make_text_loader(
            self.train, batch_size=batch_size, shuffle=True, drop_last=True, start_batch=start, **self._shared
        )
        loader.set_epoch(epoch)
        return loader

    def test_batches(self, *, batch_size: int) -> Iterable[Any]:
        """The test sequences in their order."""
        return make_text_loader(self.test, batch_size=batch_size, shuffle=False, **self._shared)

    def part(self, rank: int, world_size: int) -> "TextData":
        """The same sequences, of which each process reads its share."""
        if self.num_test < world_size:
            raise UserError(f"{self.num_test} test {self.unit} are too few for {world_size} processes; give more text")
        other = copy.copy(self)
        other._shared = {**self._shared, "rank": rank, "world_size": world_size}
        return other
