"""What timm expects of a model, for every nano model of the registry, and for the large ones where it costs nothing."""

import copy
from pathlib import Path

import pytest
import safetensors.torch
import timm
import torch
from PIL import Image
from timm.data import resolve_model_data_config
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import save_for_hf
from timm.models._features import FeatureInfo
from timm.optim import create_optimizer_v2
from torch import Tensor, nn

from tokenmix import UserError, create_model, list_models

# Models of 32 x 32 images.
NANO = [*list_models("*_nano", task="image-classification"), "mixer_small"]
# Of 224 x 224 images: the smallest of each family, and the others, which are built by the same code.
SMALLEST = ["eamlp_7", "eanet_resnet50", "gmlp_tiny", "lavit_tiny"]
LARGER = sorted({*list_models(task="image-classification")} - {*NANO, *SMALLEST})


def build(name: str, **kwargs) -> nn.Module:
    """The model with weights that all count: no head, gate or scale of nought."""
    torch.manual_seed(0)
    model = create_model(name, **kwargs).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator).to(parameter)
    return model


def images(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


def size_of(model) -> tuple[int, int]:
    return tuple(model.img_size)


def batch_for(model, size: int = 2) -> Tensor:
    return images(size, model.in_chans, *size_of(model))


@pytest.mark.parametrize("name", NANO)
def test_data_settings(name) -> None:
    model = create_model(name)
    config = resolve_model_data_config(model)
    assert config["input_size"] == (model.in_chans, *model.img_size) == (3, 32, 32)
    assert config["mean"] == config["std"] == (0.5, 0.5, 0.5)
    assert timm.data.create_transform(**config)(Image.new("RGB", (40, 36))).shape == (3, 32, 32)
    assert model.pretrained_cfg["architecture"] == name
    assert model.pretrained_cfg["license"] == "apache-2.0"
    assert model.pretrained_cfg["num_classes"] == 10


@pytest.mark.parametrize("name", [*NANO, *SMALLEST, *(pytest.param(name, marks=pytest.mark.slow) for name in LARGER)])
def test_the_default_cfg_is_that_of_the_model(name) -> None:
    model, side = create_model(name, device="meta"), 32 if name in NANO else 224
    cfg = model.pretrained_cfg
    assert cfg["input_size"] == (model.in_chans, *model.img_size) == (3, side, side)
    assert resolve_model_data_config(model)["input_size"] == cfg["input_size"]
    assert model(torch.empty(2, 3, side, side, device="meta")).shape == (2, cfg["num_classes"])
    assert model.num_classes == cfg["num_classes"] == (10 if name in NANO else 1000)
    assert model.get_submodule(cfg["classifier"]) is model.get_classifier()

    # A pyramid's last map is pooled; tokens that keep their number have none, as in timm's own files.
    shrinks = len({entry["reduction"] for entry in model.feature_info}) > 1
    last = model.forward_intermediates(torch.empty(1, 3, side, side, device="meta"), intermediates_only=True)[-1]
    assert cfg["pool_size"] == (tuple(last.shape[2:]) if shrinks else None)

    larger = torch.empty(1, 3, 2 * side, 2 * side, device="meta")
    if cfg["fixed_input_size"]:
        with pytest.raises(UserError, match="the model takes images"):
            model(larger)
    else:
        model(larger)

    # The EAMLP stem unfolds pixels: the first layer with weights is a norm, and nothing that timm could adapt.
    leaves = ((key, leaf) for key, leaf in model.named_modules() if not list(leaf.children()))
    key, first = next((key, leaf) for key, leaf in leaves if list(leaf.parameters()))
    if cfg["first_conv"] is None:
        assert (type(first), hasattr(model, "adapt_channels")) == (nn.LayerNorm, True)
    else:
        assert (cfg["first_conv"], type(first)) == (key, nn.Conv2d)

    assert cfg["crop_pct"] == (1.0 if name in NANO else 0.9 if name.startswith(("eamlp", "t2t")) else 0.875)
    assert cfg["interpolation"] == ("bilinear" if name in NANO else "bicubic")
    halves = name in NANO or name.startswith(("gmlp", "amlp", "mlp"))
    assert cfg["mean"] == ((0.5, 0.5, 0.5) if halves else IMAGENET_DEFAULT_MEAN)
    assert cfg["std"] == ((0.5, 0.5, 0.5) if halves else IMAGENET_DEFAULT_STD)


def test_gmlp_small_has_the_data_settings_of_timms_whose_weights_it_takes() -> None:
    ours, theirs = (timm.get_pretrained_cfg(name) for name in ("gmlp_small", "gmlp_s16_224"))
    for key in ("input_size", "mean", "std", "crop_pct", "interpolation", "pool_size", "num_classes", "first_conv"):
        assert getattr(ours, key) == getattr(theirs, key), key


@torch.no_grad()
@pytest.mark.parametrize("name", NANO)
@pytest.mark.parametrize("channels", [1, 4])
def test_weights_for_other_channels(name, channels, tmp_path) -> None:
    model, file = build(name), tmp_path / "model.safetensors"
    safetensors.torch.save_file(model.state_dict(), file)
    other = timm.create_model(
        name, in_chans=channels, pretrained=True, pretrained_cfg_overlay={"file": str(file)}
    ).eval()
    grey = images(2, 1, 32, 32)
    out = other(grey.expand(-1, channels, -1, -1))
    if channels == 1:
        assert torch.allclose(out, model(grey.expand(-1, 3, -1, -1)), atol=1e-4)
    assert out.isfinite().all()
    assert all(torch.equal(p, model.get_parameter(key)) for key, p in other.named_parameters() if "blocks" in key)


@pytest.mark.parametrize("name", NANO)
def test_head_can_be_taken_off_and_replaced(name) -> None:
    model = build(name)
    batch = batch_for(model)
    features = model.forward_features(batch)
    pooled = model.forward_head(features, pre_logits=True)
    assert pooled.shape == (2, model.head_hidden_size) == (2, model.num_features)
    assert torch.equal(model.forward_head(features), model(batch))
    assert torch.equal(model.get_classifier()(pooled), model(batch))
    model.reset_classifier(0)
    assert torch.equal(model(batch), pooled)
    model.reset_classifier(3)
    assert not any(module.training for module in model.modules())
    assert model.get_classifier().out_features == model.num_classes == 3
    assert model(batch).shape == (2, 3)
    model.reset_classifier(0, "")
    assert torch.equal(model(batch), features)
    with pytest.raises(UserError, match="global_pool 'catavgmax'"):
        model.reset_classifier(3, "catavgmax")


@pytest.mark.parametrize("name", NANO)
def test_features_only_are_the_intermediates(name) -> None:
    model, batch = build(name), images(2, 3, 32, 32)
    backbone = timm.create_model(name, features_only=True, out_indices=(0, 2))
    backbone.model.load_state_dict(model.state_dict(), strict=False)
    maps = backbone.eval()(batch)
    expected = model.forward_intermediates(batch, indices=[0, 2], intermediates_only=True)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(maps, expected, strict=True))
    assert [m.shape[1] for m in maps] == backbone.feature_info.channels()
    assert [32 // m.shape[2] for m in maps] == backbone.feature_info.reduction()
    assert isinstance(backbone.feature_info, FeatureInfo)
    kept = sum(p.numel() for p in backbone.parameters())
    assert kept < sum(p.numel() for p in model.parameters())
    assert len(timm.create_model(name, features_only=True)(batch)) == 3


@pytest.mark.parametrize("name", NANO)
def test_intermediates(name) -> None:
    model, batch = build(name), images(2, 3, 32, 32)
    final, every = model.forward_intermediates(batch)
    assert torch.allclose(final, model.forward_features(batch), atol=1e-6)
    assert len(every) == len(model.feature_info)
    (last,) = model.forward_intermediates(batch, indices=1, stop_early=True, intermediates_only=True)
    assert torch.equal(last, every[-1])
    (early,) = model.forward_intermediates(batch, indices=[1], stop_early=True, intermediates_only=True)
    assert torch.equal(early, every[1])
    with pytest.raises(UserError, match="feature indices 99"):
        model.forward_intermediates(batch, indices=99)
    with pytest.raises(UserError, match="output_fmt"):
        model.forward_intermediates(batch, output_fmt="NHWC")


@pytest.mark.parametrize("name", [n for n in NANO if hasattr(create_model(n, device="meta"), "num_prefix_tokens")])
def test_intermediates_of_sequences(name) -> None:
    model, batch = build(name), images(2, 3, 32, 32)
    final, maps = model.forward_intermediates(batch, norm=True)
    sequences = model.forward_intermediates(
        batch, norm=True, output_fmt="NLC", intermediates_only=True, return_prefix_tokens=True
    )
    for image, (tokens, prefix) in zip(maps, sequences, strict=True):
        assert torch.equal(image.flatten(2).transpose(1, 2), tokens)
        assert prefix.shape == (2, model.num_prefix_tokens, model.embed_dim)
    assert torch.equal(torch.cat(sequences[-1][::-1], 1), final)


@pytest.mark.parametrize("name", NANO)
def test_pruning_keeps_what_is_asked_for(name) -> None:
    model, batch = build(name), images(2, 3, 32, 32)
    expected = model.forward_intermediates(batch, indices=[1], intermediates_only=True)
    assert model.prune_intermediate_layers([1], prune_norm=True) == [1]
    assert torch.equal(model.forward_intermediates(batch, indices=[1], intermediates_only=True)[0], expected[0])
    assert model.num_classes == 0


@pytest.mark.parametrize("name", NANO)
def test_learning_rates_by_depth(name) -> None:
    model = create_model(name)
    optimizer = create_optimizer_v2(model, "adamw", lr=1.0, weight_decay=0.1, layer_decay=0.75)
    scale, decay = {}, {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            scale[parameter], decay[parameter] = group["lr_scale"], group["weight_decay"]
    assert set(scale) == set(model.parameters())
    by_name = {key: scale[p] for key, p in model.named_parameters()}
    classifier = model.pretrained_cfg["classifier"]
    assert by_name[f"{classifier}.weight"] == 1.0
    assert min(by_name.values()) == by_name[next(iter(by_name))] < 0.75**3
    assert len(set(by_name.values())) >= 5
    assert all(decay[p] == 0 for p in model.parameters() if p.dim() <= 1)
    assert all(decay[model.get_parameter(key)] == 0 for key in model.no_weight_decay())
    coarse = timm.models.group_parameters(model, model.group_matcher(coarse=True))
    fine = timm.models.group_parameters(model, model.group_matcher(coarse=False))
    assert len(coarse) <= len(fine)


@pytest.mark.parametrize("name", NANO)
def test_checkpointing_changes_no_gradient(name) -> None:
    model = build(name).train()
    other = copy.deepcopy(model)
    other.set_grad_checkpointing()
    for network in (model, other):
        network(batch_for(network, 4)).square().sum().backward()
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", NANO)
def test_other_channels_and_sides(name) -> None:
    model = build(name, in_chans=1, img_size=(32, 48), num_classes=4, drop_path_rate=0.1)
    assert model(images(2, 1, 32, 48)).shape == (2, 4)
    maps = model.forward_intermediates(images(2, 1, 32, 48), intermediates_only=True)
    assert all(m.shape[3] * 2 == m.shape[2] * 3 for m in maps)


@pytest.mark.parametrize("name", NANO)
def test_device_and_dtype_of_the_constructor(name) -> None:
    model = create_model(name, dtype=torch.bfloat16)
    floating = [t for t in model.state_dict().values() if t.is_floating_point()]
    assert all(t.dtype == torch.bfloat16 and t.isfinite().all() for t in floating)
    assert model.eval()(images(2, 3, 32, 32).bfloat16()).isfinite().all()
    assert all(t.is_meta for t in create_model(name, device="meta").state_dict().values())


@pytest.mark.parametrize("name", NANO)
def test_copies_and_half_numbers(name) -> None:
    model = build(name)
    batch = batch_for(model)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(batch), model(batch))
    with torch.no_grad():
        next(twin.parameters()).add_(1.0)
    assert not torch.equal(twin(batch), model(batch))
    half = copy.deepcopy(model).bfloat16()
    assert half(batch.bfloat16()).dtype == torch.bfloat16
    assert torch.allclose(half(batch.bfloat16()).float(), model(batch), atol=0.1, rtol=0.1)


@pytest.mark.parametrize("name", NANO)
def test_a_checkpoint_file_by_timm_and_by_us(name, tmp_path) -> None:
    model = build(name, num_classes=7)
    file = str(tmp_path / "model.safetensors")
    safetensors.torch.save_file(model.state_dict(), file)
    batch = batch_for(model)
    for create in (timm.create_model, create_model):
        assert torch.equal(create(name, num_classes=7, checkpoint_path=file).eval()(batch), model(batch))


@pytest.mark.parametrize("name", NANO)
def test_a_folder_in_the_hubs_form(name, tmp_path: Path) -> None:
    model = build(name, num_classes=5, in_chans=1)
    model.set_input_size((32, 40))
    save_for_hf(model, tmp_path, safe_serialization=True)
    assert {"config.json", "model.safetensors"} <= {p.name for p in tmp_path.iterdir()}
    loaded = create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    batch = images(2, 1, 32, 40)
    assert loaded.num_classes == 5
    assert size_of(loaded) == (32, 40)
    assert torch.equal(loaded(batch), model(batch))


@pytest.mark.parametrize("config", [None, "{}", "[1]"])
def test_a_folder_in_another_form_is_one_line(config: str | None, tmp_path: Path) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(
        UserError, match=r"local-dir:\S+ cannot be opened \(.*\); give a folder that timm's save_for_hf"
    ):
        create_model(f"local-dir:{tmp_path}")


@pytest.mark.parametrize("name", NANO)
def test_an_argument_that_nobody_has(name) -> None:
    with pytest.raises(UserError, match="no argument 'img_sise'"):
        create_model(name, img_sise=32)
    with pytest.raises(UserError, match=f"{name} has no pretrained weights"):
        timm.create_model(name, pretrained=True)
