"""Configuration of the text models."""

import dataclasses
from typing import ClassVar

from transformers import PreTrainedConfig

from tokenmix.errors import UserError, unknown_name
from tokenmix.ops.checks import check_choice, check_whole
from tokenmix.registry import MODELS, Arguments, list_models

# Valid values by field.
CHOICES = {
    "mixer": ("gating", "self"),
    "gate": ("toeplitz", "toeplitz-fft", "dense"),
    "gate_variant": ("split", "multiplicative", "additive", "linear"),
    "positions": ("none", "learned", "relative"),
    "padding": ("masked", "unmasked"),
    "predict": ("all", "labelled"),
}
# Fields of the gating mixer only, with their neutral value.
GATING_ONLY = {"gate": "toeplitz", "gate_variant": "split", "tiny_attention_dim": 0}


class GMLPConfig(PreTrainedConfig):
    """gMLP for text; aMLP with `tiny_attention_dim`; a self-attention variant with `mixer="self"`.

    The defaults are gMLP-base.

    Args:
        vocab_size: tokens of the vocabulary.
        hidden_size: width D.
        num_hidden_layers: number of blocks.
        intermediate_size: width between U and the gate (the paper's d_ffn), or of the self-attention variant's MLP.
        max_position_embeddings: n, the longest sequence; `model.resize_position_embeddings` changes it later.
        type_vocab_size: segments as in BERT, 0 for none.
        mixer: `"gating"`, blocks of U, gate, V; `"self"`, pre-norm blocks of self-attention and an MLP.
        gate: `"toeplitz"` with 2n-1 weights, as in the paper's text models; `"toeplitz-fft"`, the same in O(N log N);
            `"dense"` with n^2.
        gate_variant: `"split"`, `"multiplicative"`, `"additive"` or `"linear"`; see `tokenmix.ops.spatial_gate`.
        tiny_attention_dim: head width of aMLP's tiny attention, 64 or 128 in the paper; 0 for none.
        num_attention_heads: heads; required for `mixer="self"`.
        positions: `"none"`, `"learned"`, or for self-attention `"relative"`, a bias on its scores. Default: none for
            gates, which know the positions, as in the paper; learned for self-attention, as in BERT.
        causal: token i sees tokens up to i.
        padding: `"masked"`: tokens outside `attention_mask` are ignored, so padding does not change a sequence's
            output. `"unmasked"`: padding is ordinary text, as in the paper.
        predict: `"all"` positions get masked-language-model logits (B, N, V). `"labelled"`: with labels, only the M
            labelled positions, (M, V), which saves most of the head's cost.
        hidden_dropout_prob: on the embeddings and on the output of each branch.
        classifier_dropout: before the classifier (default: `hidden_dropout_prob`).
        initializer_range: initial standard deviation of the weights; gates and tiny attention start near zero.
        layer_norm_eps: of the norm before each branch and of the last norm.
        pad_token_id: its embedding is 0 and not trained.
        tie_word_embeddings: the masked-language-model head shares the weights of the embeddings.

    Raises:
        UserError: a field has an invalid value, or the mixer does not have the field.

    Reference: Liu et al., Pay Attention to MLPs, arXiv 2105.08050, section 4.
    """

    model_type: ClassVar[str] = "gmlp"
    base_model_fsdp_plan: ClassVar[dict[str, str]] = {
        "embeddings": "free_full_weight",
        "layers.*": "free_full_weight",
        "norm": "keep_full_weight",
    }

    vocab_size: int = 32_000
    hidden_size: int = 512
    num_hidden_layers: int = 48
    intermediate_size: int = 3072
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    mixer: str = "gating"
    gate: str = "toeplitz"
    gate_variant: str = "split"
    tiny_attention_dim: int = 0
    num_attention_heads: int | None = None
    positions: str | None = None
    causal: bool = False
    padding: str = "masked"
    predict: str = "all"
    hidden_dropout_prob: float | int = 0.0
    classifier_dropout: float | int | None = None
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-6
    pad_token_id: int | None = 0
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs: object) -> None:
        if self.positions is None:
            self.positions = "learned" if self.mixer == "self" else "none"
        positive = ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "max_position_embeddings")
        check_whole(**{field: getattr(self, field) for field in positive})
        check_whole(0, type_vocab_size=self.type_vocab_size, tiny_attention_dim=self.tiny_attention_dim)
        if self.pad_token_id is not None and not 0 <= self.pad_token_id < self.vocab_size:
            raise UserError(
                f"pad_token_id must be one of the {self.vocab_size} tokens, got {self.pad_token_id}; "
                "take the tokenizer's, or None if there is none"
            )
        for field, values in CHOICES.items():
            check_choice(field, getattr(self, field), values)
        if self.mixer == "gating":
            if self.positions == "relative":
                raise UserError(
                    "positions='relative' is a bias on attention scores, which mixer='gating' does not have; omit it"
                )
            if self.num_attention_heads is not None:
                raise UserError(
                    f"num_attention_heads only applies to mixer='self', got {self.num_attention_heads} with "
                    "mixer='gating'; for aMLP give tiny_attention_dim"
                )
            if self.gate_variant == "split" and self.intermediate_size % 2:
                raise UserError(f"a split gate halves intermediate_size, got {self.intermediate_size}; make it even")
        else:
            for field, nothing in GATING_ONLY.items():
                if getattr(self, field) != nothing:
                    raise UserError(
                        f"{field}={getattr(self, field)!r} only applies to mixer='gating', not 'self'; leave it out"
                    )
            heads = self.num_attention_heads
            if heads is None or heads < 1 or self.hidden_size % heads:
                raise UserError(
                    f"mixer='self' needs num_attention_heads that divides hidden_size {self.hidden_size}, got {heads}"
                )
        super().__post_init__(**kwargs)


def create_config(name: str, **overrides: object) -> GMLPConfig:
    """A text configuration by name.

    Args:
        name: one of `tokenmix.list_models(task="masked-lm")`.
        **overrides: fields of `GMLPConfig`, or of transformers' `PreTrainedConfig`, such as `num_labels`. Other
            keywords raise `UserError`.
    """
    names = list_models(task="masked-lm")
    if name not in names:
        raise unknown_name("text model", name, names)
    return config_of({**MODELS[name].arguments, **overrides})


def config_of(fields: Arguments) -> GMLPConfig:
    """The configuration with these fields; `UserError` for an unknown field."""
    known = {field.name for field in dataclasses.fields(GMLPConfig)} | {"num_labels"}
    unknown = sorted(set(fields) - known)
    if unknown:
        raise UserError(f"GMLPConfig has no field {unknown[0]!r}; it takes {', '.join(sorted(known))}")
    return GMLPConfig(**fields)
