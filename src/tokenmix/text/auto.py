"""Our model type in transformers' automatic classes."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
)

from tokenmix.text.config import GMLPConfig
from tokenmix.text.heads import GMLPForMaskedLM, GMLPForQuestionAnswering, GMLPForSequenceClassification
from tokenmix.text.modeling import GMLPModel

__all__ = ["register_with_auto"]


def register_with_auto() -> None:
    """Tell transformers which classes a config of type `gmlp` belongs to."""
    AutoConfig.register(GMLPConfig.model_type, GMLPConfig)
    AutoModel.register(GMLPConfig, GMLPModel)
    AutoModelForMaskedLM.register(GMLPConfig, GMLPForMaskedLM)
    AutoModelForSequenceClassification.register(GMLPConfig, GMLPForSequenceClassification)
    AutoModelForQuestionAnswering.register(GMLPConfig, GMLPForQuestionAnswering)
