"""How the weights of a text model start: all of a fresh one, and those that a checkpoint lacks."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenmix.text import GMLPConfig, GMLPForMaskedLM, GMLPForSequenceClassification
from tokenmix.text.modeling import GMLPPreTrainedModel

KINDS: dict[str, dict[str, Any]] = {
    "gmlp": {},
    "gmlp-fft": {"gate": "toeplitz-fft"},
    "gmlp-dense": {"gate": "dense"},
    "gmlp-additive": {"gate_variant": "additive"},
    "gmlp-linear": {"gate_variant": "linear"},
    "gmlp-linear-dense": {"gate_variant": "linear", "gate": "dense"},
    "amlp": {"tiny_attention_dim": 32},
    "self": {"mixer": "self", "num_attention_heads": 4},
    "self-relative": {"mixer": "self", "num_attention_heads": 4, "positions": "relative"},
}


def config(kind: str, **fields: Any) -> GMLPConfig:
    sizes = {
        "vocab_size": 300,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "max_position_embeddings": 48,
    }
    return GMLPConfig(**{**sizes, **KINDS[kind], **fields})


def check_start(name: str, value: Tensor, settings: GMLPConfig) -> None:
    """Raise unless a parameter is what the documentation says of its kind."""
    value = value.detach()
    if name.endswith("gating.weight"):
        check_gate(value, settings)
    elif name.endswith("gating.bias"):
        assert (value == float(settings.gate_variant in ("split", "multiplicative"))).all()
    elif name.endswith("relative.weight"):
        middle = value.shape[1] // 2
        distance = (torch.arange(value.shape[1]) - middle).abs()
        assert torch.equal(value, torch.stack([-(0.5**head) * distance for head in range(len(value))]))
    elif name.endswith("norm.weight"):
        assert (value == 1).all()
    elif name.endswith("bias"):
        assert (value == 0).all()
    else:
        if name.endswith("word_embeddings.weight") or name == "lm_head.weight":
            assert (value[0] == 0).all()
            value = value[1:]
        check_normal(value, 1e-6 if name.endswith("tiny_attention.proj.weight") else settings.initializer_range)


def check_gate(value: Tensor, settings: GMLPConfig) -> None:
    n = settings.max_position_embeddings
    identity = torch.eye(n) if value.dim() == 2 else (torch.arange(2 * n - 1) == n - 1).float()
    # 1 + 1e-6 in float32 has a few steps only; the other weights are exact.
    if settings.gate_variant == "linear":
        assert (value[identity == 1] - 1).abs().max() < 1e-5
        value = value[identity == 0]
    check_normal(value, 1e-6)


def check_normal(value: Tensor, std: float) -> None:
    """Mean and deviation within five of their own standard errors."""
    error = 5 * std / math.sqrt(value.numel())
    assert abs(value.mean().item()) < error
    assert value.std().item() == pytest.approx(std, abs=error)


@pytest.mark.parametrize("model", [GMLPForMaskedLM, GMLPForSequenceClassification], ids=lambda c: c.__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_starts_as_documented(model: type[GMLPPreTrainedModel], kind: str):
    torch.manual_seed(0)
    settings = config(kind, initializer_range=0.05)
    for name, value in model(settings).named_parameters():
        check_start(name, value, settings)


@pytest.mark.parametrize(
    "changed", [{"num_hidden_layers": 3}, {"max_position_embeddings": 32}], ids=["layers", "places"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_checkpoint_lacks_starts_as_documented(kind: str, changed: dict[str, int], tmp_path):
    torch.manual_seed(0)
    saved = GMLPForMaskedLM(config(kind))
    with torch.no_grad():
        for parameter in saved.parameters():
            parameter.fill_(7.0)
    saved.save_pretrained(tmp_path)
    model, info = GMLPForMaskedLM.from_pretrained(
        tmp_path, **changed, ignore_mismatched_sizes=True, output_loading_info=True
    )
    drawn = {*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])}
    assert drawn
    for name, value in model.named_parameters():
        if name in drawn:
            check_start(name, value, model.config)
        else:
            assert (value == 7).all(), name
    assert torch.isfinite(model(torch.arange(1, 9)[None]).logits).all()


def test_a_gate_loaded_in_part_keeps_what_was_loaded(tmp_path):
    saved = GMLPForMaskedLM(config("gmlp-linear"))
    state = saved.state_dict()
    del state["gmlp.layers.1.mixer.gating.bias"]
    state["gmlp.layers.1.mixer.gating.weight"].fill_(7.0)
    state["gmlp.layers.1.mixer.gating.norm.weight"].fill_(7.0)
    saved.save_pretrained(tmp_path, state_dict=state)
    gating = GMLPForMaskedLM.from_pretrained(tmp_path).gmlp.layers[1].mixer.gating
    assert (gating.weight == 7).all()
    assert (gating.norm.weight == 7).all()
    assert (gating.bias == 0).all()
