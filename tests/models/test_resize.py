"""Another image size: the skeletons follow, checkpoints follow, and a trained network still knows what it sees."""

import copy
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor

from tokenmix import UserError, create_model, list_mixers, list_models
from tokenmix.checkpoints import resize
from tokenmix.layers import GatedMLP, LessAttention, SpatialGatingUnit
from tokenmix.models import GMLP, MixerNet
from tokenmix.ops import resize_gate

NANO = list_models("*_nano", task="image-classification")


def images(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def loud(model):
    """Weights that all count: no head, gate or scale of nought."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


@pytest.mark.parametrize("name", NANO)
@pytest.mark.parametrize("size", [48, (32, 64)])
def test_a_model_takes_the_new_size_as_if_built_so(name, size) -> None:
    torch.manual_seed(0)
    model = loud(create_model(name))
    model.set_input_size(size)
    built = create_model(name, img_size=size)
    assert {k: v.shape for k, v in model.state_dict().items()} == {k: v.shape for k, v in built.state_dict().items()}
    assert (model.img_size, model.grid_size, model.num_tokens) == (built.img_size, built.grid_size, built.num_tokens)
    assert model.macs() == built.macs()
    height, width = model.img_size
    model(images(2, 3, height, width)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert len(model.attention_maps(images(1, 3, height, width))) > 0


@pytest.mark.parametrize("name", NANO)
def test_the_same_size_changes_nothing(name) -> None:
    model = loud(create_model(name))
    before = {k: (v, v.clone()) for k, v in model.named_parameters()}
    model.set_input_size(32)
    for key, value in model.named_parameters():
        assert torch.equal(value, before[key][1])
        assert key == "pos_embed" or value is before[key][0]


@pytest.mark.parametrize("mixer", list_mixers())
def test_every_mixer_follows_or_says_why_not(mixer) -> None:
    given: Any = {"mixer": mixer, "embed_dim": 16, "depth": 2, "patch_size": 4}
    model = loud(MixerNet(**given, img_size=16, num_classes=3))
    if mixer == "gating-toeplitz":
        with pytest.raises(UserError, match="use a dense gate"):
            model.set_input_size(24)
        assert model.img_size == (16, 16)
        assert model(images(1, 3, 16, 16)).shape == (1, 3)
        return
    model.set_input_size((24, 16))
    assert model(images(2, 3, 24, 16)).isfinite().all()


def test_a_refused_size_changes_no_layer() -> None:
    model = MixerNet(mixers=["gating", "self", "gating-toeplitz"], embed_dim=16, depth=3, patch_size=4, img_size=16)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(UserError, match="use a dense gate"):
        model.set_input_size(24)
    after = model.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items())


def test_frozen_type_and_module_attributes_stay() -> None:
    given: Any = {"patch_size": 4, "embed_dim": 16, "depth": 2, "expansion": 2.0}
    model = GMLP(**given, img_size=32, dtype=torch.float64, num_classes=3)
    gating = model.blocks[0].mixer.gating
    gating.weight.requires_grad_(False)
    model.set_input_size(40)
    assert gating.weight.dtype == torch.float64
    assert not gating.weight.requires_grad
    assert gating.bias.requires_grad
    assert gating.num_tokens == model.blocks[0].mixer.num_tokens == 100
    meta = create_model("gmlp_nano", device="meta")
    meta.set_input_size(64)
    assert meta.blocks[0].mixer.gating.weight.shape == (256, 256)


def test_layers_use_the_published_rule() -> None:
    torch.manual_seed(0)
    gate = loud(SpatialGatingUnit(8, 16))
    weight, bias = resize_gate(gate.weight, gate.bias, (4, 4), (6, 5))
    gate.set_grid((4, 4), (6, 5))
    assert torch.equal(gate.weight, weight)
    assert torch.equal(gate.bias, bias)
    line = GatedMLP(8, 9, gate="toeplitz")
    line.set_grid((9,), (12,))
    assert line(images(2, 12, 8)).shape == (2, 12, 8)
    heads = LessAttention(8, 16, num_heads=2, share_heads=False)
    heads.set_grid((4, 4), (6, 6))
    assert heads.theta.shape == (2, 36, 36)
    assert heads(images(2, 36, 8)).shape == (2, 36, 8)


def test_positions_keep_their_prefix_and_their_picture() -> None:
    model = create_model("eamlp_nano", img_size=32)
    with torch.no_grad():
        model.pos_embed[:, 1:] = torch.linspace(0, 1, 8).repeat_interleave(8)[None, :, None]
    prefix = model.pos_embed[:, :1].clone()
    model.set_input_size(64)
    assert torch.equal(model.pos_embed[:, :1], prefix)
    rows = model.pos_embed[0, 1:, 0].unflatten(0, (16, 16))
    assert torch.allclose(rows[:, 0], rows[:, 9], atol=1e-6)
    assert (rows[2:-2, 0].diff() > 0.05).all()
    assert "pos_embed" in dict(model.named_buffers())


@pytest.mark.parametrize("name", NANO)
def test_a_checkpoint_follows_as_the_model_does(name, tmp_path) -> None:
    torch.manual_seed(0)
    model = loud(create_model(name, num_classes=4))
    target = create_model(name, num_classes=4, img_size=48)
    target.load_state_dict(resize(model.state_dict(), target))
    file = tmp_path / "model.safetensors"
    safetensors.torch.save_file(model.state_dict(), file)
    overlay = {"file": str(file), "num_classes": 4}
    by_timm = create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, num_classes=4, img_size=48)
    model.set_input_size(48)
    batch = images(2, 3, 48, 48)
    assert torch.equal(target.eval()(batch), model(batch))
    assert torch.equal(by_timm.eval()(batch), model(batch))


def test_a_checkpoint_of_a_rectangle_needs_its_size() -> None:
    model = loud(create_model("gmlp_nano", img_size=(32, 48)))
    target = create_model("gmlp_nano", img_size=64)
    with pytest.raises(UserError, match="96 tokens, which do not form a square"):
        resize(model.state_dict(), target)
    with pytest.raises(UserError, match="give the img_size"):
        resize(model.state_dict(), target, img_size=(48, 48))
    target.load_state_dict(resize(model.state_dict(), target, img_size=(32, 48)))
    model.set_input_size(64)
    assert torch.equal(target.eval()(images(1, 3, 64, 64)), model(images(1, 3, 64, 64)))


def test_a_checkpoint_of_the_same_size_and_of_other_classes_is_left_alone() -> None:
    model, target = create_model("gmlp_nano", num_classes=3), create_model("gmlp_nano")
    state = model.state_dict()
    assert all(value is state[key] for key, value in resize(state, target).items())


def zoomed(batch: Tensor, generator: torch.Generator) -> Tensor:
    """Each image at a size of 0.75 to 1.25, as random crops show them to networks for 224 px."""
    scale = torch.empty(len(batch)).uniform_(0.75, 1.25, generator=generator)
    matrix = torch.zeros(len(batch), 2, 3)
    matrix[:, 0, 0] = matrix[:, 1, 1] = scale
    return F.grid_sample(batch, F.affine_grid(matrix, list(batch.shape), align_corners=False), align_corners=False)


def accuracy(model, batch: Tensor, labels: Tensor) -> float:
    with torch.no_grad():
        return (model(batch).argmax(1) == labels).float().mean().item()


@pytest.mark.slow
def test_a_trained_gate_still_knows_digits_at_another_size() -> None:
    torch.manual_seed(0)
    digits = load_digits()
    pixels = torch.from_numpy(digits.images).float().div(8).sub(1).unsqueeze(1)
    labels, generator = torch.from_numpy(digits.target), torch.Generator().manual_seed(0)
    small, large = (F.interpolate(pixels, size=side, mode="bilinear", antialias=True) for side in (14, 16))
    given: Any = {"patch_size": 2, "embed_dim": 32, "depth": 2, "expansion": 4.0}
    model = GMLP(**given, img_size=14, in_chans=1, num_classes=10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for _ in range(12):
        for index in torch.randperm(1400, generator=generator).split(100):
            loss = F.cross_entropy(model(zoomed(small[index], generator)), labels[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    model.eval()
    before = accuracy(model, small[1400:], labels[1400:])
    follows, cut = copy.deepcopy(model), copy.deepcopy(model)
    follows.set_input_size(16)
    cut.set_input_size(16)
    with torch.no_grad():
        for block, old in zip(cut.blocks, model.blocks, strict=True):
            gating = block.mixer.gating
            gating.weight.zero_()[:49, :49] = old.mixer.gating.weight
            gating.bias.fill_(1.0)[:49] = old.mixer.gating.bias
    after, by_cutting = (accuracy(m, large[1400:], labels[1400:]) for m in (follows, cut))
    assert before > 0.85
    assert after > before - 0.25
    assert by_cutting < before - 0.5
