"""The skeleton with every mixer of the table in it."""

import copy
from typing import Any

import pytest
import timm
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import tokenmix
from tokenmix import UserError, create_model, list_mixers, list_models
from tokenmix.layers import MIXERS
from tokenmix.models import MixerNet
from tokenmix.models.interface import pair
from tokenmix.models.stems import ConvStem


def net(mixer: str, **kwargs) -> MixerNet:
    torch.manual_seed(0)
    defaults = {"img_size": 8, "patch_size": 2, "embed_dim": 32, "depth": 3, "num_classes": 5}
    return MixerNet(mixer=mixer, **{**defaults, **kwargs})


@pytest.mark.parametrize("mixer", list_mixers())
def test_trains_on_one_batch(mixer):
    model = net(mixer)
    images, labels = torch.randn(8, 3, 8, 8), torch.arange(8) % 5
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(15):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.4 * losses[0]
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("mixer", list_mixers())
def test_analytic_macs_equal_counted(mixer):
    model = net(mixer).eval()
    with (
        FlopCounterMode(display=False) as counter,
        torch.no_grad(),
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    ):
        model(torch.randn(1, 3, 8, 8))
    # Less-attention's layers pass on two more columns each, which a layer by itself cannot count: 1.4 % at this size.
    assert model.macs() == pytest.approx(counter.get_total_flops() / 2, rel=0.02 if mixer == "less" else 0.001)


CONVOLUTIONS = {1: 1, 2: 2, 3: 2, 4: 2, 6: 2, 7: 1, 8: 3, 14: 2, 16: 4}


@pytest.mark.parametrize("patch", CONVOLUTIONS)
def test_a_stem_of_convolutions_makes_one_token_of_each_patch(patch):
    stem = ConvStem(12, img_size=(2 * patch, 3 * patch), patch_size=patch, in_chans=2).eval()
    with FlopCounterMode(display=False) as counter:
        assert stem(torch.randn(2, 2, 2 * patch, 3 * patch)).shape == (2, 6, 12)
    assert 2 * stem.macs() == counter.get_total_flops() / 2
    assert len([layer for layer in stem.convs if isinstance(layer, torch.nn.Conv2d)]) == CONVOLUTIONS[patch]
    stem.set_input_size(4 * patch)
    assert stem(torch.randn(1, 2, 4 * patch, 4 * patch)).shape == (1, 16, 12)


@pytest.mark.parametrize("patch", [4, 6, 7, 8, 14])
def test_a_token_sees_its_patch_and_a_few_pixels_around(patch):
    # Else a network that mixes no tokens would be no control.
    stem = ConvStem(8, img_size=5 * patch, patch_size=patch).double().eval()
    images = torch.randn(1, 3, 5 * patch, 5 * patch, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(stem(images)[0, 12].sum(), images)
    rows = gradient.abs().sum((0, 1, 3)).nonzero().flatten()
    assert patch < rows.min() <= 2 * patch
    assert 3 * patch - 1 <= rows.max() < 4 * patch


@pytest.mark.parametrize(
    ("size", "patch"),
    [(8, 2), (16, 2), (24, 4), (28, 4), (64, 4), (96, 6), (144, 9), (224, 14), (300, 20), ((28, 56), 4), (31, 4)],
)
def test_the_default_patch_leaves_at_most_256_tokens(size, patch):
    assert MixerNet.default_patch(pair(size)) == patch
    if size != 31:
        assert create_model("mixer_nano", img_size=size, depth=1).stem.patch_size == patch


@pytest.mark.parametrize("mixer", [name for name, row in MIXERS.items() if row.layer.capabilities.map is not None])
def test_maps_of_every_block(mixer):
    model = net(mixer).eval()
    maps = model.attention_maps(torch.randn(2, 3, 8, 8))
    assert len(maps) == 3
    for entry in maps:
        assert entry.grid == (4, 4)
        if entry.kind != "gate":
            rows = entry.map.sum(-1)
            assert (((rows - 1).abs() < 1e-5) | ((rows == 0) & (mixer == "linear"))).all()
        assert entry.map.shape[-2] == 16


def test_only_the_mixer_differs_between_twins():
    torch.manual_seed(0)
    shapes = {}
    for mixer in ("self", "external", "gating", "less"):
        state = net(mixer).state_dict()
        shapes[mixer] = {k: tuple(v.shape) for k, v in state.items() if ".mixer." not in k}
    assert len({tuple(sorted(s.items())) for s in shapes.values()}) == 1


def test_checkpointing_changes_nothing():
    model, images = net("less"), torch.randn(2, 3, 8, 8)
    plain = torch.autograd.grad(model(images).sum(), model.pos_embed)[0]
    model.set_grad_checkpointing()
    assert torch.allclose(plain, torch.autograd.grad(model(images).sum(), model.pos_embed)[0], atol=1e-6)


@torch.no_grad()
def test_batch_norm_over_tokens_converted_for_several_devices():
    """PyTorch puts its SyncBatchNorm, with channels second, in place of every BatchNorm; here N = D."""
    model = net("external", norm="batch").eval()
    for name, buffer in model.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            buffer.uniform_(0.5, 2.0)
    images = torch.randn(2, 3, *model.img_size)
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(model))
    assert any(isinstance(module, nn.SyncBatchNorm) for module in converted.modules())
    torch.testing.assert_close(converted(images), model(images))


@pytest.mark.parametrize("name", ["sagan", "batch norm"])
def test_checkpointing_leaves_buffers_as_one_forward_pass_does(name: str):
    """Spectral norm and BatchNorm change theirs in each, and the gradient is that of the first."""
    torch.manual_seed(0)
    model = create_model("mixer_nano", mixer="sagan", num_classes=3) if name == "sagan" else net("self", norm="batch")
    for name, parameter in model.named_parameters():
        if name.endswith("gamma"):
            nn.init.ones_(parameter)
    plain, again = model.train(), copy.deepcopy(model).train()
    again.set_grad_checkpointing()
    images = torch.randn(4, 3, *plain.img_size)
    for one in (plain, again):
        (one(images).logsumexp(1) * torch.arange(1.0, 5)).sum().backward()
    for parameter, other in zip(plain.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(other.grad, parameter.grad)
    assert len([*plain.buffers()]) > 4
    for buffer, other in zip(plain.buffers(), again.buffers(), strict=True):
        assert torch.equal(buffer, other)


def test_timm_knows_our_names():
    model = timm.create_model("mixer_nano", mixer="external", num_classes=7, img_size=28, in_chans=1)
    assert model(torch.randn(1, 1, 28, 28)).shape == (1, 7)
    assert "vit_nano" in timm.list_models("*_nano")
    assert set(list_models("mixer*")) == {"mixer_nano", "mixer_small"}


def test_head_can_be_replaced():
    model = create_model("vit_nano")
    model.reset_classifier(3)
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 3)
    model.reset_classifier(0)
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, model.num_features)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: create_model("vit_nan"), "did you mean vit_nano"),
        (lambda: create_model("vit_nano", depht=3), "no argument 'depht'"),
        (lambda: create_model("mixer_nano", mixer="externl"), "did you mean external"),
        (lambda: create_model("mixer_nano", mixer="self", mixer_kwargs={"num_slots": 3}), "no argument 'num_slots'"),
        (lambda: create_model("vit_nano", img_size=30, patch_size=4), "not a multiple of the patch"),
        (lambda: create_model("vit_nano")(torch.randn(1, 3, 28, 28)), "takes images (B, 3, 32, 32)"),
        (lambda: create_model("vit_nano", pretrained=True), "no pretrained weights"),
        (lambda: create_model("mixer_nano", mixer="less", num_leading=3), "num_leading must lie in 1..2"),
        (lambda: tokenmix.create_mixer("gating", 32), "give num_tokens"),
    ],
)
def test_mistakes_are_one_clear_line(call, message):
    with pytest.raises(UserError) as caught:
        call()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_hybrid_is_its_blocks_one_after_the_other() -> None:
    names = ["external", "less", "less", "self"]
    kwargs = {"external": {"num_slots": 3}}
    model = create_model("mixer_nano", num_classes=3, depth=4, mixers=names, mixer_kwargs=kwargs).eval()
    kinds = [type(block.mixer).__name__ for block in model.blocks]
    assert kinds == ["ExternalAttention", "SelfAttention", "LessAttention", "SelfAttention"]
    assert model.blocks[0].mixer.memory.key_memory.shape[0] == 3
    assert model.mixer_name == "1 x external, 2 x less, 1 x self"
    images = torch.randn(2, 3, 32, 32)
    x, carry = model.tokens(images), None
    for block in model.blocks:
        out, carry = block.mixer.mix(block.norm1(x), carry)
        x = x + out
        x = x + block.mlp(block.norm2(x))
    assert torch.allclose(model(images), model.head(model.norm(x).mean(1)), atol=1e-5)
    assert [found.kind for found in model.attention_maps(images)] == ["slots", "tokens", "tokens", "tokens"]
    model.set_input_size(48)
    assert model(torch.randn(1, 3, 48, 48)).shape == (1, 3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mixers": ["self"]}, "one name for each of the 3 blocks"),
        ({"mixers": "self"}, "one name for each of the 3 blocks"),
        ({"mixers": ["less", "self", "self"]}, "two blocks in a row"),
        ({"mixers": ["self"] * 3, "mixer_kwargs": {"num_heads": 2}}, "by the name of a mixer"),
        ({"mixers": ["nothing"] * 3}, "unknown mixer 'nothing'"),
    ],
)
def test_hybrids_that_cannot_be(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        create_model("mixer_nano", **given)


def test_mlp_mixer_is_timms() -> None:
    theirs = timm.create_model("mixer_s16_224", num_classes=5).double().eval()
    ours = create_model("mlp_mixer_s16", num_classes=5).double().eval()
    names = {".mixer.": ".mlp_tokens.", ".mlp.0.": ".mlp_channels.fc1.", ".mlp.2.": ".mlp_channels.fc2."}
    state, given = ours.state_dict(), theirs.state_dict()
    for name in state:
        other = name
        for here, there in names.items():
            other = other.replace(here, there)
        state[name] = given[other]
    ours.load_state_dict(state)
    for norm in (m for m in ours.modules() if isinstance(m, torch.nn.LayerNorm)):
        norm.eps = 1e-6
    images = torch.randn(1, 3, 224, 224, dtype=torch.float64)
    assert torch.allclose(ours(images), theirs(images), atol=1e-9)


@pytest.mark.parametrize(("name", "millions"), [("mlp_mixer_s16", 18.5), ("mlp_mixer_b16", 59.9)])
def test_mlp_mixer_has_timms_parameters(name: str, millions: float) -> None:
    model = create_model(name, num_classes=1000, device="meta")
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 1) == millions
