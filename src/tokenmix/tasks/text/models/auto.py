"""Our model type in transformers' automatic classes, which have no entry point for plug-ins."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
)

from tokenmix.tasks.text.models.config import GMLPConfig
from tokenmix.tasks.text.models.heads import GMLPForMaskedLM, GMLPForQuestionAnswering, GMLPForSequenceClassification
from tokenmix.tasks.text.models.modeling import GMLPModel

__all__ = ["register_with_transformers"]


def register_with_transformers() -> None:
    """Tell transformers of the config, and which model belongs to it in which automatic class."""
    AutoConfig.register(GMLPConfig.model_type, GMLPConfig, exist_ok=True)
    AutoModel.register(GMLPConfig, GMLPModel, exist_ok=True)
    AutoModelForMaskedLM.register(GMLPConfig, GMLPForMaskedLM, exist_ok=True)
    AutoModelForSequenceClassification.register(GMLPConfig, GMLPForSequenceClassification, exist_ok=True)
    AutoModelForQuestionAnswering.register(GMLPConfig, GMLPForQuestionAnswering, exist_ok=True)
