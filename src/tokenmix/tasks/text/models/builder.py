"""Configurations and models of text by the name of a preset."""

import dataclasses
from typing import Any

from tokenmix.errors import UserError, unknown_name
from tokenmix.tasks.text.models.config import GMLPConfig
from tokenmix.tasks.text.models.heads import GMLPForMaskedLM
from tokenmix.tasks.text.presets import PRESETS

__all__ = ["create_config", "create_text_model"]


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
