"""Text models in Hugging Face form. Importing this registers them with transformers' `AutoConfig` and `AutoModel*`."""

from tokenmix.errors import needs

with needs("tokenmix.text"):
    from tokenmix.presets.text import PRESETS, Preset
    from tokenmix.text.builder import create_config, describe, register_with_transformers
    from tokenmix.text.config import GMLPConfig
    from tokenmix.text.heads import (
        GMLPClassifierOutput,
        GMLPForMaskedLM,
        GMLPForQuestionAnswering,
        GMLPForSequenceClassification,
        GMLPMaskedLMOutput,
        GMLPQuestionAnsweringOutput,
    )
    from tokenmix.text.modeling import GMLPModel, GMLPModelOutput

__all__ = [
    "PRESETS",
    "GMLPClassifierOutput",
    "GMLPConfig",
    "GMLPForMaskedLM",
    "GMLPForQuestionAnswering",
    "GMLPForSequenceClassification",
    "GMLPMaskedLMOutput",
    "GMLPModel",
    "GMLPModelOutput",
    "GMLPQuestionAnsweringOutput",
    "Preset",
    "create_config",
    "describe",
]

register_with_transformers()
