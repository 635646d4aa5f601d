"""Tokenized sequences as a task's data, with the tokenizer that the run folder keeps."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmix.tasks.text.data import Sequences
from tokenmix.tasks.text.tokenizer import save_tokenizer
from tokenmix.train.config import TrainConfig
from tokenmix.train.sources import TOKENIZER
from tokenmix.train.task_data import IndexedData

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["TextData"]


class TextData(IndexedData):
    """Sequences for training and testing.

    Args:
        train: sequences to learn from.
        test: those held out.
        tokenizer: that which encoded them.
        config: the run's config.
        description: what the run folder keeps beside vocabulary, length and numbers.
        length: the longest sequence.
    """

    def __init__(
        self,
        train: Sequences,
        test: Sequences,
        *,
        tokenizer: "PreTrainedTokenizerFast",
        config: TrainConfig,
        length: int,
        description: dict[str, Any],
    ) -> None:
        about = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "seq_len": length}
        super().__init__(train, test, config=config, description={**about, **description})
        self.tokenizer = tokenizer

    def save(self, run: Path) -> None:
        """Keep the tokenizer in the run folder."""
        # It notes the length that it was last called with; the next call gives its own.
        self.tokenizer.backend_tokenizer.no_truncation()
        # What transformers' pipelines cut a text to.
        self.tokenizer.model_max_length = self.description["seq_len"]
        save_tokenizer(self.tokenizer, run / TOKENIZER)
