"""Options of the tasks on text."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tokenmix.train.config import TaskOptions, TeacherOptions
from tokenmix.train.schema import Range


@dataclass(frozen=True, kw_only=True)
class TextOptions(TaskOptions):
    """How texts become tokens."""

    tokenizer: Path | None = None
    """Folder of the tokenizer; that of --init-from or the teacher if not given, else one is trained on the texts. The
    run folder keeps it."""
    vocab_size: Annotated[int, Range(least=1)] = 8000
    """Tokens of the tokenizer that is trained where none is given."""
    seq_len: Annotated[int, Range(least=1)] = 128
    """Tokens of a sequence."""


@dataclass(frozen=True, kw_only=True)
class LabelOptions(TextOptions, TeacherOptions):
    """How texts become tokens, and a teacher."""


@dataclass(frozen=True, kw_only=True)
class MaskingOptions(LabelOptions):
    """How texts become tokens, and what of them is masked."""

    masking: Literal["token", "whole-word"] = "token"
    """What is masked at a time."""
    mask_prob: Annotated[float, Range(above=0, below=1)] = 0.15
    """Share of the tokens that are predicted: 80 % masked, 10 % another, 10 % as they are."""


@dataclass(frozen=True, kw_only=True)
class QuestionOptions(TextOptions):
    """How questions and contexts become tokens."""

    doc_stride: Annotated[int, Range(least=1)] = 64
    """Tokens that two neighbouring windows of a long context share."""
