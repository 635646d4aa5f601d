"""Configurations and models of text by the name of a preset, what they cost, and transformers' automatic classes."""

import dataclasses
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
)

from tokenmix.errors import UserError, unknown_name
from tokenmix.layers.base import count_parameters
from tokenmix.presets.text import PRESETS
from tokenmix.text.config import GMLPConfig
from tokenmix.text.heads import GMLPForMaskedLM, GMLPForQuestionAnswering, GMLPForSequenceClassification
from tokenmix.text.modeling import GMLPModel

# With the head on that many of 512 positions our count is the paper's in all five sizes; it prints no number itself.
PREDICTED = 76


def create_config(name: str, **overrides: Any) -> GMLPConfig:
    """A text configuration by name.

    Args:
        name: one of `PRESETS`.
        **overrides: fields of `GMLPConfig`, or of transformers' `PreTrainedConfig`, such as `num_labels`. Another
            keyword is a `UserError`.
    """
    if name not in PRESETS:
        raise unknown_name("text model", name, PRESETS)
    known = {field.name for field in dataclasses.fields(GMLPConfig)} | {"num_labels"}
    unknown = sorted(set(overrides) - known)
    if unknown:
        raise UserError(f"GMLPConfig has no field {unknown[0]!r}; it takes {', '.join(sorted(known))}")
    return GMLPConfig(**{**PRESETS[name].fields, **overrides})


def create_text_model(name: str, **overrides: Any) -> GMLPForMaskedLM:
    """A preset's masked-language model; `overrides` are those of `create_config`."""
    return GMLPForMaskedLM(create_config(name, **overrides))


def register_with_transformers() -> None:
    """Register the config with transformers, and its models in the automatic classes."""
    AutoConfig.register(GMLPConfig.model_type, GMLPConfig, exist_ok=True)
    AutoModel.register(GMLPConfig, GMLPModel, exist_ok=True)
    AutoModelForMaskedLM.register(GMLPConfig, GMLPForMaskedLM, exist_ok=True)
    AutoModelForSequenceClassification.register(GMLPConfig, GMLPForSequenceClassification, exist_ok=True)
    AutoModelForQuestionAnswering.register(GMLPConfig, GMLPForQuestionAnswering, exist_ok=True)


def describe(name: str, **overrides: Any) -> dict[str, Any]:
    """What a preset's masked-language model costs, without building it in memory.

    Args:
        name: one of `PRESETS`.
        **overrides: fields of `GMLPConfig`.
    """
    config = create_config(name, **overrides)
    model, n = _on_meta(name, overrides), config.max_position_embeddings
    preset = _on_meta(name, {})
    published = PRESETS[name]
    return {
        "model": name,
        "about": published.about,
        "mixer": _mixer(config),
        "tokens": n,
        "vocabulary": config.vocab_size,
        "parameters": count_parameters(model),
        "parameters without embeddings": count_parameters(model.gmlp) - count_parameters(model.gmlp.embeddings),
        "macs without head": model.gmlp.macs(n),
        "macs": model.macs(n),
        "published parameters, millions": published.parameters,
        "published GFLOPs": published.flops,
        "preset's GFLOPs": 2 * preset.macs(preset.config.max_position_embeddings, num_predicted=PREDICTED) / 1e9,
    }


def _mixer(config: GMLPConfig) -> str:
    """The name that the mixer has in the table of mixers."""
    if config.mixer == "self":
        return "self"
    return (
        "gating-attention" if config.tiny_attention_dim else "gating-toeplitz" if config.gate != "dense" else "gating"
    )


def _on_meta(name: str, overrides: dict[str, Any]) -> GMLPForMaskedLM:
    with torch.device("meta"):
        return GMLPForMaskedLM(create_config(name, **overrides))
