"""Segmenters: published counts, the authors' layout, any size, windows' geometry, twins that differ in their block."""

import pytest
import timm
import torch

from tokenmix import UserError, create_model, list_models
from tokenmix.checkpoints import convert, rename

HEAD = 9 * 2048 * 512 + 2 * 512 + 9 * 512 * 256 + 2 * 256 + 256 * 21 + 21
"""The two 3 x 3 convolutions with their BatchNorms, and the classifier of 21 classes."""
T8 = {"layers": (1, 1, 1, 1), "channels": (8, 8, 16, 16)}


def count(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def small(name: str = "eanet_seg_nano", **kwargs):
    given = {"backbone": "resnet18", "backbone_kwargs": T8, "width": 16, "head_width": 16, "num_classes": 5}
    return create_model(name, **{**given, **kwargs})


@pytest.mark.parametrize("depth", [50, 101])
def test_counts_of_the_published_networks(depth: int) -> None:
    model = create_model(f"eanet_seg_resnet{depth}", device="meta")
    resnet = timm.create_model(f"resnet{depth}s", num_classes=0, device="meta")
    assert count(model.context) == 591_360
    assert count(model) == count(resnet) + 591_360 + HEAD
    tied = create_model(f"eanet_seg_resnet{depth}", tie="hard", device="meta")
    assert count(tied.context) == 558_592
    # The stem that the authors' ResNet has, and what it was pretrained as.
    assert [c.out_channels for c in model.backbone.conv1 if isinstance(c, torch.nn.Conv2d)] == [64, 64, 128]


def test_block_takes_the_published_multiply_adds() -> None:
    """9.66 G at 512 x 128 x 128, which is an image of 1024 px at output stride 8; the self-attention twin 292 G."""
    costs = {}
    for mixer in ("external", "self", "none"):
        model = create_model("eanet_seg_resnet50", mixer=mixer, img_size=1024, device="meta")
        backbone, block, head = model.cost_table()
        costs[mixer] = (backbone.macs, block.macs, head.macs)
    assert costs["external"][1] == 128**2 * (2 * 512**2 + 2 * 512 * 64) == 9_663_676_416
    assert costs["self"][1] / 1e9 == pytest.approx(292.06, abs=0.01)
    assert costs["none"][1] == 0
    assert model.macs() == sum(costs["none"])
    assert len({(backbone, head) for backbone, _, head in costs.values()}) == 1
    assert costs["none"][2] == 128**2 * (9 * 2048 * 512 + 9 * 512 * 256 + 256 * 21)


@pytest.mark.parametrize(("stride", "dilations"), [(8, ((1, 2, 2), (2, 8, 16))), (16, ((1, 1, 1), (1, 4, 8)))])
def test_strides_and_multi_grid_of_the_released_network(stride: int, dilations: tuple) -> None:
    model = create_model("eanet_seg_resnet50", output_stride=stride, device="meta").eval()
    found = tuple(
        tuple(block.conv2.dilation[0] for block in list(stage)[:3])
        for stage in (model.backbone.layer3, model.backbone.layer4)
    )
    assert found == dilations
    (features,) = model.backbone(torch.empty(1, 3, 129, 193, device="meta"))
    assert features.shape == (1, 2048, -(-129 // stride), -(-193 // stride))


def authors_keys(model) -> dict[str, torch.Tensor]:
    """Our weights under the names and in the shapes of the released network."""
    stages = {f"layer{i}": f"extractor.{3 + i}" for i in range(1, 5)}
    names = {
        "backbone.conv1": "extractor.0",
        "backbone.bn1": "extractor.1",
        "reduce.0": "fc0.conv",
        "reduce.1": "fc0.bn",
        "context.conv1": "linu.conv1",
        "context.conv2": "linu.conv2.0",
        "context.norm": "linu.conv2.1",
        "head.0": "fc1.0.conv",
        "head.1": "fc1.0.bn",
        "classifier": "fc2",
        **{f"backbone.{ours}": theirs for ours, theirs in stages.items()},
    }
    found = {}
    for key, value in model.state_dict().items():
        if key == "context.memory.key_memory":
            found["linu.linear_0.weight"] = value[:, :, None]
        elif key == "context.memory.value_memory":
            found["linu.linear_1.weight"] = value.T[:, :, None]
        else:
            ours = next(name for name in names if key.startswith(f"{name}."))
            found[names[ours] + key[len(ours) :]] = value
    return found


def test_the_authors_whole_network_loads_and_answers_the_same() -> None:
    torch.manual_seed(0)
    kwargs = {"layers": (1, 1, 1, 1)}
    first, second = (
        create_model("eanet_seg_resnet50", backbone_kwargs=kwargs, num_classes=3, num_slots=8).eval() for _ in range(2)
    )
    theirs = authors_keys(first)
    assert "extractor.0.0.weight" in theirs
    assert "extractor.7.0.conv2.weight" in theirs
    second.load_state_dict(convert(theirs, "eanet", to=second))
    images = torch.randn(1, 3, 33, 41)
    with torch.no_grad():
        assert torch.equal(first(images), second(images))
    assert rename(theirs, second).keys() == second.state_dict().keys(), "for --init-from"
    parallel = {f"module.{key}": value for key, value in theirs.items()}
    for found in (convert(parallel, "eanet", to=second), rename(parallel, second)):
        assert all(torch.equal(found[key], value) for key, value in second.state_dict().items())
    old = {key: value for key, value in theirs.items() if "num_batches_tracked" not in key}
    assert convert(old, "eanet", to=second).keys() == second.state_dict().keys()
    del theirs["fc2.bias"]
    with pytest.raises(UserError, match=r"lacks 'classifier\.bias'"):
        convert(theirs, "eanet", to=second)


@pytest.mark.parametrize("name", ["eanet_seg_nano", "fpn_seg_nano"])
@pytest.mark.parametrize("mixer", ["external", "self", "none"])
def test_any_size_and_gradients_everywhere(name: str, mixer: str) -> None:
    torch.manual_seed(0)
    model = small(name, mixer=mixer)
    logits = model(torch.randn(2, 3, 40, 56))
    assert logits.shape == (2, 5, 40, 56)
    logits.square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert model.eval()(torch.randn(1, 3, 37, 61)).shape == (1, 5, 37, 61)


def test_twins_share_all_but_their_block() -> None:
    shapes = {}
    for mixer in ("external", "self", "none"):
        state = small(mixer=mixer).state_dict()
        shapes[mixer] = {key: value.shape for key, value in state.items() if not key.startswith("context.")}
    assert shapes["external"] == shapes["self"] == shapes["none"]


def test_maps_of_the_block() -> None:
    images = torch.randn(2, 3, 32, 48)
    (slots,) = small(num_slots=6).eval().attention_maps(images)
    assert (slots.name, slots.kind, slots.grid, slots.map.shape) == ("context", "slots", (8, 12), (2, 1, 96, 6))
    assert torch.allclose(slots.map.sum(-1), torch.ones(()), atol=1e-5)
    model = small(mixer="self").eval()
    (pairs,) = model.attention_maps(images)
    assert pairs.map.shape == (2, 1, 96, 96)
    # The map is the one that the fused path used.
    x = model.before_context(model.forward_features(images))
    mixer = model.context.mixer
    value = mixer.qkv(x.flatten(2).mT).unsqueeze(1).chunk(3, -1)[2]
    mixed = mixer.proj((pairs.map @ value).squeeze(1)).mT.unflatten(2, (8, 12))
    with torch.no_grad():
        expected = torch.relu(x + model.context.norm(mixed))
        assert torch.allclose(model.context(x), expected, atol=1e-5)
    (several,) = small(mixer="self", mixer_kwargs={"num_heads": 2}).attention_maps(images)
    assert several.map.shape == (2, 2, 96, 96)
    assert small(mixer="none").attention_maps(images) == []


@pytest.mark.parametrize("backbone", ["lavit_nano", "gmlp_nano"])
def test_our_backbones_in_a_pyramid(backbone: str) -> None:
    torch.manual_seed(0)
    kwargs = {"backbone": backbone, "img_size": 32, "width": 16, "head_width": 16, "num_classes": 5}
    model = create_model("fpn_seg_nano", **kwargs).eval()
    assert model.fixed_size
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 5, 32, 32)
    assert len(model.attention_maps(torch.randn(1, 3, 32, 32))) > 1
    before = model.macs()
    model.set_input_size(64)
    assert model(torch.randn(1, 3, 64, 64)).shape == (1, 5, 64, 64)
    assert model.macs() > 4 * before, "attention or gates grow faster than the image"
    with pytest.raises(UserError, match="images"):
        model(torch.randn(1, 3, 32, 32))


def test_a_large_pyramid_has_every_scale() -> None:
    model = create_model("fpn_seg_lavit_tiny", device="meta")
    assert [model.feature_info[i]["reduction"] for i in model.levels] == [4, 8, 16, 32]
    assert [len(list(steps)) for steps in model.ups] == [1, 1, 2, 3]


def test_names() -> None:
    assert list_models("fpn_seg_lavit_*") == ["fpn_seg_lavit_tiny", "fpn_seg_lavit_small", "fpn_seg_lavit_base"]
    assert "eanet_seg_nano" in list_models(task="semantic-segmentation")
    model = create_model("eanet_seg_nano", mixer="none", device="meta")
    assert (model.mixer_name, model.num_tokens) == ("none", 256)
    model.reset_classifier(3)
    assert model.get_classifier().out_channels == model.num_classes == 3


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"mixer": "gating"}, "'gating' learns a matrix over tokens"),
        ({"mixer": "self", "num_slots": 8}, "num_slots=8 only applies to mixer='external'"),
        ({"mixer": "self", "mixer_kwargs": {"num_slots": 8}}, "mixer 'self' has no argument 'num_slots'"),
        ({"mixer": "none", "mixer_kwargs": {"num_heads": 4}}, "the mixer is 'none'"),
        ({"output_stride": 2}, r"output_stride must be one of \(4, 8, 16\)"),
        ({"backbone": "resnet_18"}, "unknown backbone 'resnet_18'"),
        ({"backbone": "lavit_tiny"}, "has no dilated form"),
        ({"backbone": "vit_tiny_patch16_224", "stem": "large", "output_stride": 8}, "cannot be used for segmentation"),
        ({"backbone": "resnet50s"}, "ResNet whose stem is one convolution"),
        ({"upsampling": "cubic"}, "unknown upsampling 'cubic'"),
        ({"depth": 3}, "has no argument 'depth'"),
    ],
)
def test_mistakes(kwargs: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        create_model("eanet_seg_nano", device="meta", **kwargs)


def test_a_name_that_does_not_exist() -> None:
    with pytest.raises(UserError, match="unknown model 'eanet_seg'"):
        create_model("eanet_seg")
    with pytest.raises(UserError, match="takes images"):
        small()(torch.zeros(1, 1, 32, 32))
