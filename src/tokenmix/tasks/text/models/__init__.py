"""Text models in Hugging Face form, found by `AutoConfig` and `AutoModel*`.

Each name is fetched when it is first used: transformers asks this package for the config alone.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from tokenmix.tasks.text.models.presets import PRESETS, Preset, create_config, list_configs
    from tokenmix.tasks.text.models.summary import describe

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
_LAZY = {name: f"{__name__}.{home}" for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
