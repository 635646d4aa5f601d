"""Longer than the model was built for: an error that names the way, and the way."""

import pytest
import torch

from tokenmix import UserError
from tokenmix.text import GMLPForMaskedLM, GMLPModel

KINDS = ["gmlp", "gmlp-dense", "amlp", "self", "self-relative"]


@pytest.fixture
def long_ids() -> torch.Tensor:
    return torch.randint(1, 30, (2, 14), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("kind", KINDS)
def test_too_long_names_the_call(build, long_ids, kind):
    model = build(GMLPForMaskedLM, kind)
    with pytest.raises(UserError, match=r"up to 10 tokens and got 14.*resize_position_embeddings\(14\)"):
        model(long_ids)
    model.resize_position_embeddings(14)
    assert model(long_ids).logits.shape == (2, 14, 30)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head", [GMLPModel, GMLPForMaskedLM])
def test_extended_models_answer_as_before(build, long_ids, kind, head, tmp_path):
    model = build(head, kind)
    short = long_ids[:, :10]
    before = model(short)[0]
    model.resize_position_embeddings(14)
    assert torch.allclose(model(short)[0], before, atol=1e-6)
    model.save_pretrained(tmp_path)
    loaded = head.from_pretrained(tmp_path)
    assert loaded.config.max_position_embeddings == 14
    assert torch.equal(loaded(long_ids)[0], model(long_ids)[0])
    model.resize_position_embeddings(7)
    assert torch.allclose(model(short[:, :7])[0], head.from_pretrained(tmp_path)(short[:, :7])[0], atol=1e-6)
    with pytest.raises(UserError, match="up to 7 tokens"):
        model(short)


@pytest.mark.parametrize("kind", KINDS)
def test_new_places_are_trained(build, long_ids, kind):
    model = build(GMLPForMaskedLM, kind)
    model.resize_position_embeddings(14)
    model(long_ids, labels=long_ids).loss.backward()
    if kind == "self":
        assert (model.get_position_embeddings().weight.grad[10:].abs().sum(1) > 0).all()
    elif kind == "self-relative":
        assert (model.gmlp.layers[0].relative.weight.grad.abs() > 0).all()
    else:
        gating = model.gmlp.layers[0].mixer.gating
        assert gating.bias.grad[10:].abs().min() > 0
        assert (gating.weight.grad.abs() > 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_interpolated(build, long_ids, kind):
    model = build(GMLPForMaskedLM, kind)
    model.resize_position_embeddings(14, how="interpolate")
    assert torch.isfinite(model(long_ids).logits).all()
    model.resize_position_embeddings(14, how="interpolate")
    assert model.gmlp.layers[0].mixer.dim == 8


def test_a_stretched_gate_keeps_its_sum(build):
    model = build(GMLPModel, "gmlp-dense")
    gating = model.layers[0].mixer.gating
    torch.nn.init.constant_(gating.weight, 0.5)
    model.resize_position_embeddings(20, how="interpolate")
    assert torch.allclose(model.layers[0].mixer.gating.weight.sum(1), torch.full((20,), 5.0))


def test_wrong_wishes(build):
    model = build(GMLPModel)
    with pytest.raises(UserError, match="at least 1 token, got 0"):
        model.resize_position_embeddings(0)
    with pytest.raises(UserError, match="unknown rule 'stretch'"):
        model.resize_position_embeddings(12, how="stretch")
    with pytest.raises(UserError, match="no position embeddings"):
        model.get_position_embeddings()
