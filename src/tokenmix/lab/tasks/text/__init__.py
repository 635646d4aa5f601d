"""Options of masked-language modelling, text classification and question answering."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tokenmix.lab.train.config import ClassOptions, TaskOptions, TeacherOptions
from tokenmix.lab.train.schema import Range


@dataclass(frozen=True, kw_only=True)
class TextOptions(TaskOptions):
    """Tokenization."""

    tokenizer: Path | None = None
    """Folder of the tokenizer; it is copied to the run folder.
    If not given, that of --init-from or the teacher; else a new one is trained on the texts."""
    vocab_size: Annotated[int, Range(least=1)] = 8000
    """Vocabulary size of a newly trained tokenizer."""
    seq_len: Annotated[int, Range(least=1)] = 128
    """Length of a sequence in tokens."""


@dataclass(frozen=True, kw_only=True)
class LabelOptions(TextOptions, TeacherOptions, ClassOptions):
    """Tokenization, classes of unequal size, and a teacher."""


@dataclass(frozen=True, kw_only=True)
class MaskingOptions(TextOptions, TeacherOptions):
    """Tokenization, masking, and a teacher."""

    masking: Literal["token", "whole-word"] = "token"
    """Unit of masking."""
    mask_prob: Annotated[float, Range(above=0, below=1)] = 0.15
    """Share of tokens to predict: 80 % become [MASK], 10 % another token, 10 % stay."""


@dataclass(frozen=True, kw_only=True)
class QuestionOptions(TextOptions):
    """Tokenization of questions and contexts."""

    doc_stride: Annotated[int, Range(least=1)] = 64
    """Overlap of neighbouring windows of a long context, in tokens."""
