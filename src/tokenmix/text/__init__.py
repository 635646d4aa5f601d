"""Text models for Hugging Face transformers; importing this registers them with `AutoConfig` and `AutoModel*`."""

from tokenmix.errors import needs

with needs("tokenmix.text"):
    from tokenmix.text.config import GMLPConfig, create_config
    from tokenmix.text.heads import (
        GMLPClassifierOutput,
        GMLPForMaskedLM,
        GMLPForQuestionAnswering,
        GMLPForSequenceClassification,
        GMLPMaskedLMOutput,
        GMLPQuestionAnsweringOutput,
        describe,
        register_with_transformers,
    )
    from tokenmix.text.modeling import GMLPModel, GMLPModelOutput

__all__ = [
    "GMLPClassifierOutput",
    "GMLPConfig",
    "GMLPForMaskedLM",
    "GMLPForQuestionAnswering",
    "GMLPForSequenceClassification",
    "GMLPMaskedLMOutput",
    "GMLPModel",
    "GMLPModelOutput",
    "GMLPQuestionAnsweringOutput",
    "create_config",
    "describe",
]

register_with_transformers()
