"""Parameters and multiply-adds of a text configuration, beside what the paper prints."""

from typing import Any

import torch

from tokenmix.tasks.text.models.builder import create_config
from tokenmix.tasks.text.models.config import GMLPConfig
from tokenmix.tasks.text.models.heads import GMLPForMaskedLM
from tokenmix.tasks.text.presets import PRESETS

__all__ = ["describe"]

# With the head on so many of 512 places our count is the paper's in all five sizes; it prints no number itself.
PREDICTED = 76


def describe(name: str, **overrides: Any) -> dict[str, Any]:
    """What a preset's masked-language model costs, without building it in memory.

    Args:
        name: one of `PRESETS`.
        **overrides: fields of `GMLPConfig`.
    """
    config = create_config(name, **overrides)
    model, n = _on_meta(name, overrides), config.max_position_embeddings
    preset = _on_meta(name, {})
    published = PRESETS[name]
    return {
        "model": name,
        "about": published.about,
        "mixer": _mixer(config),
        "tokens": n,
        "vocabulary": config.vocab_size,
        "parameters": _count(model),
        "parameters without embeddings": _count(model) - _count(model.gmlp.embeddings) - config.vocab_size,
        "macs without head": model.gmlp.macs(n),
        "macs": model.macs(n),
        "published parameters, millions": published.parameters,
        "published GFLOPs": published.flops,
        "preset's GFLOPs": 2 * preset.macs(preset.config.max_position_embeddings, num_predicted=PREDICTED) / 1e9,
    }


def _mixer(config: GMLPConfig) -> str:
    """The name that the mixer has in the table of mixers."""
    if config.mixer == "self":
        return "self"
    return (
        "gating-attention" if config.tiny_attention_dim else "gating-toeplitz" if config.gate != "dense" else "gating"
    )


def _on_meta(name: str, overrides: dict[str, Any]) -> GMLPForMaskedLM:
    with torch.device("meta"):
        return GMLPForMaskedLM(create_config(name, **overrides))


def _count(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
