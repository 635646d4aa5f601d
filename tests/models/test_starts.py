"""How the families start: as released, and without a gate that is more than the identity."""

import pytest
import timm
import torch

from tokenmix import UserError, create_model
from tokenmix.checkpoints import to_timm_gmlp


def test_eamlp_starts_as_the_released_code() -> None:
    torch.manual_seed(0)
    for key, value in create_model("eamlp_7").named_parameters():
        if value.dim() > 1:
            assert value.std().item() == pytest.approx(0.02, rel=0.1), key
        elif "norm" not in key:
            assert not value.any(), key


def test_gmlp_starts_as_timms() -> None:
    torch.manual_seed(0)
    ours = to_timm_gmlp(create_model("gmlp_tiny").state_dict())
    for key, theirs in timm.create_model("gmlp_ti16_224").state_dict().items():
        assert ours[key].mean().item() == pytest.approx(theirs.mean().item(), abs=0.002), key
        if theirs.numel() > 1000:
            assert ours[key].std().item() == pytest.approx(theirs.std().item(), rel=0.1), key
        else:
            assert ours[key].std().item() == pytest.approx(theirs.std().item(), abs=0.002), key


@pytest.mark.parametrize("name", ["gmlp_nano", "amlp_nano"])
@pytest.mark.parametrize("init", ["timm", "torch"])
def test_either_start_leaves_the_gates_alone(name, init) -> None:
    torch.manual_seed(0)
    for block in create_model(name, init=init).blocks:
        gating, tiny = block.mixer.gating, block.mixer.tiny_attention
        assert gating.weight.abs().max() < 1e-4
        assert (gating.bias == 1).all()
        assert tiny is None or tiny.proj.weight.abs().max() < 1e-4


@pytest.mark.parametrize("name", ["gmlp_nano", "eamlp_nano"])
def test_the_start_is_an_argument(name) -> None:
    torch.manual_seed(0)
    layers = create_model(name).head.weight
    assert layers.std().item() == pytest.approx(1 / (3 * 64) ** 0.5, rel=0.1)
    with pytest.raises(UserError, match="unknown init 'xavier'"):
        create_model(name, init="xavier")
