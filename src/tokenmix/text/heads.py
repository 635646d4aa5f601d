"""Heads of the text models: masked language model, classification, question answering; their costs and AutoModels."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
)
from transformers.modeling_outputs import MaskedLMOutput, QuestionAnsweringModelOutput, SequenceClassifierOutput
from transformers.utils.generic import can_return_tuple

from tokenmix.errors import UserError
from tokenmix.layers.base import count_parameters
from tokenmix.registry import MODELS
from tokenmix.text.config import GMLPConfig, config_of, create_config
from tokenmix.text.modeling import GMLPModel, GMLPModelOutput, GMLPPreTrainedModel

# Label of positions without a target.
NO_LABEL = -100
# With the head on this many of 512 positions, our count equals the paper's for all five sizes. The paper does not print
# the number.
PREDICTED = 76


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


def _kept(out: GMLPModelOutput) -> dict[str, tuple[Tensor, ...] | None]:
    return {"hidden_states": out.hidden_states, "attentions": out.attentions, "gates": out.gates}


class GMLPForMaskedLM(GMLPPreTrainedModel):
    """`GMLPModel` and a projection to the vocabulary, tied to the embeddings, with a bias.

        logits = x E^T + b

    BERT has a dense layer before the projection; this model has none. With it, gMLP-large and xlarge would have 366 and
    942 M parameters; the paper prints 365 and 941.

    Shape: ids (B, N) to logits (B, N, V); (M, V) for the M labelled positions with `config.predict="labelled"` and
    labels.

    Reference: Liu et al., Pay Attention to MLPs, arXiv 2105.08050, section 4.
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
        **kwargs: object,
    ) -> GMLPMaskedLMOutput:
        """Logits, and with labels (B, N) the mean cross-entropy over labels other than -100.

        Further keywords: those of `GMLPModel`, and `num_items_in_batch`, the divisor of the trainer's loss.
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
        return GMLPMaskedLMOutput(loss=loss, logits=logits, **_kept(out))

    def macs(self, num_tokens: int, *, num_predicted: int | None = None) -> int:
        """Multiply-adds of one sequence with the head on `num_predicted` positions (default: all)."""
        positions = num_tokens if num_predicted is None else num_predicted
        return self.gmlp.macs(num_tokens) + positions * self.config.hidden_size * self.config.vocab_size


class GMLPForSequenceClassification(GMLPPreTrainedModel):
    """`GMLPModel` and a linear classifier on the pooled first token, as in BERT.

    Shape: ids (B, N) to logits (B, L), L = `config.num_labels`. The loss follows `config.problem_type`. If that is not
    set, the labels decide: mean squared error for one number, cross-entropy for classes, binary cross-entropy for many
    labels.
    """

    # transformers' losses of numbers and of many labels take no num_items_in_batch; then its trainer divides.
    accepts_loss_kwargs = False

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
        **kwargs: object,
    ) -> GMLPClassifierOutput:
        """Logits, and the loss with labels (B,) or, for many labels, (B, L); keywords as in `GMLPForMaskedLM`."""
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        out = self.gmlp(*inputs, **kwargs, return_dict=True)
        logits = self.classifier(self.dropout(out.pooler_output))
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config, **kwargs)
        return GMLPClassifierOutput(loss=loss, logits=logits, **_kept(out))

    def macs(self, num_tokens: int) -> int:
        return self.gmlp.macs(num_tokens) + self.classifier.weight.numel()


class GMLPForQuestionAnswering(GMLPPreTrainedModel):
    """`GMLPModel` and two scores per token, for the start and the end of an answer.

    Shape: ids (B, N) to start and end logits (B, N) each. The loss is the mean of two cross-entropies over the tokens.
    As in transformers, a position beyond the sequence is ignored and a negative one counts as 0.

    Raises:
        UserError: only one of start and end positions is given.
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
        **kwargs: object,
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
        return GMLPQuestionAnsweringOutput(loss=loss, start_logits=start_logits, end_logits=end_logits, **_kept(out))

    def macs(self, num_tokens: int) -> int:
        return self.gmlp.macs(num_tokens) + num_tokens * self.qa_outputs.weight.numel()


def create_text_model(**fields: object) -> GMLPForMaskedLM:
    """The masked-language model of a config with these fields; presets by name are in the registry of models."""
    return GMLPForMaskedLM(config_of(fields))


def register_with_transformers() -> None:
    """Register the config and its models with transformers' auto classes."""
    AutoConfig.register(GMLPConfig.model_type, GMLPConfig, exist_ok=True)
    AutoModel.register(GMLPConfig, GMLPModel, exist_ok=True)
    AutoModelForMaskedLM.register(GMLPConfig, GMLPForMaskedLM, exist_ok=True)
    AutoModelForSequenceClassification.register(GMLPConfig, GMLPForSequenceClassification, exist_ok=True)
    AutoModelForQuestionAnswering.register(GMLPConfig, GMLPForQuestionAnswering, exist_ok=True)


def describe(name: str, **overrides: object) -> dict[str, object]:
    """Cost of a preset's masked-language model, without allocating its weights.

    Args:
        name: one of `tokenmix.list_models(task="masked-lm")`.
        **overrides: fields of `GMLPConfig`.
    """
    config = create_config(name, **overrides)
    with torch.device("meta"):
        model, preset = GMLPForMaskedLM(config), GMLPForMaskedLM(create_config(name))
    if config.mixer == "self":
        mixer = "self"
    elif config.tiny_attention_dim:
        mixer = "gating-attention"
    else:
        mixer = "gating" if config.gate == "dense" else "gating-toeplitz"
    n, published = config.max_position_embeddings, MODELS[name].published
    return {
        "model": name,
        "about": MODELS[name].about,
        "mixer": mixer,
        "tokens": n,
        "vocabulary": config.vocab_size,
        "parameters": count_parameters(model),
        "parameters without embeddings": count_parameters(model.gmlp) - count_parameters(model.gmlp.embeddings),
        "macs without head": model.gmlp.macs(n),
        "macs": model.macs(n),
        "published parameters, millions": None if published is None else published.parameters,
        "published GFLOPs": None if published is None or published.macs is None else 2 * published.macs,
        "preset's GFLOPs": 2 * preset.macs(preset.config.max_position_embeddings, num_predicted=PREDICTED) / 1e9,
    }
