"""Text models in Hugging Face form."""

from tokenmix.errors import needs

with needs("tokenmix.text"):
    from tokenmix.tasks.text.models.builder import create_config
    from tokenmix.tasks.text.models.config import GMLPConfig
    from tokenmix.tasks.text.models.heads import (
        GMLPForMaskedLM,
        GMLPForQuestionAnswering,
        GMLPForSequenceClassification,
    )
    from tokenmix.tasks.text.models.modeling import GMLPModel
    from tokenmix.tasks.text.models.outputs import (
        GMLPClassifierOutput,
        GMLPMaskedLMOutput,
        GMLPModelOutput,
        GMLPQuestionAnsweringOutput,
    )
    from tokenmix.tasks.text.models.summary import describe

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
