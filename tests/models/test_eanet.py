"""EANet for classification: our own counts, a ResNet's answers at the start, the block in its place."""

import pytest
import timm
import torch

from tokenmix import UserError, create_model
from tokenmix.checkpoints import convert
from tokenmix.models import EANet

BLOCK = 2 * 2048**2 + 2048 + 2 * 64 * 2048 + 2 * 2048
"""Both projections, the first one's bias, both memories and the BatchNorm, at the width of a ResNet's last stage."""


@pytest.mark.parametrize("backbone", ["resnet50", "resnet101"])
def test_count_is_a_resnet_and_the_block(backbone) -> None:
    model = create_model(f"eanet_{backbone}", device="meta")
    plain = sum(p.numel() for p in timm.create_model(backbone, device="meta").parameters())
    assert sum(p.numel() for p in model.parameters()) == plain + BLOCK
    tied = create_model(f"eanet_{backbone}", tie="hard", device="meta")
    assert sum(p.numel() for p in tied.parameters()) == plain + BLOCK - 64 * 2048


def test_segmentation_block_has_the_published_count() -> None:
    """The released block at 512 channels; two memories, or one as in the paper's 0.55 M."""
    for tie, count in (("none", 591_360), ("hard", 558_592)):
        widths = {"channels": (64, 128, 256, 512)}
        model = EANet(backbone="resnet18", backbone_kwargs=widths, tie=tie, device="meta")
        block = model.context.mixer
        assert sum(p.numel() for p in block.parameters()) == count
        assert block.macs(128 * 128) == 128 * 128 * (2 * 512**2 + 2 * 512 * 64)


def test_multiply_adds_are_those_of_a_resnet_and_the_block() -> None:
    model = create_model("eanet_resnet50", device="meta")
    # He et al. print 3.8 G for their ResNet-50; timm's has the stride in the 3 x 3 convolutions, 4.1 G.
    backbone = model.macs() - model.context.mixer.macs(49)
    assert backbone / 1e9 == pytest.approx(4.09, rel=0.01)
    model.set_input_size(448)
    assert model.num_tokens == 196
    assert model.macs() == pytest.approx(4 * (backbone + BLOCK * 49), rel=0.01)


def test_starts_as_the_backbone() -> None:
    torch.manual_seed(0)
    model = create_model("eanet_nano").eval()
    batch = torch.randn(2, 3, 32, 32)
    assert torch.equal(model(batch), model.backbone(batch))
    with torch.no_grad():
        model.context.mixer.norm.weight.fill_(1.0)
    assert not torch.allclose(model(batch), model.backbone(batch), atol=1e-3)


def test_features_end_behind_the_block() -> None:
    torch.manual_seed(0)
    model = create_model("eanet_nano").eval()
    with torch.no_grad():
        model.context.mixer.norm.weight.fill_(1.0)
    batch = torch.randn(2, 3, 32, 32)
    final, maps = model.forward_intermediates(batch)
    assert torch.equal(maps[-1], model.forward_features(batch))
    assert torch.equal(final, maps[-1])
    assert torch.equal(maps[-1], model.context(model.backbone.forward_features(batch)))
    assert [m.shape[1] for m in maps] == [64, 32, 32, 64, 128]
    assert [32 // m.shape[2] for m in maps] == [info["reduction"] for info in model.feature_info] == [1, 1, 2, 4, 8]
    sequences = model.forward_intermediates(batch, output_fmt="NLC", intermediates_only=True)
    assert all(torch.equal(y.transpose(1, 2).view_as(m), m) for y, m in zip(sequences, maps, strict=True))
    with pytest.raises(UserError, match="no final norm"):
        model.forward_intermediates(batch, norm=True)


def test_a_head_needs_a_pooling() -> None:
    with pytest.raises(UserError, match="give num_classes=0"):
        create_model("eanet_nano", global_pool="", num_classes=10)
    model = create_model("eanet_nano", num_classes=3)
    with pytest.raises(UserError, match="give num_classes=0"):
        model.reset_classifier(7, "")
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 3)
    model.reset_classifier(0, "")
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 128, 4, 4)


def test_the_map_of_the_block() -> None:
    model = create_model("eanet_nano").eval()
    (entry,) = model.attention_maps(torch.randn(2, 3, 32, 48))
    assert (entry.name, entry.kind, entry.grid) == ("context.mixer", "slots", (4, 6))
    assert entry.map.shape == (2, 1, 24, 32)
    assert torch.allclose(entry.map.sum(-1), torch.ones(()), atol=1e-5)


def test_learns() -> None:
    torch.manual_seed(0)
    model = create_model("eanet_nano", num_classes=4)
    images, labels = torch.randn(8, 3, 32, 32), torch.arange(8) % 4
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(8):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert all(p.grad is not None for p in model.parameters())
    assert model.context.mixer.norm.weight.abs().max() > 0


def test_the_authors_block_loads_into_its_place() -> None:
    model = EANet(backbone="resnet18", img_size=64, num_classes=3)
    block = model.context.mixer
    shapes = {
        "conv1.weight": (512, 512, 1, 1),
        "conv1.bias": (512,),
        "linear_0.weight": (64, 512, 1),
        "linear_1.weight": (512, 64, 1),
        "conv2.0.weight": (512, 512, 1, 1),
        "conv2.1.weight": (512,),
        "conv2.1.bias": (512,),
        "conv2.1.running_mean": (512,),
        "conv2.1.running_var": (512,),
    }
    theirs = {f"head.0.{key}": torch.full(shape, 0.5) for key, shape in shapes.items()}
    theirs["head.0.conv2.1.num_batches_tracked"] = torch.tensor(3)
    block.load_state_dict(convert(theirs, "eanet", to=block))
    assert all((p == 0.5).all() for p in block.parameters())
    del theirs["head.0.conv2.1.num_batches_tracked"]
    old = convert({f"module.{key}": value for key, value in theirs.items()}, "eanet", to=block)
    block.load_state_dict(old)
    assert block.norm.num_batches_tracked == 0


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"backbone": "vit_tiny_patch16_224"}, "not one of timm's ResNets"),
        ({"stem": "tiny"}, "unknown stem 'tiny'"),
        ({"global_pool": "max"}, "global_pool 'max'"),
        ({"tie": "soft"}, "unknown tie 'soft'"),
    ],
)
def test_mistakes(kwargs, message) -> None:
    with pytest.raises(UserError, match=message):
        EANet(**{"backbone": "resnet18", "device": "meta", **kwargs})
