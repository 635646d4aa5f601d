"""The paper's sizes, counted without memory, and the small ones next to each other."""

import pytest
import torch

from tokenmix import UserError, list_models
from tokenmix.registry import MODELS
from tokenmix.text import GMLPConfig, GMLPForMaskedLM, create_config

# Millions of parameters, and billions of FLOPs with the head on 76 of 512 places, which is what explains the paper's.
COUNTS = {
    "gmlp_text_base": (130.1, 157.1),
    "gmlp_text_large": (365.3, 428.9),
    "gmlp_text_xlarge": (940.6, 1087.3),
    "amlp_text_base": (108.8, 128.1),
    "amlp_text_large": (315.6, 368.5),
}


def on_meta(config: GMLPConfig) -> GMLPForMaskedLM:
    with torch.device("meta"):
        return GMLPForMaskedLM(config)


def count(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("name", COUNTS)
def test_counts_of_the_paper(name):
    config = create_config(name)
    assert (config.vocab_size, config.max_position_embeddings, config.gate) == (32_000, 512, "toeplitz")
    model = on_meta(config)
    parameters, flops = COUNTS[name]
    assert count(model) / 1e6 == pytest.approx(parameters, rel=0.002)
    assert 2 * model.macs(512, num_predicted=76) / 1e9 == pytest.approx(flops, rel=0.001)
    published = MODELS[name].published
    assert count(model) / 1e6 == pytest.approx(published.parameters, rel=0.005)
    assert model.macs(512, num_predicted=76) / 1e9 == pytest.approx(published.macs, rel=0.01)


def test_nano_sizes_have_equal_parameters():
    counts = {name: count(on_meta(create_config(name))) for name in list_models("*_nano", task="masked-lm")}
    assert set(counts) == {"gmlp_text_nano", "amlp_text_nano", "bert_text_nano"}
    assert max(counts.values()) < 1.001 * min(counts.values())
    assert 1e6 < min(counts.values()) < 3e6


def test_macs_are_those_that_are_counted():
    from torch.utils.flop_counter import FlopCounterMode

    config = create_config("gmlp_text_nano", vocab_size=50, gate="dense")
    model = GMLPForMaskedLM(config)
    # Training, so that the samples pass the branch together and by plain products.
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.ones(2, 16, dtype=torch.long))
    assert counter.get_total_flops() == 2 * 2 * model.macs(16)


def test_the_paper_ablation_of_other_variants_fits_a_narrower_hidden_width():
    # 101.6 M split with 3,072, 92.0 M with 2,048 otherwise: the counts of table 3.
    split = create_config("gmlp_text_base", num_hidden_layers=36, max_position_embeddings=128)
    whole = create_config(
        "gmlp_text_base",
        num_hidden_layers=36,
        max_position_embeddings=128,
        intermediate_size=2048,
        gate_variant="linear",
    )
    assert count(on_meta(split)) / 1e6 == pytest.approx(101.6, rel=0.002)
    assert count(on_meta(whole)) / 1e6 == pytest.approx(92.0, rel=0.005)


def test_unknown_names_and_fields():
    with pytest.raises(UserError, match="did you mean gmlp_text_base"):
        create_config("gmlp_text_bass")
    with pytest.raises(UserError, match="no field 'hiden_size'"):
        create_config("gmlp_text_nano", hiden_size=3)
