"""int8 copies of models: how near they are, what they depend on, to a file and back, and refusals."""

import copy
import os
from pathlib import Path

import pytest
import torch
from nano_nets import NANO, nano_images, nano_model, to_int8
from safetensors.torch import save_file
from torch import nn

import tokenmix
from tokenmix.errors import UserError
from tokenmix.inference import Int8Linear, load_quantized, save_quantized
from tokenmix.inference.operators import largest_weight
from tokenmix.layers import GatedMLP, SpatialGatingUnit


@pytest.mark.parametrize("name", NANO)
def test_answers_stay_near_those_of_float32(name: str) -> None:
    model, images = nano_model(name), nano_images(24)
    eight = to_int8(model, images[:16])
    with torch.no_grad():
        expected, got = model(images), eight(images)
    assert any(isinstance(m, Int8Linear) for m in eight.modules())
    assert (got - expected).abs().max() < 0.06 * expected.abs().max()
    assert (got != expected).any()
    margins = expected.topk(2).values
    sure = margins[:, 0] - margins[:, 1] > 2 * (got - expected).abs().max()
    assert torch.equal(got.argmax(1)[sure], expected.argmax(1)[sure])


def test_what_becomes_int8_in_a_gmlp() -> None:
    eight = to_int8(nano_model("gmlp_nano"), nano_images(16))
    mixer = eight.get_submodule("blocks.0.mixer")
    assert isinstance(mixer.proj_in, Int8Linear)
    assert mixer.proj_in.act == "gelu"
    assert isinstance(mixer.act, nn.Identity)
    assert isinstance(mixer.gating, SpatialGatingUnit), "its product in int8 took longer (dev/LOG.md, 2026-11-24)"
    assert isinstance(eight.head, nn.Linear), "a head after the pooling stays float32"


def test_the_model_given_is_not_changed() -> None:
    model = nano_model("gmlp_nano")
    before = copy.deepcopy(model.state_dict())
    to_int8(model, nano_images(16))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not any(isinstance(m, Int8Linear) for m in model.modules())
    assert not any(m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("name", ["gmlp_nano", "eamlp_nano"])
def test_an_answer_does_not_depend_on_the_batch(name: str) -> None:
    eight, images = to_int8(nano_model(name), nano_images(16)), nano_images(5)
    with torch.no_grad():
        together = eight(torch.cat([images, 100 * images]))[:5]
        alone = torch.cat([eight(image[None]) for image in images])
    # Only the head, a product in float32 after the last 8 bits, may add in another order.
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("act", [None, "none", "tanh"])
def test_int8_linear_against_its_equation(act: str | None) -> None:
    torch.manual_seed(2)
    linear = nn.Linear(40, 24)
    source = nn.Sequential(linear, *([] if act is None else [nn.GELU(approximate=act)]))
    x = torch.randn(3, 7, 40)
    eight = to_int8(source, x)
    low, high = min(x.min().item(), 0.0), max(x.max().item(), 0.0)
    step = (high - low) / 255
    zero = round(-low / step)
    rounded = (((x / step).round() + zero).clamp(0, 255) - zero) * step
    scale = linear.weight.abs().amax(1, keepdim=True) / largest_weight()
    expected = nn.functional.linear(rounded, (linear.weight / scale).round() * scale, linear.bias)
    if act is not None:
        expected = nn.functional.gelu(expected, approximate=act)
    # A number half-way between two steps may go either way.
    torch.testing.assert_close(eight(x), expected.detach(), rtol=0, atol=3 * step * linear.weight.abs().max().item())
    assert (eight(x) - expected).abs().mean() < 1e-3


def test_the_largest_products_are_added_exactly() -> None:
    # 2 * 255 * 127 does not fit in the 16 bits in which an x86 CPU without VNNI adds two products.
    linear = nn.Linear(64, 8, bias=False)
    nn.init.constant_(linear.weight, 2.0)
    x = torch.full((1, 3, 64), 5.0)
    torch.testing.assert_close(to_int8(nn.Sequential(linear), x)(x), torch.full((1, 3, 8), 640.0))


def test_weights_of_8_bits_on_a_cpu_that_adds_those_of_7(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(64, 8), torch.rand(1, 30, 64)
    monkeypatch.setattr("tokenmix.inference.linear.largest_weight", lambda: 127)
    wide = to_int8(nn.Sequential(linear), x)
    assert wide[0].qweight.abs().max() == 127  # type: ignore[index]
    monkeypatch.setattr("tokenmix.inference.linear.largest_weight", lambda: 64)
    narrow = to_int8(nn.Sequential(linear), x)
    narrow.load_state_dict(wide.state_dict())
    expected, found = linear(x).detach(), narrow(x)
    assert (found - expected).abs().max() < 0.03 * expected.abs().max()
    # The file keeps what it said.
    assert torch.equal(narrow[0].qweight, wide[0].qweight)  # type: ignore[index]


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0,), (0, 2, 3), ()])
def test_int8_linear_of_nothing_keeps_the_other_sizes(shape: tuple[int, ...]) -> None:
    assert Int8Linear(4, 5)(torch.zeros(*shape, 4)).shape == (*shape, 5)


def test_what_lies_outside_the_calibrated_range_is_cut_off() -> None:
    linear = nn.Linear(4, 4, bias=False)
    nn.init.eye_(linear.weight)
    eight = to_int8(nn.Sequential(linear), torch.linspace(-1, 1, 16).view(1, 4, 4))
    out = eight(torch.full((1, 1, 4), 50.0))
    torch.testing.assert_close(out, torch.full((1, 1, 4), 1.0), atol=0.02, rtol=0)


@pytest.mark.parametrize("name", ["gmlp_nano", "eamlp_nano"])
def test_file_and_back(name: str, tmp_path: Path) -> None:
    model, images = nano_model(name), nano_images(16)
    eight = to_int8(model, images)
    expected = eight(images)
    save_quantized(eight, tmp_path / "m.safetensors")
    other = tokenmix.create_model(name, in_chans=1, num_classes=10, img_size=28)
    again = load_quantized(other, tmp_path / "m.safetensors")
    assert torch.equal(again(images), expected)
    assert torch.equal(copy.deepcopy(again)(images), expected)


def test_several_batches_widen_the_range() -> None:
    linear = nn.Sequential(nn.Linear(4, 4))
    narrow, wide = torch.rand(2, 3, 4), 10 * torch.rand(2, 3, 4)
    found = to_int8(linear, iter([narrow, wide]))[0].range  # type: ignore[index]
    assert found.tolist() == pytest.approx([0.0, wide.max().item()])


def test_refusals(tmp_path: Path) -> None:
    model, images = nano_model("gmlp_nano"), nano_images(2)
    with pytest.raises(UserError, match=r"torch\.float16.*float\(\)\.cpu\(\)"):
        to_int8(copy.deepcopy(model).half(), images)
    with pytest.raises(UserError, match="nothing to optimise in int8"):
        to_int8(nn.Sequential(nn.Conv2d(1, 2, 3)), images)
    with pytest.raises(UserError, match="no inputs"):
        to_int8(model, [])
    with pytest.raises(UserError, match="NaN or infinite"):
        to_int8(model, images * float("nan"))
    with pytest.raises(UserError, match="an optimised copy already"):
        to_int8(to_int8(model, images), images)
    with pytest.raises(UserError, match="no int8 layers"):
        save_quantized(model, tmp_path / "a")


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    model = nano_model("gmlp_nano")
    path = tmp_path / "m.safetensors"
    save_quantized(to_int8(model, nano_images(2)), path)
    for other in (nano_model("eamlp_nano"), tokenmix.create_model("gmlp_nano", in_chans=1, num_classes=3, img_size=28)):
        with pytest.raises(UserError, match="another architecture"):
            load_quantized(other, path)
    save_file({"a": torch.zeros(1)}, tmp_path / "plain.safetensors")
    with pytest.raises(UserError, match="holds no int8 model"):
        load_quantized(model, tmp_path / "plain.safetensors")
    with pytest.raises(UserError, match="cannot read"):
        load_quantized(model, tmp_path / "missing.safetensors")
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(UserError, match="a pipe"):
        load_quantized(model, tmp_path / "pipe.safetensors")
    (tmp_path / "torn.safetensors").write_bytes(path.read_bytes()[:-40])
    with pytest.raises(UserError, match=r"cannot read .*; give a file"):
        load_quantized(model, tmp_path / "torn.safetensors")


def test_a_layer_used_twice_stays_one_layer() -> None:
    block = GatedMLP(8, 5).eval()
    model = nn.Sequential(block, block)
    eight = to_int8(model, torch.randn(2, 5, 8))
    assert eight[0] is eight[1]  # type: ignore[index]
    assert isinstance(eight[0].proj_out, Int8Linear)  # type: ignore[index, union-attr]
