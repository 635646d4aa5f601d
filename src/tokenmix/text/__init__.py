"""Text models in Hugging Face form, found by `AutoConfig` and `AutoModel*`.

Each name is fetched when it is first used: transformers asks this package for the config alone.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_HOMES = {
    "config": ("GMLPConfig",),
    "heads": ("GMLPForMaskedLM", "GMLPForQuestionAnswering", "GMLPForSequenceClassification"),
    "modeling": ("GMLPModel",),
    "outputs": (
        "GMLPClassifierOutput",
        "GMLPMaskedLMOutput",
        "GMLPModelOutput",
        "GMLPQuestionAnsweringOutput",
    ),
    "presets": ("PRESETS", "Preset", "create_config", "list_configs"),
    "summary": ("describe",),
}
_LAZY = {name: f"tokenmix.text.{home}" for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'tokenmix.text' has no attribute {name!r}")
