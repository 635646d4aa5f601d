"""gMLP: the paper's counts, timm's logits, and a start as a plain FFN."""

import pytest
import timm
import torch

from tokenmix import UserError, create_model
from tokenmix.checkpoints import convert, to_timm_gmlp

COUNTS = {"gmlp_tiny": (5.867, 1.33), "gmlp_small": (19.423, 4.39), "gmlp_base": (73.075, 15.72)}


@pytest.mark.parametrize(("name", "counts"), COUNTS.items())
def test_counts_of_the_paper(name, counts):
    model = create_model(name, device="meta")
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(counts[0], rel=0.002)
    assert model.macs() / 1e9 == pytest.approx(counts[1], rel=0.01)


@pytest.mark.one_fast
@pytest.mark.parametrize(("ours", "theirs"), [("gmlp_tiny", "gmlp_ti16_224"), ("gmlp_small", "gmlp_s16_224")])
def test_timm_weights_give_timms_logits_and_back(ours, theirs):
    torch.manual_seed(0)
    peer = timm.create_model(theirs).eval()
    for parameter in peer.parameters():  # timm's start has gates near 0; make every weight count
        torch.nn.init.normal_(parameter, std=0.05)
    model = create_model(ours).eval()
    model.load_state_dict(convert(peer.state_dict(), "timm-gmlp", to=model))
    images = torch.randn(2, 3, 224, 224)
    with torch.no_grad():
        assert torch.allclose(model(images), peer(images), atol=1e-4)
    wrapped = convert({f"module.{key}": value for key, value in peer.state_dict().items()}, "timm-gmlp", to=model)
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in wrapped.items())
    back = to_timm_gmlp(model.state_dict())
    assert back.keys() == peer.state_dict().keys()
    assert all(torch.equal(value, peer.state_dict()[key]) for key, value in back.items())


def test_starts_as_an_ffn():
    model = create_model("gmlp_nano").eval()
    tokens = torch.randn(1, 64, 64)
    branch = model.blocks[0].mixer
    first, _ = branch.act(branch.proj_in(tokens)).chunk(2, -1)
    assert torch.allclose(branch(tokens), branch.proj_out(first), atol=1e-4)


def test_a_checkpoint_of_another_model_is_named():
    model = create_model("gmlp_nano")
    with pytest.raises(UserError, match="not a key of the timm-gmlp layout"):
        convert(timm.create_model("vit_tiny_patch16_224", depth=1).state_dict(), "timm-gmlp", to=model)
    with pytest.raises(UserError, match=r"the model has not|lacks"):
        convert(timm.create_model("gmlp_ti16_224").state_dict(), "timm-gmlp", to=model)
