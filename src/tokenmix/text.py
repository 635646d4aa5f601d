"""Text models in Hugging Face form. Importing this registers them with transformers' `AutoConfig` and `AutoModel*`."""

from tokenmix.errors import needs

with needs("tokenmix.text"):
    from tokenmix.tasks.text.models.builder import create_config, describe, register_with_transformers
    from tokenmix.tasks.text.models.config import GMLPConfig
    from tokenmix.tasks.text.models.heads import (
        GMLPClassifierOutput,
        GMLPForMaskedLM,
        GMLPForQuestionAnswering,
        GMLPForSequenceClassification,
        GMLPMaskedLMOutput,
        GMLPQuestionAnsweringOutput,
    )
    from tokenmix.tasks.text.models.modeling import GMLPModel, GMLPModelOutput
    from tokenmix.tasks.text.presets import PRESETS, Preset

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
