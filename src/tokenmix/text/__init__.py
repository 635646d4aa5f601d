"""Text models in Hugging Face form. Importing this registers them with `AutoConfig` and `AutoModel*`."""

from tokenmix.text.auto import register_with_auto
from tokenmix.text.config import GMLPConfig
from tokenmix.text.heads import GMLPForMaskedLM, GMLPForQuestionAnswering, GMLPForSequenceClassification
from tokenmix.text.modeling import GMLPModel
from tokenmix.text.outputs import (
    GMLPClassifierOutput,
    GMLPMaskedLMOutput,
    GMLPModelOutput,
    GMLPQuestionAnsweringOutput,
)
from tokenmix.text.presets import PRESETS, Preset, create_config, list_configs
from tokenmix.text.summary import describe

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
    "list_configs",
]

register_with_auto()
