"""The text models' heads: masked words, one label a text, an answer's span."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import MaskedLMOutput, QuestionAnsweringModelOutput, SequenceClassifierOutput
from transformers.utils.generic import can_return_tuple

from tokenmix.errors import UserError
from tokenmix.text.config import GMLPConfig
from tokenmix.text.modeling import GMLPModel, GMLPPreTrainedModel

# What `labels` hold where nothing is to be learned.
NO_LABEL = -100


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


class GMLPForMaskedLM(GMLPPreTrainedModel):
    """`GMLPModel` and a projection on the vocabulary, with the weights of the embeddings and a bias.

        logits = x E^T + b

    Paper:
        Liu et al., Pay Attention to MLPs (arXiv 2105.08050), section 4.
        BERT has a dense layer before the projection. Here is none: with one gMLP-large and xlarge would have 366 and
        942 M parameters, and the paper prints 365 and 941.

    Shape:
        ids (B, N) to logits (B, N, V); (M, V) for the M labelled positions with `config.predict="labelled"` and labels.
    """

    _tied_weights_keys = {"lm_head.weight": "gmlp.embeddings.word_embeddings.weight"}  # noqa: RUF012

    def __init__(self, config: GMLPConfig) -> None:
        super().__init__(config)
        self.gmlp = GMLPModel(config, add_pooling_layer=False)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> GMLPMaskedLMOutput:
        """Logits, and with labels (B, N) the mean cross-entropy where they are not -100.

        Further keywords: `output_hidden_states` and `output_attentions` as in `GMLPModel`, and `num_items_in_batch`,
        what the trainer divides the loss by.
        """
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        out = self.gmlp(*inputs, **kwargs, return_dict=True)
        features = out.last_hidden_state
        if labels is not None and self.config.predict == "labelled":
            labelled = labels != NO_LABEL
            logits, labels = self.lm_head(features[labelled]), labels[labelled]
        else:
            logits = self.lm_head(features)
        vocab_size = self.config.vocab_size
        loss = None if labels is None else self.loss_function(logits, labels, vocab_size=vocab_size, **kwargs)
        return GMLPMaskedLMOutput(
            loss=loss, logits=logits, hidden_states=out.hidden_states, attentions=out.attentions, gates=out.gates
        )

    def macs(self, num_tokens: int, *, num_predicted: int | None = None) -> int:
        """Multiply-adds of one sequence with the head on `num_predicted` of its positions, all if not given."""
        places = num_tokens if num_predicted is None else num_predicted
        return self.gmlp.macs(num_tokens) + places * self.config.hidden_size * self.config.vocab_size


class GMLPForSequenceClassification(GMLPPreTrainedModel):
    """`GMLPModel` and a linear classifier on the pooled first token, as in BERT.

    Shape:
        ids (B, N) to logits (B, L), L = `config.num_labels`. The loss is that of `config.problem_type`; if that is not
        set the labels decide: mean squared error for one number, cross-entropy for classes, binary cross-entropy for
        many labels.
    """

    def __init__(self, config: GMLPConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.gmlp = GMLPModel(config)
        rate = config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout
        self.dropout = nn.Dropout(rate)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels or 2)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> GMLPClassifierOutput:
        """Logits, and with labels (B,), (B, L) for many labels, the loss; keywords as in `GMLPForMaskedLM`."""
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        out = self.gmlp(*inputs, **kwargs, return_dict=True)
        logits = self.classifier(self.dropout(out.pooler_output))
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config, **kwargs)
        return GMLPClassifierOutput(
            loss=loss, logits=logits, hidden_states=out.hidden_states, attentions=out.attentions, gates=out.gates
        )

    def macs(self, num_tokens: int) -> int:
        """Multiply-adds of one sequence."""
        return self.gmlp.macs(num_tokens) + self.classifier.weight.numel()


class GMLPForQuestionAnswering(GMLPPreTrainedModel):
    """`GMLPModel` and two numbers a token: how well an answer would begin there, and how well it would end.

    Shape:
        ids (B, N) to start and end logits (B, N) each. The loss is the mean of two cross-entropies over the tokens; a
        position beyond the sequence is left out, a negative one counts as 0, as in transformers.

    Raises:
        UserError: one of start and end positions without the other.
    """

    def __init__(self, config: GMLPConfig) -> None:
        super().__init__(config)
        self.gmlp = GMLPModel(config, add_pooling_layer=False)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        **kwargs: Any,
    ) -> GMLPQuestionAnsweringOutput:
        """Start and end logits, and with both positions (B,) the loss; keywords as in `GMLPForMaskedLM`."""
        if (start_positions is None) != (end_positions is None):
            raise UserError("the loss needs start_positions and end_positions; give both or neither")
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        out = self.gmlp(*inputs, **kwargs, return_dict=True)
        start_logits, end_logits = self.qa_outputs(out.last_hidden_state).unbind(-1)
        loss = None
        if start_positions is not None:
            loss = self.loss_function(start_logits, end_logits, start_positions, end_positions, **kwargs)
        return GMLPQuestionAnsweringOutput(
            loss=loss,
            start_logits=start_logits,
            end_logits=end_logits,
            hidden_states=out.hidden_states,
            attentions=out.attentions,
            gates=out.gates,
        )

    def macs(self, num_tokens: int) -> int:
        """Multiply-adds of one sequence."""
        return self.gmlp.macs(num_tokens) + num_tokens * self.qa_outputs.weight.numel()
