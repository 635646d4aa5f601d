"""Small text models whose every weight counts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tokenmix.text import GMLPConfig

KINDS: dict[str, dict[str, Any]] = {
    "gmlp": {},
    "gmlp-fft": {"gate": "toeplitz-fft"},
    "gmlp-dense": {"gate": "dense"},
    "amlp": {"tiny_attention_dim": 4},
    "amlp-dense": {"tiny_attention_dim": 4, "gate": "dense"},
    "self": {"mixer": "self", "num_attention_heads": 2},
    "self-relative": {"mixer": "self", "num_attention_heads": 2, "positions": "relative"},
}


def small_config(kind: str = "gmlp", **fields: Any) -> GMLPConfig:
    sizes = {
        "vocab_size": 30,
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "intermediate_size": 12,
        "max_position_embeddings": 10,
    }
    return GMLPConfig(**{**sizes, **KINDS[kind], **fields})


@pytest.fixture
def build() -> Callable[..., Any]:
    """A model with weights far from where they start: there gates do next to nothing."""

    def make(model: Any, kind: str = "gmlp", **fields: Any) -> Any:
        torch.manual_seed(0)
        built = model(small_config(kind, **fields)).eval()
        for parameter in built.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        return built

    return make


@pytest.fixture
def ids() -> torch.Tensor:
    """Two sequences of 6 words, without the padding's."""
    return torch.randint(1, 30, (2, 6), generator=torch.Generator().manual_seed(1))
