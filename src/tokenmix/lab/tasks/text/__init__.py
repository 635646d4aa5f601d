"""Text: masked-language modelling, sentence classification, question answering: their options."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tokenmix.lab.train.config import ClassOptions, TaskOptions, TeacherOptions
from tokenmix.lab.train.schema import Range


@dataclass(frozen=True, kw_only=True)
class TextOptions(TaskOptions):
    """Tokenization."""

    tokenizer: Path | None = None
    """Folder of the tokenizer, which is copied to the run folder.
    If not given, that of --init-from or the teacher; else one is trained on the texts."""
    vocab_size: Annotated[int, Range(least=1)] = 8000
    """Vocabulary size of the tokenizer that is trained if none is given."""
    seq_len: Annotated[int, Range(least=1)] = 128
    """Tokens of a sequence."""


@dataclass(frozen=True, kw_only=True)
class LabelOptions(TextOptions, TeacherOptions, ClassOptions):
    """Tokenization, classes of unequal size, and a teacher."""


@dataclass(frozen=True, kw_only=True)
class MaskingOptions(TextOptions, TeacherOptions):
    """Tokenization, masking, and a teacher."""

    masking: Literal["token", "whole-word"] = "token"
    """Unit of masking."""
    mask_prob: Annotated[float, Range(above=0, below=1)] = 0.15
    """Share of the tokens to predict: 80 % become [MASK], 10 % another token, 10 % stay."""


@dataclass(frozen=True, kw_only=True)
class QuestionOptions(TextOptions):
    """Tokenization of questions and contexts."""

    doc_stride: Annotated[int, Range(least=1)] = 64
    """Tokens that neighbouring windows of a long context share."""
