"""What the text models return: transformers' outputs with the gates beside the attentions."""

from dataclasses import dataclass

from torch import Tensor
from transformers.modeling_outputs import (
    BaseModelOutputWithPooling,
    MaskedLMOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
)

__all__ = ["GMLPClassifierOutput", "GMLPMaskedLMOutput", "GMLPModelOutput", "GMLPQuestionAnsweringOutput"]


@dataclass
class GMLPModelOutput(BaseModelOutputWithPooling):
    """transformers' `BaseModelOutputWithPooling` and the gates.

    Attributes:
        attentions: with `output_attentions=True`, the map of each block: tiny attention's (B, 1, N, N) in an aMLP,
            (B, H, N, N) in the twin of self-attention, None in a gMLP, which has none.
        gates: with `output_attentions=True`, the matrix W (N, N) of each block's gate; None in the twin. It belongs to
            the places, not to a sample: row and column 0 are a row's first token, also if padding stands before it.
    """

    gates: tuple[Tensor, ...] | None = None


@dataclass
class GMLPMaskedLMOutput(MaskedLMOutput):
    """transformers' `MaskedLMOutput` and the gates, see `GMLPModelOutput`."""

    gates: tuple[Tensor, ...] | None = None


@dataclass
class GMLPClassifierOutput(SequenceClassifierOutput):
    """transformers' `SequenceClassifierOutput` and the gates, see `GMLPModelOutput`."""

    gates: tuple[Tensor, ...] | None = None


@dataclass
class GMLPQuestionAnsweringOutput(QuestionAnsweringModelOutput):
    """transformers' `QuestionAnsweringModelOutput` and the gates, see `GMLPModelOutput`."""

    gates: tuple[Tensor, ...] | None = None
